"""A checkpoint's files while they are written and removed, whatever happens in between."""

import os
from contextlib import contextmanager

import pytest

from pipeline.record import checkpoint
from pipeline.rundir import RunDir
from tests.drafts import write_checkpoint
from tests.errors.harness import command, live_text

KEPT = "Schedule(steps=steps, seed=seed, checkpoint_every=1, keep_checkpoints=2, keep_every=3)"
LOCAL = ("graph.py", "--executor", "local", "--run-dir", "run")


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def ends_at(number):
    """Raise Killed in the `number`-th call that changes a folder. Yields the list of calls."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, _counted(name, getattr(os, name), calls, number))
        yield calls


def _counted(name, real, calls, number):
    def call(*given, **named):
        calls.append(name)
        if len(calls) == number:
            raise Killed
        return real(*given, **named)

    return call


def save(folder):
    for name in ("weights", "moments"):
        (folder / name).write_bytes(name.encode())


def write(run, *steps):
    for step in steps:
        write_checkpoint(run, graph="g", steps=step, next_group=0, seed=0, save=save)


def kept(run, *steps, keep, every=0):
    """Return the checkpoints that stay when those after `steps` are written one after the other."""
    for step in steps:
        write(run, step)
        for old in checkpoint.old(run, step, keep=keep, every=every):
            checkpoint.remove(run.checkpoint(old))
    return run.checkpoint_steps()


def test_a_checkpoint_has_its_name_only_when_it_is_complete(tmp_path):
    run = RunDir(tmp_path / "run").create()
    final = run.checkpoint(3)
    folders = []

    def save(folder):
        (folder / "weights").write_bytes(b"half")
        folders.append(folder)
        assert not final.exists() and run.checkpoint_steps() == []
        if len(folders) == 1:
            raise OSError("no space left on device")

    written = {"graph": "g", "steps": 3, "next_group": 0, "seed": 0, "save": save}
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(run, **written)
    assert run.checkpoint_steps() == [], "an interrupted one is not found"
    assert write_checkpoint(run, **written)[0] == final
    assert run.checkpoint_steps() == [3] and checkpoint.read(run)[0] == final
    assert final not in folders and not folders[-1].exists()


def test_the_newest_checkpoints_stay_and_every_mth_for_good(tmp_path):
    assert kept(RunDir(tmp_path / "a").create(), *range(2, 22, 2), keep=3) == [16, 18, 20]
    assert kept(RunDir(tmp_path / "b").create(), *range(2, 22, 2), keep=2, every=6) == [6, 12, 18, 20]
    assert not [path for path in tmp_path.rglob(".*")], "nothing of the removed ones is left"


def test_checkpoints_of_later_steps_do_not_count_until_they_are_written_again(tmp_path):
    run = RunDir(tmp_path).create()
    write(run, 2, 4, 6, 8)
    assert kept(run, 5, keep=2) == [4, 5, 6, 8]
    assert kept(run, 7, keep=2) == [6, 7, 8]


def test_a_checkpoint_of_other_sizes_is_not_one_of_those_that_stay(tmp_path):
    run = RunDir(tmp_path).create()
    write(run, 1, 2, 3)
    (run.checkpoint(3) / "weights").write_bytes(b"")
    assert kept(run, 4, keep=2) == [2, 3, 4]
    assert kept(run, 5, keep=2) == [4, 5]


def test_whenever_the_process_ends_each_checkpoint_is_whole_and_the_newest_stays(tmp_path):
    """One that exists already is written again, and two are removed; every call in between may be the last one."""
    number, ended = 0, True
    while ended:
        number += 1
        run = RunDir(tmp_path / str(number)).create()
        write(run, 1, 2, 3, 4)
        with ends_at(number) as calls:
            try:
                kept(run, 4, keep=2)
                ended = False
            except Killed:
                pass
        found = run.checkpoint_steps()
        assert [checkpoint.read(run, step)[1].steps for step in found] == found
        assert found[-1] >= 3
        checkpoint.clean(run)
        assert kept(run, 5, keep=2) == [4 if 4 in found else 3, 5]
        assert {path.name for path in run.checkpoints.iterdir()} == {f"step_{s:06d}" for s in run.checkpoint_steps()}
    assert {"rename", "unlink", "rmdir", "fsync"} <= set(calls)


def test_a_run_keeps_what_its_schedule_says_and_resumes_behind_a_damaged_one(tmp_path):
    (tmp_path / "graph.py").write_text(live_text(schedule=KEPT))
    assert command(tmp_path, *LOCAL, "--steps", "8")[0] == 0
    run = RunDir(tmp_path / "run")
    assert run.checkpoint_steps() == [3, 6, 7, 8]
    (run.checkpoint(8) / "count/count.json").write_text("damaged")
    code, out, err = command(tmp_path, *LOCAL, "--steps", "9", "--resume")
    assert code == 0, err
    assert "live: 2 steps of 4 x 1 samples" in out
    assert run.checkpoint_steps() == [3, 6, 8, 9]


def test_without_a_number_every_checkpoint_stays(tmp_path):
    (tmp_path / "graph.py").write_text(live_text())
    assert command(tmp_path, *LOCAL, "--steps", "4")[0] == 0
    assert RunDir(tmp_path / "run").checkpoint_steps() == [1, 2, 3, 4]
