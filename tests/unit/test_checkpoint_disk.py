"""A disk that is full or fails while a checkpoint is written, by the workers that train a model and by the driver."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import sys
from collections import Counter, namedtuple
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError
from safetensors import SafetensorError
from transformers import configuration_utils

from pipeline.engine.checkpoints import Folders
from pipeline.engine.journal import Journal, WallClock
from pipeline.errors import CheckpointError, Problem, as_os_error
from pipeline.executors import answers
from pipeline.executors.local import LocalExecutor
from pipeline.executors.worker import WorkerSettings
from pipeline.plan.planner import plan
from pipeline.record import checkpoint, trace
from pipeline.rundir import RunDir
from pipeline.schedule.events import Save
from pipeline.writing import exhausted
from stages.backends.model import tensor_files
from stages.backends.model.build import character_tokenizer
from tests.errors.harness import PROBLEM, SCORE, command, live_text
from tests.unit import tiny_graph

LOCAL = ("graph.py", "--executor", "local", "--run-dir", "run", "--steps", "3")
Usage = namedtuple("Usage", "total used free")


class Disk:
    """Fails with this error in the `first` call that writes, syncs or renames something of a checkpoint and, unless
    `once`, in all later calls, also for other files. Half of what a failing call writes is on the disk."""

    def __init__(self, number: int, first: int, *, once: bool) -> None:
        self.number, self.first, self.once = number, first, once
        self.calls: list[str] = []

    def fails(self, name: str, path: object) -> bool:
        started = bool(self.first) and len(self.calls) >= self.first and not self.once
        if "checkpoints" not in str(path):
            return started
        self.calls.append(name)
        return started or len(self.calls) == self.first

    def error(self, *paths: object) -> OSError:
        return OSError(self.number, os.strerror(self.number), *map(str, paths))


@contextmanager
def largest(size_bytes):
    """Let the system refuse files that are larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def failing(number, first, *, once=True):
    """Let a disk fail within this block."""
    disk = Disk(number, first, once=once)
    mkdir, rename, fsync, save_file = os.mkdir, os.rename, os.fsync, tensor_files.save_file
    write_text, write_bytes = Path.write_text, Path.write_bytes

    def made(path, *rest, **named):
        if not os.path.isdir(path) and disk.fails("mkdir", path):
            raise disk.error(path)
        mkdir(path, *rest, **named)

    def renamed(source, target):
        if disk.fails("rename", target):
            raise OSError(number, os.strerror(number), str(source), None, str(target))
        rename(source, target)

    def synced(descriptor):
        if disk.fails("fsync", os.readlink(f"/proc/self/fd/{descriptor}")):
            raise disk.error()
        fsync(descriptor)

    def saved(tensors, path, metadata):
        save_file(tensors, path, metadata)
        if disk.fails("tensors", path):
            os.truncate(path, path.stat().st_size // 2)
            text = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"
            raise SafetensorError(text)

    def opened(path, mode="r", *rest, **named):
        if "w" in mode and disk.fails("open", path):
            raise disk.error(path)
        return open(path, mode, *rest, **named)

    def texted(path, text):
        if disk.fails("text", path):
            write_text(path, text[: len(text) // 2])
            raise disk.error()
        return write_text(path, text)

    def filled(path, content):
        if disk.fails("bytes", path):
            write_bytes(path, content[: len(content) // 2])
            raise disk.error()
        return write_bytes(path, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", made)
        patch.setattr(os, "rename", renamed)
        patch.setattr(os, "fsync", synced)
        patch.setattr(tensor_files, "save_file", saved)
        patch.setattr(configuration_utils, "open", opened, raising=False)
        patch.setattr(Path, "write_text", texted)
        patch.setattr(Path, "write_bytes", filled)
        yield disk


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    """Workers that hold a small model and its optimizer."""
    graph = tiny_graph.graph()
    planned, _ = plan(graph)
    settings = WorkerSettings(
        partition=planned.partition,
        parts={partition.name: partition.fields for partition in planned.partitions},
        group_size=planned.group_size,
        steps=planned.steps,
        seed=0,
        run_dir=RunDir(tmp_path_factory.mktemp("disk") / "workers").create().path,
    )
    executor = LocalExecutor()
    executor.start(graph, planned, settings, None)
    yield executor
    executor.close()


def folders(executor, run):
    """Return what the driver writes checkpoints with."""
    graph = tiny_graph.graph()
    return Folders(graph, run, executor, Journal(plan(graph)[0], WallClock(), trace.TraceWriter(None)))


def save(executor, run, steps):
    checkpoints = folders(executor, run)
    try:
        checkpoints.save(Save(steps - 1, 4 * steps, ()))
        checkpoints.settle(steps, wait=True)
    finally:
        checkpoints.end(wait=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("number", "word", "once"),
    [
        pytest.param(errno.ENOSPC, "disk space", False, id="full"),
        pytest.param(errno.EIO, "repair the disk", True, id="fails once"),
        pytest.param(errno.ENOSPC, "disk space", True, id="full once", marks=pytest.mark.search),
        pytest.param(errno.EIO, "repair the disk", False, id="fails", marks=pytest.mark.search),
    ],
)
def test_wherever_the_disk_fails_the_old_checkpoint_stays_and_the_error_names_the_file(
    executor, tmp_path, number, word, once
):
    seen, first, failed = Counter(), 0, True
    while failed:
        first += 1
        run = RunDir(tmp_path / str(first)).create()
        (run.checkpoints / ".step_000007.partial" / "model").mkdir(parents=True)  # of a run that was killed
        save(executor, run, 1)
        old = contents(run.checkpoint(1))
        with failing(number, first, once=once) as disk:
            try:
                save(executor, run, 2)
                failed = False
            except CheckpointError as error:
                (problem,) = error.problems
                assert error.exit_code == 6
                assert problem.what == f"a checkpoint could not be written: {os.strerror(number)}"
                assert word in problem.fix
                assert Path(problem.where).is_relative_to(run.checkpoints)
                seen[disk.calls[first - 1], Path(problem.where).name] += 1
        assert contents(run.checkpoint(1)) == old
        steps = run.checkpoint_steps()
        assert [checkpoint.read(run, step)[1].steps for step in steps] == steps
        assert not list(run.checkpoints.glob(".*"))
        save(executor, run, 2)
        assert checkpoint.read(run)[1].steps == 2
    partial = ".step_000002.partial"
    assert seen == {
        ("mkdir", partial): 1,
        ("mkdir", "train"): 1,
        ("mkdir", "model"): 1,
        ("tensors", "weights.safetensors"): 1,
        ("tensors", "optimizer.safetensors"): 1,
        ("text", "learner.json"): 1,
        ("open", "config.json"): 1,
        ("bytes", "tensors.json"): 1,
        **{("fsync", name): 1 for name in ("train", "model", *map(os.path.basename, checkpoint.read(run)[1].files))},
        ("bytes", "manifest.json"): 1,
        ("fsync", "manifest.json"): 1,
        ("fsync", partial): 2,
        ("rename", partial): 1,
        ("fsync", "checkpoints"): 1,
    }


def test_a_checkpoint_that_is_written_again_keeps_its_name_if_that_fails(executor, tmp_path):
    run = RunDir(tmp_path).create()
    save(executor, run, 1)
    with failing(errno.EIO, 0) as disk:
        save(executor, run, 1)
    first = len(disk.calls) - disk.calls[::-1].index("rename")
    assert disk.calls.count("rename") == 2
    for number in (first - 1, first):
        with failing(errno.EIO, number), pytest.raises(CheckpointError):
            save(executor, run, 1)
        assert checkpoint.read(run)[1].steps == 1


def test_a_real_write_that_the_system_refuses_is_named(executor, tmp_path):
    run = RunDir(tmp_path).create()
    with largest(10_000), pytest.raises(CheckpointError, match=r"weights.safetensors: .*: File too large;"):
        save(executor, run, 1)
    assert not list(run.checkpoints.iterdir())
    tokenizer = character_tokenizer("0123456789")
    with largest(100), pytest.raises(OSError, match=f"File too large: '{tmp_path}"), as_os_error(tmp_path):
        tokenizer.save_pretrained(tmp_path / "tokenizer")


def test_nothing_is_written_without_room_for_the_model_or_for_another_one_like_the_last(
    executor, tmp_path, monkeypatch
):
    run = RunDir(tmp_path).create()
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
    with pytest.raises(CheckpointError, match=rf"has {executor.saved_bytes():,} bytes, and 0 are free here") as first:
        save(executor, run, 1)
    assert str(first.value).endswith("there is no earlier one. Fix: free disk space, then --resume")
    assert not list(run.checkpoints.iterdir())
    free = executor.saved_bytes()
    save(executor, run, 1)
    manifest = checkpoint.read(run)[1]
    assert free <= manifest.size_bytes < free + 20_000, "what the learner says is what it writes"
    free = manifest.size_bytes - 1
    with failing(errno.EIO, 0) as disk, pytest.raises(CheckpointError, match=f"{manifest.size_bytes:,} bytes"):
        save(executor, run, 2)
    assert not disk.calls
    free += 1
    save(executor, run, 2)
    save(executor, run, 3)
    assert run.checkpoint_steps() == [1, 2, 3]
    free = 0
    with pytest.raises(CheckpointError, match=r"earlier checkpoints are complete.* keep_?.*fewer checkpoints"):
        save(executor, run, 4)


@pytest.mark.parametrize("first", [2, 3, 5, 8])
def test_a_run_ends_with_one_line_and_code_6_and_resumes_once_there_is_room(tmp_path, first):
    (tmp_path / "graph.py").write_text(live_text())
    assert command(tmp_path, *LOCAL[:-1], "1")[0] == 0
    with failing(errno.ENOSPC, first, once=False):
        code, _, err = command(tmp_path, *LOCAL, "--resume")
    problem, way_on = err.splitlines()
    assert code == 6
    where = PROBLEM.fullmatch(problem)["where"]  # which fails first is open
    assert where.startswith(("run/checkpoints/", "run/samples/"))
    assert "No space left on device" in problem and problem.endswith("Fix: free disk space, then --resume")
    assert way_on.startswith("resume: ")
    assert command(tmp_path, *LOCAL, "--resume")[0] == 0
    assert RunDir(tmp_path / "run").checkpoint_steps()[-1] == 3


@pytest.mark.parametrize(
    ("file", "size_bytes", "what"),
    [
        ("train/elsewhere", 1234, "worker policy.3 wrote it with 1,234 bytes, and the driver does not see it"),
        (
            "train/learner.json",
            99,
            "worker policy.3 wrote it with 99 bytes, and the driver sees 48 bytes of it",
        ),
    ],
)
def test_what_a_worker_wrote_and_the_driver_does_not_see_is_missed(
    executor, tmp_path, monkeypatch, file, size_bytes, what
):
    run, saved = RunDir(tmp_path).create(), executor.saved
    monkeypatch.setattr(executor, "saved", lambda folder: saved(folder) | {"policy.3": {file: size_bytes}})
    monkeypatch.setattr(checkpoint, "SEEN_S", 0.0)
    with pytest.raises(CheckpointError) as raised:
        save(executor, run, 1)
    (problem,) = raised.value.problems
    assert (problem.where, problem.what) == (str(run.checkpoint(1) / file), what)
    assert "--run-dir on storage that all machines share" in problem.fix
    assert not list(run.checkpoints.iterdir())


def test_a_file_that_shows_late_is_waited_for(tmp_path, monkeypatch):
    draft = checkpoint.Draft(RunDir(tmp_path).create(), 1)
    monkeypatch.setattr(checkpoint.time, "sleep", lambda _: (draft.folder / "late").write_bytes(b"12345"))
    draft.see({"policy.0": {"late": 5}})


def test_a_stage_that_cannot_be_saved_is_named(tmp_path):
    (tmp_path / "graph.py").write_text(live_text().replace("json.dumps(self.total)", "json.dumps(self)"))
    code, _, err = command(tmp_path, *LOCAL)
    assert code == 3
    assert "stage 'count' failed to save its state: TypeError: Object of type Counter is not JSON" in err
    assert "Traceback" not in err


def test_a_stage_that_leaves_python_while_it_is_saved_is_named(tmp_path):
    (tmp_path / "graph.py").write_text(live_text().replace("json.dumps(self.total)", "exit(3)"))
    code, _, err = command(tmp_path, *LOCAL)
    assert code == 3
    assert "stage 'count' failed to save its state: SystemExit: 3" in err


def test_a_run_whose_folder_has_gone_says_so_without_a_traceback(tmp_path):
    gone = "__import__('shutil').rmtree('run') or "
    (tmp_path / "graph.py").write_text(live_text().replace("json.dumps(self.total)", f"{gone}json.dumps(self.total)"))
    code, _, err = command(tmp_path, *LOCAL)
    assert code in (3, 6) and "Traceback" not in err
    assert "resume: " in err


def test_a_stage_that_cannot_be_restored_is_named(tmp_path):
    (tmp_path / "graph.py").write_text(live_text())
    assert command(tmp_path, *LOCAL)[0] == 0
    (tmp_path / "graph.py").write_text(live_text().replace("json.loads(", "json.loads('' and "))
    code, _, err = command(tmp_path, *LOCAL, "--resume", "--steps", "9")
    assert code == 3
    assert "stage 'count' failed to restore its state: JSONDecodeError: Expecting value" in err
    assert "Traceback" not in err


def test_an_actor_passes_on_its_error(monkeypatch):
    full = CheckpointError(Problem(where="a", what="b", why="c", fix="d"))

    def get(refs, timeout):
        raise RayTaskError("save", "Traceback ...", full)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(CheckpointError) as raised:
        answers.get_all([], "save step_000001")
    assert raised.value is full


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_record_that_cannot_be_written_ends_the_run_with_its_name(tmp_path, monkeypatch, fails):
    (tmp_path / "graph.py").write_text(live_text())
    assert command(tmp_path, *LOCAL[:-1], "1")[0] == 0
    full, fsync = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), os.fsync

    def synced(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("events.jsonl"):
            raise full
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    if fails == "write":
        real = Path.open
        monkeypatch.setattr(Path, "open", lambda path, *mode, **more: Full(real(path, *mode, **more), full))
    code, _, err = command(tmp_path, *LOCAL, "--resume")
    monkeypatch.undo()
    assert code == 6
    assert err.splitlines()[0].startswith("run/events.jsonl: the record could not be written: No space left on device;")
    assert command(tmp_path, *LOCAL[:-1], "5", "--resume")[0] == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "step_000002.jsonl", ".plan.json.partial", ".metrics.jsonl.partial"])
def test_a_full_disk_ends_the_run_with_the_name_of_the_file_and_the_run_resumes(tmp_path, monkeypatch, name):
    (tmp_path / "graph.py").write_text(live_text())
    assert command(tmp_path, *LOCAL[:-1], "1")[0] == 0
    real = io.open

    def opened(file, mode="r", *rest, **named):
        made = real(file, mode, *rest, **named)
        if Path(str(file)).name != name or "r" in mode:
            return made
        made.close()
        return real("/dev/full", mode, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(io, "open", opened)
        code, _, err = command(tmp_path, *LOCAL, "--resume")
    assert code == 6
    assert "Traceback" not in err
    shown = name.removeprefix(".").removesuffix(".partial")
    problem = err.splitlines()[0]
    assert f"{shown}: the record could not be written: No space left on device;" in problem
    assert PROBLEM.fullmatch(problem)["where"].startswith("run/")
    assert command(tmp_path, *LOCAL[:-1], "5", "--resume")[0] == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]


class Full:
    """A file of the record on a full disk; any other file is as it was."""

    def __init__(self, file, error):
        self._file, self._error = file, error

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self._file.__enter__()

    def __exit__(self, *given):
        return self._file.__exit__(*given)

    def flush(self):
        if self._file.name.endswith("events.jsonl"):
            raise self._error
        self._file.flush()


MOVES = {
    "moved": ("os.rename('run', 'moved')", "run: a checkpoint could not be written: No such file or directory"),
    "replaced": (
        "os.rename('run', 'moved'); shutil.copytree('moved', 'run')",
        "run: another folder has taken the place of the run directory",
    ),
}


@pytest.mark.parametrize("moved", MOVES)
def test_a_run_directory_that_is_moved_ends_the_run_and_its_record_stays_whole(tmp_path, moved):
    line, said = MOVES[moved]
    score = f"""import os, shutil

def score(prompt: str, answer: str) -> float:
    if os.path.exists('go') and not os.path.exists('moved'):
        {line}
    return 1.0


"""
    (tmp_path / "graph.py").write_text(live_text(score))
    assert command(tmp_path, *LOCAL[:-1], "1")[0] == 0
    (tmp_path / "go").touch()
    code, _, err = command(tmp_path, *LOCAL, "--resume")
    assert code == 6 and err.startswith(said), err
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    (tmp_path / "moved").rename(tmp_path / "run")
    (tmp_path / "go").unlink()
    assert command(tmp_path, *LOCAL, "--resume")[0] == 0
    assert RunDir(tmp_path / "run").checkpoint_steps() == [1, 2, 3]


def test_a_reward_may_leave_the_working_directory(tmp_path):
    (tmp_path / "graph.py").write_text(live_text(SCORE.replace("return", "__import__('os').chdir('/'); return")))
    code, out, err = command(tmp_path, *LOCAL)
    assert (code, err) == (0, "")
    assert "continue                 python -m pipeline.run graph.py --executor local --run-dir run --resume" in out
    assert RunDir(tmp_path / "run").checkpoint_steps() == [1, 2, 3]


IN_ITS_PLACE = {
    "a socket": "socket.socket(socket.AF_UNIX).bind('run/metrics.jsonl')",
    "a pipe": "os.mkfifo('run/metrics.jsonl')",
    "a link to nothing": "os.symlink('/nowhere/at/all', 'run/metrics.jsonl')",
    "a folder": "os.mkdir('run/metrics.jsonl')",
}


@pytest.mark.parametrize("made", IN_ITS_PLACE)
def test_what_takes_the_place_of_a_file_of_the_record_is_named(tmp_path, made):
    line = f"    if not os.path.lexists('run/metrics.jsonl'): {IN_ITS_PLACE[made]}\n    return"
    (tmp_path / "graph.py").write_text(live_text("import os, socket\n\n" + SCORE.replace("    return", line)))
    code, _, err = command(tmp_path, *LOCAL)
    assert code == 6
    assert err.startswith("run/metrics.jsonl: the record could not be written: it is not a file; ")
    assert "Fix: move away what has the name of this file, then --resume" in err


def test_a_machine_without_more_files_is_an_error_of_its_own(tmp_path):
    """A reward that opens files and closes none."""
    score = """import os

HELD = []

def score(prompt: str, answer: str) -> float:
    HELD.append(os.open("/dev/null", os.O_RDONLY))
    if len(HELD) == 8:  # after step 2; none is left for the driver
        HELD.extend(iter(taken, None))
    return 1.0


def taken():
    try:
        return os.open("/dev/null", os.O_RDONLY)
    except OSError:
        return None


"""
    (tmp_path / "graph.py").write_text(live_text(score))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    try:
        code, _, err = command(tmp_path, *LOCAL)
    finally:
        module = next(module for name, module in sys.modules.items() if name.startswith("sluice_graph_graph"))
        for held in getattr(module, "HELD", []):
            os.close(held)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert code == 6, err
    assert "Too many open files" in err and "Fix: raise the limit on open files (ulimit -n), or close those" in err
    assert err.splitlines()[-1].startswith("resume: ")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENOMEM])
def test_an_error_of_the_machine_that_no_rule_expects_is_one_line(number):
    error = exhausted(OSError(number, os.strerror(number)))
    assert error is not None and error.problems[0].where == "this process"
    assert exhausted(OSError(errno.EPERM, "Not permitted")) is None


METRICS = {  # what happens to the record of three steps, and which of them a resume keeps
    "missing": (lambda text: None, []),
    "empty": (lambda text: "", []),
    "nothing but NUL": (lambda text: "\0" * len(text), []),
    "cut": (lambda text: text[: text.index("\n") + 9], [1]),
    "without its first line": (lambda text: text.split("\n", 1)[1], [2, 3]),
    "twice": (lambda text: text * 2, [1, 2, 3]),
    "without its last newline": (lambda text: text[:-1], [1, 2, 3]),
}


@pytest.mark.journal_expected("record")
@pytest.mark.parametrize("damage", METRICS)
def test_a_resume_says_which_record_of_earlier_steps_is_not_whole(tmp_path, damage):
    (tmp_path / "graph.py").write_text(live_text())
    assert command(tmp_path, *LOCAL)[0] == 0
    run, (change, kept) = RunDir(tmp_path / "run"), METRICS[damage]
    text = change(run.metrics.read_text())
    run.metrics.unlink() if text is None else run.metrics.write_text(text)
    code, _, err = command(tmp_path, *LOCAL[:-1], "4", "--resume")
    assert code == 0, err
    said = "run/metrics.jsonl: warning: it does not have all of the 3 steps before the checkpoint"
    assert (said in err) is (len(kept) < 3)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [*kept, 4]


@pytest.mark.journal_expected("record", "I8")
def test_a_resume_needs_the_plan_and_misses_the_events(tmp_path):
    (tmp_path / "graph.py").write_text(live_text())
    assert command(tmp_path, *LOCAL)[0] == 0
    run = RunDir(tmp_path / "run")
    run.plan.rename(tmp_path / "plan")
    code, _, err = command(tmp_path, *LOCAL[:-1], "4", "--resume", "--batch", "8")
    assert code == 2 and err.startswith("run/plan.json: it cannot be read: No such file"), err
    (tmp_path / "plan").rename(run.plan)
    run.events.unlink()
    code, _, err = command(tmp_path, *LOCAL[:-1], "4", "--resume")
    assert code == 0 and "run/events.jsonl: warning: it does not have all of the 3 steps" in err


def test_a_path_that_is_no_text_is_refused_and_one_that_looks_like_a_flag_is_not_printed_as_one(tmp_path):
    (tmp_path / "graph.py").write_text(live_text())
    code, _, err = command(tmp_path, "graph.py", "--executor", "local", "--run-dir", "a/\udcff")
    assert code == 2 and "its path is not UTF-8" in err and not (tmp_path / "a").exists()
    code, out, _ = command(tmp_path, "graph.py", "--executor", "local", "--run-dir=-dash", "--steps", "1")
    assert code == 0 and "--run-dir ./-dash --resume" in out and "pipeline.view ./-dash" in out
