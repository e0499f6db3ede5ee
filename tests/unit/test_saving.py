"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from pipeline.engine.driver import Driver
from pipeline.errors import CheckpointError, Problem, StageError
from pipeline.executors import saving
from pipeline.executors.host_memory import free_bytes
from pipeline.executors.local import LocalExecutor
from pipeline.executors.saving import Saving
from pipeline.forks import Original
from pipeline.plan.planner import plan
from pipeline.record import checkpoint, trace
from pipeline.rundir import RunDir
from stages.backends import trainer
from tests.unit import tiny_graph

WAIT_S = 60.0


class Runner:
    """A stage's state; `write` says when the disk may be done."""

    def __init__(self, size_bytes: int = 4, fails: Exception | None = None) -> None:
        self.state, self.size_bytes, self.fails = "old", size_bytes, fails
        self.may_write = threading.Event()

    def save(self, folder: Path) -> None:
        (folder / "state").write_text(self.state)

    def restore(self, folder: Path) -> None:
        self.state = (folder / "state").read_text()

    def saved_bytes(self) -> int:
        return self.size_bytes

    def copied(self):
        copy = self.state

        def write(folder: Path) -> None:
            assert self.may_write.wait(WAIT_S)
            if self.fails:
                raise self.fails
            (folder / "state").write_text(copy)

        return write


def failed(stage, error):
    return StageError(Problem(where=stage, what=str(error), why="", fix=""))


def test_a_copy_is_written_while_the_state_changes(tmp_path):
    runner, worker = Runner(), Saving(failed, Original())
    worker.hold({"train": runner}, tmp_path, 1)
    runner.state = "new"
    assert not (tmp_path / "train/state").exists()
    runner.may_write.set()
    worker.finish()
    assert worker.files(["train"], tmp_path) == {"train/state": 3}
    assert (tmp_path / "train/state").read_text() == "old"
    worker.finish()  # nothing is left


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_room_for_the_copies_of_all_ranks_it_is_written_at_once(tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(saving, "free_bytes", lambda: 1000)
    fits = int(1000 * saving.ROOM) // ranks
    for size_bytes, copies in ((fits, True), (fits + 1, False)):
        runner, worker = Runner(size_bytes), Saving(failed, Original())
        place = tmp_path / str(size_bytes)
        worker.hold({"train": runner}, place, ranks)
        assert (place / "train/state").exists() is not copies
        runner.may_write.set()
        worker.finish()
        assert (place / "train/state").read_text() == "old"


def test_a_runner_that_makes_no_copy_is_saved_at_once(tmp_path, monkeypatch):
    runner, worker = Runner(), Saving(failed, Original())
    monkeypatch.setattr(runner, "copied", lambda: None)
    worker.hold({"train": runner}, tmp_path, 1)
    assert (tmp_path / "train/state").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(28, "No space left on device"), CheckpointError, "No space left on device"),
        (ArithmeticError("state is broken"), StageError, "train: state is broken"),
        (FileNotFoundError(2, "No such file", "/a/file/of/the/user"), StageError, "train: .*/a/file/of/the/user"),
    ],
)
def test_a_write_that_fails_is_the_error_of_whoever_waits(tmp_path, error, kind, text):
    runner, worker = Runner(fails=error), Saving(failed, Original())
    worker.hold({"train": runner}, tmp_path, 1)
    runner.may_write.set()
    with pytest.raises(kind, match=text):
        worker.finish()


def leave_nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def leave_a_link(folder: Path) -> None:
    leave_nothing(folder)
    folder.symlink_to(folder.parent)


ODD = {
    "a link to a file": (lambda folder: (folder / "x").symlink_to("/etc/passwd"), "train/x: .* is a symbolic link"),
    "a link to a folder": (lambda folder: (folder / "x").symlink_to("/etc"), "train/x: .* is a symbolic link"),
    "a pipe": (lambda folder: os.mkfifo(folder / "x"), "train/x: .* is neither a file nor a folder"),
    "a name": (lambda folder: (folder / "\udcff").touch(), r"train/\\udcff: .* has a name that is not UTF-8"),
    "nothing": (leave_nothing, "train: .* is not there, or no folder"),
    "another folder": (leave_a_link, "train: .* is not there, or no folder"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("copies", [True, False])
def test_what_no_resume_could_read_is_refused_when_it_is_written(tmp_path, monkeypatch, odd, copies):
    leave, said = ODD[odd]
    runner, worker = Runner(), Saving(lambda _, error: error, Original())
    monkeypatch.setattr(runner, "save", leave)
    monkeypatch.setattr(runner, "copied", lambda: leave if copies else None)
    worker.hold({"train": runner}, tmp_path, 1)
    worker.finish()
    with pytest.raises(CheckpointError, match=said):
        worker.files(["train"], tmp_path)
    draft = checkpoint.Draft(RunDir(tmp_path / "run").create(), 1)
    (draft.folder / "train").mkdir()
    leave(draft.folder / "train")
    if odd not in ("nothing", "another folder"):  # of which only the stage's worker knows
        with pytest.raises(CheckpointError, match=said):
            draft.finish(graph="g", next_group=0, seed=0)


@pytest.mark.parametrize("size", ["12", None, float("nan"), float("inf"), -1])
def test_a_size_is_a_number_of_bytes(tmp_path, size):
    worker = Saving(lambda _, error: error, Original())
    with pytest.raises(StageError, match=r"saved_bytes\(\): it returned .* Fix: return a number of bytes, 0 or more"):
        worker.size_bytes({"train": Runner(size)})
    with pytest.raises(StageError, match="it returned"):
        worker.hold({"train": Runner(size)}, tmp_path, 1)
    assert worker.size_bytes({"train": Runner(3), "other": Runner(4.0)}) == 7


def memory(folder: Path, available_kib: int, **groups: tuple[str, int, int]) -> dict[str, Path]:
    """Lay out /proc and the control groups of a process: (limit, in use, droppable) by the group's path."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable: {available_kib} kB\n")
    (proc / "self/cgroup").write_text("0::/job/step\n")
    for name, (limit, used, droppable) in groups.items():
        place = cgroups / name.replace("_", "/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\n")
    return {"proc": proc, "cgroups": cgroups}


def test_free_memory_is_what_the_system_and_each_group_leave(tmp_path):
    assert free_bytes(**memory(tmp_path / "a", 8)) == 8192
    assert free_bytes(**memory(tmp_path / "b", 8, job_step=("max", 10, 0), job=("5000", 2000, 500))) == 3500
    assert free_bytes(**memory(tmp_path / "c", 8, job_step=("1000", 1200, 0))) == 0
    assert free_bytes(tmp_path / "nowhere", tmp_path) == 0
    old = memory(tmp_path / "d", 8)
    (old["proc"] / "self/cgroup").write_text("7:cpu:/job\n6:memory:/job\n")
    place = old["cgroups"] / "memory/job"
    place.mkdir(parents=True)
    for name, text in (("limit_in_bytes", "900"), ("usage_in_bytes", "500")):
        (place / f"memory.{name}").write_text(text)
    (place / "memory.stat").write_text("total_inactive_file 100\n")
    assert free_bytes(**old) == 500


class Disk:
    """Holds the writes of tensors up until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write, self.writes = threading.Event(), 0
        self._write = trainer.write_tensors
        monkeypatch.setattr(trainer, "write_tensors", self)

    def __call__(self, tensors, path):
        assert self.may_write.wait(WAIT_S)
        self.writes += 1
        self._write(tensors, path)


def run(folder: Path, on_step=None, **schedule) -> tuple[RunDir, list[trace.TraceEvent]]:
    graph, run_dir = tiny_graph.graph(**schedule), RunDir(folder).create()
    Driver(graph, plan(graph)[0], LocalExecutor(), run_dir=run_dir, on_step=on_step).execute()
    return run_dir, [event for _, event in trace.read(run_dir.events)]


def kinds(events, *wanted):
    return [(type(event).__name__, event.step) for event in events if isinstance(event, wanted)]


def files(run_dir: RunDir, step: int) -> dict[str, bytes]:
    folder = run_dir.checkpoint(step)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_that_of_its_step(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    checkpoints = {"steps": 4, "checkpoint_every": 2}
    slow, events = run(tmp_path / "slow", lambda step, _: step == 2 and disk.may_write.set(), **checkpoints)
    told = kinds(events, trace.Held, trace.Trained, trace.Checkpointed)
    assert told[:4] == [("Trained", 0), ("Trained", 1), ("Held", 1), ("Trained", 2)]
    assert [step for kind, step in told if kind == "Held"] == [1, 3]
    assert [step for kind, step in told if kind == "Checkpointed"] == [1, 3] and told[-1] == ("Checkpointed", 3)
    monkeypatch.setattr(saving, "free_bytes", lambda: 0)
    at_once, _ = run(tmp_path / "at once", **checkpoints)
    for step in (2, 4):
        assert files(slow, step) == files(at_once, step)
        assert checkpoint.read(slow, step)


def test_a_disk_that_fails_while_training_goes_on_ends_the_run_and_leaves_no_half(tmp_path, monkeypatch):
    def refuse(tensors, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(trainer, "write_tensors", refuse)
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors: .* No space left on device"):
        run(tmp_path, steps=3, checkpoint_every=1)
    assert not list(RunDir(tmp_path).checkpoints.iterdir())


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)

    def fail(step, _):
        if step == 2:
            threading.Timer(0.2, disk.may_write.set).start()
            raise StageError(Problem(where="test", what="the run fails", why="", fix=""))

    with pytest.raises(StageError, match="the run fails"):
        run(tmp_path, fail, steps=4, checkpoint_every=2)
    assert RunDir(tmp_path).checkpoint_steps() == [2]
