"""CPU seconds of a process and its children."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from pipeline.engine.usage import Usage, tree_cpu_s

BUSY = """
import time
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("done", flush=True)
input()
"""


def test_a_child_counts_with_its_parent_and_not_with_itself_twice():
    before_s = tree_cpu_s(os.getpid())
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        alone_s = tree_cpu_s(child.pid)
        spent_s = tree_cpu_s(os.getpid()) - before_s
        child.communicate("\n")
    assert 0.28 <= alone_s < 5
    assert alone_s - 0.05 <= spent_s < alone_s + 1


def test_it_is_read_at_most_once_in_a_while():
    usage = Usage(every_s=60.0)
    own_s, all_s = usage.read()
    assert 0 < own_s <= time.process_time() and all_s > 0
    assert usage.read() == (0.0, 0.0)
