"""vLLM's engine starts as a fork of a process that has imported its modules, and ends with its owner."""

import os
import signal
import subprocess
import sys

from tests.waiting import until

CREATE = """
import multiprocessing, os, signal, sys, time
from stages.backends.vllm import environment, processes

def seen(pipe):
    pipe.send((os.environ.get("GIVEN"), os.environ[processes.METHOD], multiprocessing.parent_process().pid,
               "wave" in sys.modules))
    time.sleep(600)

if __name__ == "__main__":
    processes.IMPORTED, processes.ON_CPU = ("wave",), ()
    processes.import_ahead(gpus=False)
    os.environ |= {"GIVEN": "late", environment.OWNER: str(os.getpid())}
    mine, theirs = multiprocessing.Pipe()
    child = processes.forks().Process(target=seen, args=(theirs,))
    child.start()
    assert mine.poll(60)
    assert mine.recv() == ("late", "fork", os.getpid(), True)
"""
KILLED = """
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL, child.exitcode
"""
ORPHANED = """
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def created(folder, end):
    script = folder / "creator.py"
    script.write_text(CREATE + end)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)


def test_a_forked_process_has_the_modules_and_its_creators_environment(tmp_path):
    done = created(tmp_path, KILLED)
    assert done.returncode == 0, done.stderr


def test_a_forked_process_ends_with_its_owner(tmp_path):
    done = created(tmp_path, ORPHANED)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not os.path.exists(f"/proc/{int(done.stdout)}"))
