"""CPU seconds of a process and its children."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from pipeline.engine import usage as measured
from pipeline.engine.usage import ProcessTree, Usage

BUSY = """
import time
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print("done", flush=True)
input()
"""


def test_a_child_counts_with_its_parent_and_not_with_itself_twice():
    tree = ProcessTree(os.getpid())
    before_s = tree.cpu_s()
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        alone_s = ProcessTree(child.pid).cpu_s()
        spent_s = tree.cpu_s() - before_s
        child.communicate("\n")
    assert 0.28 <= alone_s < 5
    assert alone_s - 0.05 <= spent_s < alone_s + 1


def test_it_is_read_at_most_once_in_a_while():
    usage = Usage(every_s=60.0)
    own_s, all_s = usage.read()
    assert 0 < own_s <= time.process_time() and all_s > 0
    assert usage.read() == (0.0, 0.0)


def test_a_process_that_is_no_descendant_is_read_once_and_a_new_child_is_found(monkeypatch):
    read: list[int] = []
    stat = measured._stat
    monkeypatch.setattr(measured, "_stat", lambda pid: read.append(pid) or stat(pid))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as other:
        tree = ProcessTree(os.getpid())
        beside = ProcessTree(other.pid)
        assert beside.cpu_s() >= 0 and os.getpid() in read
        read.clear()
        beside.cpu_s()
        assert other.pid in read and os.getpid() not in read
        before_s = tree.cpu_s()
        with subprocess.Popen(
            [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as late:
            assert late.stdout is not None and late.stdout.readline() == "done\n"
            assert tree.cpu_s() - before_s > 0.25
            late.communicate("\n")
        other.communicate("\n")
