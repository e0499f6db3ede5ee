"""What is left of the session of a run's Ray is killed, also what a process started while it was being killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.executors import keeper
from tests.sessions import wait_until_empty

SESSION = "import subprocess, time; subprocess.Popen(['sleep', '100']); print('up', flush=True); time.sleep(100)"


def started() -> subprocess.Popen[bytes]:
    """Return a process that leads a session of two."""
    process = subprocess.Popen([sys.executable, "-c", SESSION], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout and process.stdout.readline() == b"up\n"
    return process


def test_a_process_that_was_not_there_at_the_first_look_is_killed_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process, members, looks = started(), keeper.members, []

    def late(session: int) -> Iterator[int]:
        looks.append(session)
        return (pid for pid in members(session) if len(looks) > 1 or pid == process.pid)

    monkeypatch.setattr(keeper, "members", late)
    keeper._kill(process, str(tmp_path))
    assert looks[0] == process.pid and len(looks) > 2
    wait_until_empty(process.pid, 1.0)


def test_a_process_that_has_ended_and_is_not_reaped_is_no_member() -> None:
    process = started()
    assert len(list(keeper.members(process.pid))) == 2
    for pid in keeper.members(process.pid):
        subprocess.run(["kill", "-9", str(pid)], check=True)
    wait_until_empty(process.pid, 5.0)
    process.wait()


def test_what_ray_prints_when_it_ends_goes_nowhere_once_the_driver_is_gone(tmp_path: Path) -> None:
    """A Ray whose last words come too late: the real one has some only now and then."""
    (tmp_path / "ray.py").write_text(
        "from types import SimpleNamespace as Named\n"
        "init = lambda: None\n"
        "get_runtime_context = lambda: Named(gcs_address='here')\n"
        "shutdown = lambda: print('left over', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", keeper.__file__, keeper.KEEP], env={"PYTHONPATH": str(tmp_path)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write("{}\n")
    process.stdin.flush()
    assert "here" in process.stdout.readline()
    process.stdout.close()
    process.stdin.close()
    assert (process.stderr.read(), process.wait(20)) == ("", 0)


@pytest.mark.parametrize(("late", "starts"), [(1, 2), (2, 2), (0, 1)])
def test_a_ray_that_is_late_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], late: int, starts: int
) -> None:
    """A Ray that is late this often, and comes up or has another fault after that."""
    (tmp_path / "ray.py").write_text(
        "import os\n"
        "from types import SimpleNamespace as Named\n"
        f"path = {str(tmp_path / 'starts')!r}\n"
        "def init(**options):\n"
        "    with open(path, 'a') as file:\n"
        "        file.write('.')\n"
        f"    if os.path.getsize(path) <= {late}:\n"
        "        raise Exception('The current node timed out during startup. This could happen because')\n"
        f"    if not {late}:\n"
        "        raise Exception('no such option')\n"
        "get_runtime_context = lambda: Named(gcs_address='here')\n"
        "shutdown = lambda: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if late == 1:
        running = keeper.Keeper.start({})
        assert running.address == "here"
        running.close()
    else:
        with pytest.raises(ConnectionError, match="timed out during startup" if late else "no such option"):
            keeper.Keeper.start({})
    assert len((tmp_path / "starts").read_text()) == starts
    assert capfd.readouterr().err.count("started once more") == starts - 1
