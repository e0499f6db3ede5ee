"""The copy of a run in other storage: complete whatever fails, and good to go on from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import CheckpointError, GraphError
from pipeline.mirror import follow
from pipeline.mirrors import beside
from pipeline.mirrors.beside import Said, mirrored
from pipeline.mirrors.fetched import fetch
from pipeline.mirrors.mirror import Mirror
from pipeline.mirrors.remote import Remote, opened
from pipeline.record import checkpoint
from pipeline.record.trace import Removed, TraceWriter
from pipeline.rundir import RunDir
from tests.drafts import write_checkpoint
from tests.errors.harness import command
from tests.unit import tiny_graph

LOCAL = ("graph.py", "--executor", "local", "--plain")


class Recorded(LocalFileSystem):
    """A disk that notes what is written and removed in which order, and fails where it is told to."""

    protocol = "recorded"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.fails: list[str] = []  # parts of names; each fails once
        self.before: Any = lambda name: None

    def _do(self, kind: str, path: str) -> None:
        self.before(path)
        for part in self.fails:
            if part in path:
                self.fails.remove(part)
                raise TimeoutError("no answer")
        self.done.append(f"{kind} {path.rpartition('/remote/')[2]}")

    def open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        if mode == "wb":
            self._do("write", path)
        return super().open(path, mode, **named)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        super().rm(path, recursive, maxdepth)
        self._do("remove", path)


def write(run: RunDir, *steps: int, content: str = "") -> None:
    def save(folder: Path) -> None:
        (folder / "train").mkdir()
        for name in ("weights", "moments"):
            (folder / "train" / name).write_text(f"{name} {steps} {content}")

    for step in steps:
        write_checkpoint(run, graph="g", steps=step, next_group=0, seed=0, save=save)


def remove(run: RunDir, step: int) -> None:
    writer = TraceWriter(run.events)
    writer.write(Removed(step=step - 1, folder=run.checkpoint(step).name, at_s=0.0))
    writer.close()
    checkpoint.remove(run.checkpoint(step))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run").create()
    made.run_json.write_text('{"graph": "g"}')
    made.metrics.write_text('{"step": 1}\n')
    made.samples(0).write_text("{}")
    return made


@pytest.fixture
def disk() -> Recorded:
    return Recorded()


@pytest.fixture
def remote(tmp_path: Path, disk: Recorded) -> Remote:
    return Remote(disk, f"{tmp_path}/remote", "far")


def mirror(run: RunDir, remote: Remote) -> Mirror:
    made = Mirror(run, remote, lambda step, arrived, size: None)
    made.begin()
    return made


def steps_of(run: RunDir) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def fetched(remote: Remote, tmp_path: Path, step: int | None = None) -> tuple[int, list[str], RunDir]:
    run = RunDir(tmp_path / "fetched")
    number, damaged = fetch(remote, run, step, lambda size: None)
    return number, list(map(str, damaged)), run


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_from_its_mirror_as_if_nothing_had_happened(tmp_path: Path) -> None:
    shutil.copyfile(tiny_graph.__file__, tmp_path / "graph.py")
    assert command(tmp_path, *LOCAL, "--run-dir", "whole", "--steps", "4")[0] == 0
    code, out, err = command(tmp_path, *LOCAL, "--run-dir", "run", "--steps", "2", "--mirror", "remote")
    assert (code, err) == (0, "")
    assert "--mirror remote" in next(line for line in out.splitlines() if line.startswith("continue"))
    shutil.rmtree(tmp_path / "run")  # the machine is gone
    code, out, _ = command(tmp_path, "--fetch", "remote/run", "again", program="mirror")
    assert code == 0 and out.splitlines()[1].endswith("graph.py --run-dir again --resume")
    assert command(tmp_path, *LOCAL, "--run-dir", "again", "--resume", "--steps", "4")[0] == 0
    whole, again = RunDir(tmp_path / "whole"), RunDir(tmp_path / "again")
    weights = "train/weights.safetensors"
    assert (whole.checkpoint(4) / weights).read_bytes() == (again.checkpoint(4) / weights).read_bytes()
    assert steps_of(again) == steps_of(whole) and again.sampled_steps() == whole.sampled_steps()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "remote").rglob("*"))


def test_the_newest_checkpoint_is_copied_first_and_its_manifest_last(
    run: RunDir, remote: Remote, disk: Recorded
) -> None:
    write(run, 1, 2, 3)
    mirror(run, remote).update()
    manifests = [done for done in disk.done if done.endswith("manifest.json")]
    assert manifests == [
        f"write run/checkpoints/step_00000{step}/manifest.json".replace("run/", "") for step in (3, 2, 1)
    ]
    last = disk.done.index(manifests[0])
    assert {"write metrics.jsonl", "write samples/step_000001.jsonl"} < set(disk.done[:last])
    assert files(run.path) == files(Path(remote._path))


def test_nothing_is_copied_twice(run: RunDir, remote: Remote, disk: Recorded) -> None:
    write(run, 1)
    made = mirror(run, remote)
    made.update()
    done = len(disk.done)
    made.update()
    assert len(disk.done) == done
    another = mirror(run, remote)  # as after a resume
    another.update()
    assert len(disk.done) == done


def test_a_checkpoint_that_a_resumed_run_writes_again_is_copied_again(
    run: RunDir, remote: Remote, tmp_path: Path
) -> None:
    made = mirror(run, remote)
    write(run, 1)
    made.update()
    write(run, 1, content="of the resumed run")
    made.update()
    assert files(fetched(remote, tmp_path)[2].checkpoint(1)) == files(run.checkpoint(1))


@pytest.mark.parametrize("part", ["train/weights", "metrics.jsonl", "step_000002/manifest.json"])
def test_a_storage_that_fails_is_tried_again(
    run: RunDir, remote: Remote, disk: Recorded, tmp_path: Path, part: str
) -> None:
    write(run, 1, 2)
    told: list[Said] = []
    looks = iter([False, False, True])
    disk.fails = [part, part]
    follow(mirror(run, remote), lambda wait_s: next(looks), told.append)
    (problem,) = [said.problem for said in told if said.problem]
    assert problem.warning and "no answer" in problem.what and "the run goes on" in problem.why
    assert told[-1].text == "the storage works again"
    assert fetched(remote, tmp_path)[0] == 2


def test_a_storage_that_fails_to_the_end_is_an_error(run: RunDir, remote: Remote, disk: Recorded) -> None:
    write(run, 1)
    disk.fails = ["weights"] * 9
    told: list[Said] = []
    with pytest.raises(CheckpointError, match="no answer"):
        follow(mirror(run, remote), lambda wait_s: True, told.append)
    assert len(told) == 1  # the same failure is said once
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        fetch(remote, RunDir(run.path.with_name("none")), None, lambda size: None)


def test_a_file_that_arrives_shorter_makes_no_checkpoint(run: RunDir, remote: Remote) -> None:
    write(run, 1)
    size = Remote.size
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="bytes there"):
        patch.setattr(Remote, "size", lambda self, name: size(self, name) - name.endswith("weights"))
        mirror(run, remote).update()
    assert remote.read("checkpoints/step_000001/manifest.json") is None


def test_what_the_run_removes_is_removed_after_a_newer_one_is_there(
    run: RunDir, remote: Remote, disk: Recorded
) -> None:
    made = mirror(run, remote)
    write(run, 1, 2)
    made.update()
    remove(run, 1)
    write(run, 3)
    disk.done.clear()
    made.update()
    assert set(remote.sizes("checkpoints")) == {"step_000002", "step_000003"}
    written = disk.done.index("write checkpoints/step_000003/manifest.json")
    assert disk.done.index("remove checkpoints/step_000001/manifest.json") > written


def test_a_mirror_keeps_what_a_fetched_run_does_not_have(run: RunDir, remote: Remote, tmp_path: Path) -> None:
    write(run, 1, 2)
    mirror(run, remote).update()
    again = fetched(remote, tmp_path)[2]
    assert again.checkpoint_steps() == [2]
    write(again, 3)
    mirror(again, remote).update()
    assert set(remote.sizes("checkpoints")) == {f"step_00000{step}" for step in (1, 2, 3)}


def test_a_checkpoint_that_is_removed_while_it_is_copied_is_copied_whole(
    run: RunDir, remote: Remote, disk: Recorded, tmp_path: Path
) -> None:
    write(run, 1)

    def vanish(path: str) -> None:
        if path.endswith("weights"):
            shutil.rmtree(run.checkpoint(1), ignore_errors=True)

    disk.before = vanish
    mirror(run, remote).update()
    assert fetched(remote, tmp_path)[0] == 1


def test_a_damaged_checkpoint_is_not_copied_and_does_not_hold_up_others(run: RunDir, remote: Remote) -> None:
    write(run, 1, 2)
    (run.checkpoint(2) / "train" / "weights").unlink()
    mirror(run, remote).update()
    assert set(remote.sizes("checkpoints")) == {"step_000001"}


def test_two_runs_of_one_name_do_not_mix(run: RunDir, remote: Remote) -> None:
    mirror(run, remote)
    run.run_json.write_text('{"another": 1}')
    with pytest.raises(GraphError, match="another run is mirrored there"):
        mirror(run, remote)


@pytest.mark.parametrize("damage", ["cut", "absent", "no manifest"])
def test_the_newest_complete_checkpoint_is_fetched(run: RunDir, remote: Remote, tmp_path: Path, damage: str) -> None:
    write(run, 1, 2)
    mirror(run, remote).update()
    there = Path(remote._path, "checkpoints", "step_000002")
    if damage == "cut":
        (there / "train" / "weights").write_text("w")
    else:
        (there / ("manifest.json" if damage == "no manifest" else "train/weights")).unlink()
    step, damaged, again = fetched(remote, tmp_path)
    assert step == 1 and len(damaged) == 1 and damaged[0].startswith("far/checkpoints/step_000002")
    assert again.checkpoint_steps() == [1] and not list(again.checkpoints.glob(".*"))
    assert files(again.checkpoint(1)) == files(run.checkpoint(1))


def test_a_manifest_of_the_storage_writes_nothing_outside(run: RunDir, remote: Remote, tmp_path: Path) -> None:
    write(run, 1)
    mirror(run, remote).update()
    manifest = Path(remote._path, "checkpoints/step_000001/manifest.json")
    manifest.write_text(manifest.read_text().replace("train/weights", "../../../stolen"))
    Path(remote._path, "checkpoints/step_000001/../../../stolen").write_text("x")
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="that lies outside it"):
        fetched(remote, tmp_path)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "fetched"}


def test_a_fetch_that_failed_can_be_repeated_and_one_that_did_not_is_refused(
    run: RunDir, remote: Remote, tmp_path: Path
) -> None:
    write(run, 1)
    mirror(run, remote).update()
    fetching = Remote.fetch
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match=r"metrics\.jsonl"):

        def fails(self: Remote, name: str, *more: Any) -> None:
            if name == "metrics.jsonl":
                raise OSError(28, "No space left on device")
            fetching(self, name, *more)

        patch.setattr(Remote, "fetch", fails)
        fetched(remote, tmp_path)
    shutil.rmtree(tmp_path / "fetched" / "checkpoints")
    assert fetched(remote, tmp_path)[0] == 1
    with pytest.raises(GraphError, match="already holds a run"):
        fetched(remote, tmp_path)


def test_one_checkpoint_is_fetched_by_its_step(run: RunDir, remote: Remote, tmp_path: Path) -> None:
    write(run, 1, 2)
    mirror(run, remote).update()
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        fetched(remote, tmp_path, step=7)
    assert fetched(remote, tmp_path, step=1)[0] == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://me:secret@host/x", "the address contains a password"),
        ("memory://x?key=secret", "the address has a query"),
        ("nosuch://x", "Protocol not known: nosuch"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_anything_starts(tmp_path: Path, url: str, says: str) -> None:
    shutil.copyfile(tiny_graph.__file__, tmp_path / "graph.py")
    code, _, err = command(tmp_path, *LOCAL, "--run-dir", "run", "--mirror", url)
    assert code == 2 and says in err and "secret" not in err
    assert not (tmp_path / "run").exists()


def test_a_storage_that_fails_at_the_start_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    shutil.copyfile(tiny_graph.__file__, tmp_path / "graph.py")
    (tmp_path / "file").write_text("")
    code, _, err = command(tmp_path, *LOCAL, "--run-dir", "run", "--mirror", "file/folder")
    assert code == 6 and "the storage did not do what it was asked" in err
    assert not RunDir(tmp_path / "run").events.exists()
    assert command(tmp_path, *LOCAL, "--run-dir", "run", "--mirror", "other")[0] == 0  # the same folder can be used


def test_a_name_that_another_run_has_there_is_refused_before_anything_starts(run: RunDir, tmp_path: Path) -> None:
    place = tmp_path / "remote" / "run"
    place.mkdir(parents=True)
    (place / "run.json").write_text('{"another": 1}')
    with pytest.raises(GraphError, match="another run is mirrored there"), mirrored(run, str(place.parent), print):
        pass


@pytest.fixture
def stuck(run: RunDir, tmp_path: Path) -> Iterator[Path]:
    """A storage that does not answer: a pipe in the place of a file."""
    write(run, 1)
    place = tmp_path / "remote" / "run" / "checkpoints" / "step_000001" / "train" / "weights"
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    yield tmp_path / "remote"


def test_a_run_does_not_wait_for_ever_for_its_mirror(
    run: RunDir, stuck: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "SILENT_S", 3.0)
    monkeypatch.setattr(beside, "SAY_S", 1.0)
    said: list[str] = []
    with mirrored(run, str(stuck), lambda problem: said.append(str(problem))):
        pass
    assert len(said) == 1 and f"pipeline.mirror {run.path} {stuck}" in said[0] and ": warning: " in said[0]
    assert "waiting for the mirror: " in capsys.readouterr().err


@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt])
def test_a_run_that_ends_at_once_waits_for_no_mirror(run: RunDir, stuck: Path, ends: type[BaseException]) -> None:
    said: list[str] = []
    with pytest.raises(ends), mirrored(run, str(stuck), lambda problem: said.append(str(problem))):
        raise ends
    assert len(said) == 1


def test_a_storage_that_does_not_answer_at_the_start_is_an_error(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "READY_S", 3.0)
    (tmp_path / "remote" / "run").mkdir(parents=True)
    os.mkfifo(tmp_path / "remote" / "run" / "run.json")
    with pytest.raises(CheckpointError, match="it does not answer"), mirrored(run, str(tmp_path / "remote"), print):
        pass


def test_the_process_of_a_killed_run_copies_what_is_left_and_ends(run: RunDir, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pipeline.mirror", str(run.path), str(tmp_path / "remote"), "--until-eof"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert "mirrored at" in process.stdout.readline()
        write(run, 5)
        process.stdin.close()  # as when the driver dies
        assert process.wait(60) == 0
    assert "step_000005" in opened(str(tmp_path / "remote"), flag="").within("run").sizes("checkpoints")


def test_the_process_of_a_killed_run_ends_if_the_storage_does_not_answer(
    run: RunDir, stuck: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "import sys; from pipeline import mirror; mirror.SILENT_S = 2; sys.exit(mirror.main(sys.argv[1:]))"
    arguments = [str(run.path), str(stuck), "--until-eof"]
    with subprocess.Popen([sys.executable, "-c", words, *arguments], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        try:
            assert process.wait(60) == -signal.SIGALRM
        finally:
            process.kill()


@pytest.mark.parametrize("url", ["file://{}", "{}", "{}/run/checkpoints/..", "{}/run", "{}/run/x"])
def test_a_mirror_in_the_runs_own_folder_is_refused(run: RunDir, tmp_path: Path, url: str) -> None:
    there, before = url.format(run.path.parent), files(run.path)
    code, _, err = command(tmp_path, str(run.path), there.replace("/run", f"/{run.path.name}"), program="mirror")
    assert code == 2 and "Fix: use a folder elsewhere" in err
    assert files(run.path) == before


def test_a_run_that_would_be_its_own_mirror_does_not_start(tmp_path: Path) -> None:
    shutil.copyfile(tiny_graph.__file__, tmp_path / "graph.py")
    for flags in (["--check"], []):
        code, _, err = command(tmp_path, *LOCAL, "--run-dir", "runs/mine", "--mirror", "runs", *flags)
        assert code == 2 and err.startswith("--mirror runs: it is where the run is; ")
