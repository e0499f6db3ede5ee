"""Forwarding to the real libraries, without a network. TensorBoard, W&B and MLflow are optional extras."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import forward, run
from pipeline.errors import GraphError
from pipeline.forward import Tail
from pipeline.forwarders import Described, check, opened
from pipeline.forwarders.step_times import LARGEST_S, StepTimes
from pipeline.record import trace
from tests.optional import need
from tests.unit.test_findings import printed, write

pytestmark = pytest.mark.journal_expected  # records cut off on purpose
ROOT = Path(__file__).parents[2]
NUMBERS = ROOT / "tests" / "integration" / "async_graph.py"
LINES: list[dict[str, Any]] = [
    {"step": 0, "version": 0, "eval/exact match": 0.25},
    {"step": 1, "version": 1, "reward/mean": 0.5, "note": "text", "train/loss": None},
    {"step": 2, "version": 2, "reward/mean": 0.75},
]
REWARDS = [(1, 0.5), (2, 0.75)]
BEGAN_S = 1_700_000_000.0  # by the wall clock
ENDS_S = [BEGAN_S + 40.0, BEGAN_S + 100.5, BEGAN_S + 161.0]  # of LINES


@pytest.fixture
def recorded(tmp_path) -> Path:
    """A run directory whose metrics file has these lines and an unfinished last line."""
    folder = write(tmp_path / "my run", steps=2)
    said(folder, *LINES, tail='{"step": 3, "rew')
    ended = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)[-1]
    happened(folder, began(0, BEGAN_S), *(step_ended(step, end_s) for step, end_s in enumerate(ENDS_S)), ended)
    return folder


def began(start: int, wall_s: float, monotonic_s: float = 500.0) -> trace.Started:
    return trace.Started(graph="g", start=start, steps=9, executor="local", monotonic_s=monotonic_s, wall_s=wall_s)


def step_ended(step: int, end_s: float, zero_s: float = BEGAN_S - 500.0) -> trace.StepEnded:
    """Return the event of a step of metrics.jsonl that ended then, where the monotonic clock began at `zero_s`."""
    return trace.StepEnded(step=step - 1, metrics={}, at_s=end_s - zero_s)


def happened(folder: Path, *events: trace.TraceEvent | bytes, mode: str = "wb") -> None:
    with (folder / "events.jsonl").open(mode) as file:
        file.writelines(event if isinstance(event, bytes) else msgspec.json.encode(event) + b"\n" for event in events)


def said(folder: Path, *lines: dict[str, Any], tail: str = "") -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) pairs by name, as TensorBoard reads them."""
    need("tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


def wandb_records(file: Path) -> list[Any]:
    """Return the records of an offline run: protocol buffers in a LevelDB log that starts after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, records, part = file.read_bytes(), 7, [], b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if place + 7 + size > len(data):
            break  # unfinished
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last fragment
            records.append(Record.FromString(part))
            part = b""
    return records


def test_tensorboard_reads_what_was_forwarded(recorded, tmp_path):
    need("tensorboard", "tensorboard")
    forward.forward(recorded, {"tensorboard": str(tmp_path / "tb")})
    expected = {"version": [(0, 0.0), (1, 1.0), (2, 2.0)], "eval/exact match": [(0, 0.25)], "reward/mean": REWARDS}
    assert tensorboard(tmp_path / "tb" / "my run") == expected
    assert (times := written_at(tmp_path / "tb" / "my run")) == ENDS_S[1:]
    time.sleep(1.1)
    forward.forward(recorded, {"tensorboard": str(tmp_path / "tb")})
    assert tensorboard(tmp_path / "tb" / "my run") == expected and written_at(tmp_path / "tb" / "my run") == times
    said(recorded, *LINES, {"step": 3, "reward/mean": 1.0})
    time.sleep(1.1)  # names of event files have one-second resolution
    forward.forward(recorded, {"tensorboard": str(tmp_path / "tb")})
    assert tensorboard(tmp_path / "tb" / "my run")["reward/mean"] == [*REWARDS, (3, 1.0)]
    assert written_at(tmp_path / "tb" / "my run")[:-1] == times
    (tmp_path / "tb" / "my run" / "sluice.run").write_text("another run of that name")
    said(recorded, {"step": 1, "reward/mean": 9.0})
    time.sleep(1.1)
    forward.forward(recorded, {"tensorboard": str(tmp_path / "tb")})
    assert tensorboard(tmp_path / "tb" / "my run")["reward/mean"] == [(1, 9.0)]


def written_at(folder, name="reward/mean"):
    """Return the time of each reward in a folder of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [point.wall_time for point in EventAccumulator(str(folder)).Reload().Scalars(name)]


def test_wandb_keeps_what_was_forwarded(recorded, tmp_path, monkeypatch):
    need("wandb", "wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("WANDB_API_KEY", "canary" * 6 + "0000")
    (tmp_path / "kept").mkdir()
    forward.forward(recorded, {"wandb": "team/project"})
    time.sleep(1.1)  # names of its folders have one-second resolution
    forward.forward(recorded, {"wandb": "team/project"})
    records, until_s = [], time.monotonic() + 30
    while sum(record.HasField("exit") for record in records) < 2 and time.monotonic() < until_s:
        time.sleep(0.1)  # W&B writes it in its own process
        records = [r for file in (tmp_path / "kept").rglob("offline-run-*/run-*.wandb") for r in wandb_records(file)]
    begun, _ = [record.run for record in records if record.HasField("run")]
    assert (begun.entity, begun.project, begun.display_name) == ("team", "project", "my run")
    assert begun.run_id.startswith("my-run-") and json.loads(
        next(item.value_json for item in begun.config.update if item.key == "graph")
    )
    rewards, times = [], []
    for record in records:
        items = {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                 for item in record.history.item}  # fmt: skip
        if "reward/mean" in items:
            rewards.append((items["_step"], items["reward/mean"]))
            times.append(items["_timestamp"])
    assert rewards == REWARDS and times == ENDS_S[1:]
    assert not any(b"canary" in path.read_bytes() for path in recorded.rglob("*") if path.is_file())


@pytest.fixture
def mlflow_store(tmp_path, monkeypatch):
    need("mlflow", "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    return (uri := f"file://{tmp_path}/mlflow"), MlflowClient(tracking_uri=uri)


def test_mlflow_has_what_was_forwarded_and_goes_on_behind_it(recorded, mlflow_store):
    uri, client = mlflow_store
    forward.forward(recorded, {"mlflow": uri})
    experiment = client.get_experiment_by_name("toy")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status, kept.data.params) == ("my run", "FINISHED", {"steps": "2"})
    times = [point.timestamp for point in client.get_metric_history(kept.info.run_id, "reward/mean")]
    assert times == [int(end_s * 1000) for end_s in ENDS_S[1:]]
    forward.forward(recorded, {"mlflow": uri})
    said(recorded, *LINES, {"step": 3, "reward/mean": 1.0})
    forward.forward(recorded, {"mlflow": uri})
    (kept,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(kept.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [*REWARDS, (3, 1.0)]
    assert [point.timestamp for point in history][:-1] == times
    assert client.get_metric_history(kept.info.run_id, "eval/exact match")[0].value == 0.25


def test_a_service_that_fails_does_not_keep_the_others_from_it(recorded, tmp_path, mlflow_store):
    need("tensorboard", "tensorboard")
    uri = mlflow_store[0]
    said(recorded, {"step": 1, "x" * 999: 1.0}, {"step": 2, "reward/mean": 0.75})  # too long a name for MLflow
    with pytest.raises(GraphError, match=r"--mlflow file.*Fix: python -m pipeline.forward '.*/my run' --mlflow file"):
        forward.forward(recorded, {"mlflow": uri, "tensorboard": str(tmp_path / "tb")})
    assert tensorboard(tmp_path / "tb" / "my run")["reward/mean"] == [(2, 0.75)]


def test_a_run_is_followed_to_its_end(recorded, tmp_path):
    need("tensorboard", "tensorboard")
    events = (recorded / "events.jsonl").read_bytes().splitlines(keepends=True)
    (recorded / "events.jsonl").write_bytes(b"".join(events[:-1]))
    command = [
        sys.executable,
        "-m",
        "pipeline.forward",
        str(recorded),
        "--tensorboard",
        str(tmp_path / "tb"),
        "--follow",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list((tmp_path / "tb").rglob("events*")):
        assert process.poll() is None
        time.sleep(0.05)
    said(recorded, *LINES, {"step": 3, "reward/mean": 1.0})
    (recorded / "events.jsonl").write_bytes(b"".join(events))
    assert process.communicate(timeout=30)[0] == f"{recorded}: 3 steps forwarded to tensorboard\n"
    assert process.returncode == 0
    assert tensorboard(tmp_path / "tb" / "my run")["reward/mean"] == [*REWARDS, (3, 1.0)]


def test_a_run_forwards_while_it_runs(tmp_path):
    need("tensorboard", "tensorboard")
    argv = [str(NUMBERS), "--executor", "local", "--steps", "3", "--run-dir", str(tmp_path / "live")]
    assert run.main([*argv, "--tensorboard", str(tmp_path / "tb")]) == 0
    assert [step for step, _ in tensorboard(tmp_path / "tb" / "live")["learn/age"]] == [1, 2, 3]
    assert (tmp_path / "live" / "logs" / "forward.log").is_file()
    events = [event for _, event in trace.read(tmp_path / "live" / "events.jsonl")]
    (start,) = (event for event in events if isinstance(event, trace.Started))
    ends_s = [event.at_s for event in events if isinstance(event, trace.StepEnded) and event.step >= 0]
    forward.forward(tmp_path / "live", {"tensorboard": str(tmp_path / "later")})
    for folder in ("tb", "later"):
        times = written_at(tmp_path / folder / "live", "learn/age")
        assert times == [end_s + start.wall_s - start.monotonic_s for end_s in ends_s] and len(times) == 3


def timed(times: StepTimes, *steps: int, last: bool = False) -> list[tuple[int, float]]:
    """Return the steps that are forwarded now, each with the seconds since the run began."""
    return [(line["step"], at_s - BEGAN_S) for at_s, line in times.of(({"step": step} for step in steps), last=last)]


def test_a_step_has_the_time_at_which_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: BEGAN_S + 9000.0)
    times = StepTimes(tmp_path / "events.jsonl")
    assert timed(times, 0) == [] and timed(times) == [(0, 9000.0)]  # without a record, the time of now
    happened(tmp_path, began(0, BEGAN_S), step_ended(1, BEGAN_S + 10.0))
    assert timed(times, 1, 2, 3) == [(1, 10.0)]  # the record is behind
    happened(tmp_path, step_ended(2, BEGAN_S + 20.0), mode="ab")
    assert timed(times, 4) == [(2, 20.0), (3, 20.0)]  # a line waits once
    happened(tmp_path, b'{"type":"step_ended","st\n', mode="ab")
    assert timed(times) == [(4, 20.0)]
    happened(tmp_path, step_ended(5, BEGAN_S + 50.0), mode="ab")
    assert timed(times, 5, 6) == [(5, 50.0)] and timed(times, last=True) == [(6, 50.0)]
    again_s = BEGAN_S + 3600.0  # on a machine that was started again
    happened(tmp_path, began(3, again_s, 7.0), mode="ab")
    assert timed(times, 4) == []  # of the steps that are repeated, the time of before does not count
    happened(tmp_path, step_ended(4, again_s + 40.0, again_s - 7.0), mode="ab")
    assert timed(times, 5) == [(4, 3640.0)] and timed(times, 1, last=True) == [(5, 3640.0), (1, 10.0)]
    happened(tmp_path, began(0, BEGAN_S), step_ended(0, BEGAN_S + 1.0))
    assert timed(times, 1) == [] and timed(times, 0) == [(1, 1.0), (0, 1.0)]  # the run began again
    happened(tmp_path, step_ended(2, 1.5e308), mode="ab")  # damaged
    assert timed(times, 2) == [(2, LARGEST_S - BEGAN_S)]


def test_a_forwarder_that_fails_leaves_the_run_alone(tmp_path, capfd):
    need("tensorboard", "tensorboard")
    (tmp_path / "file").touch()
    argv = [str(NUMBERS), "--executor", "local", "--steps", "3", "--run-dir", str(tmp_path / "live")]
    assert run.main([*argv, "--tensorboard", str(tmp_path / "file")]) == 0
    assert "forwarding failed, the run did not: --tensorboard" in capfd.readouterr().err


def test_the_tail_begins_anew_where_a_resume_has_cut_the_file(tmp_path):
    tail, long = Tail(tmp_path / "metrics.jsonl"), {"step": 2, "x": 1.0}
    assert list(tail.lines()) == []
    said(tmp_path, {"step": 1}, long, tail='{"st')
    assert [line["step"] for line in tail.lines()] == [1, 2] and list(tail.lines()) == []
    said(tmp_path, {"step": 1})
    assert [line["step"] for line in tail.lines()] == [1]
    said(tmp_path, {"step": 1}, {"step": 222, "x": 1.5, "y": 2.5}, {"step": 3})
    assert [line["step"] for line in tail.lines()] == [222, 3]
    said(tmp_path, {"step": 11, "long": "x" * 99}, {"step": 4})  # same length, different lines
    assert [line["step"] for line in tail.lines()] == [11, 4]


def test_a_run_has_a_key_of_its_own(recorded, tmp_path):
    told = forward.describe(recorded)
    assert told == forward.describe(recorded) and re.fullmatch(r"my-run-[0-9a-f]{8}", told.key)
    assert (told.name, told.graph, told.flags) == ("my run", "toy", {"steps": 2})
    again = json.loads((recorded / "run.json").read_text()) | {"started": "2027-01-01T00:00:00+0000"}
    (recorded / "run.json").write_text(json.dumps(again))
    assert forward.describe(recorded).key != told.key


@pytest.mark.parametrize("service", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_not_there_is_a_problem(service, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        GraphError,
        match=rf"--{service}: the package {service} is not installed; .*pip install 'sluice-rl\[{service}\]'",
    ):
        opened(service, "x", Described(name="", key="", graph="", flags={}), Path("run"))


def test_a_check_of_a_graph_says_that_a_package_is_not_there(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "wandb" else found(name, *more))
    assert run.main(["quickstart", "--wandb", "project", "--check"]) == 2
    assert "--wandb: the package wandb is not installed; " in capsys.readouterr().err


def test_a_folder_named_like_the_package_is_none(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(GraphError, match="not installed"):
        check("wandb", "project")


def test_a_password_in_an_address_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: pytest)
    monkeypatch.setattr(pytest, "origin", "here", raising=False)
    check("mlflow", "https://mlflow.example.org/a:b@c")
    with pytest.raises(GraphError, match="contains a password") as error:
        check("mlflow", "https://me:secret@example.org")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "told"),
    [([], "no run is named"), (["RUN"], "no service is named"), (["RUN", "--wandB=x"], "did you mean --wandb?")],
)
def test_what_is_wrong_is_one_line(argv, told, capsys, tmp_path):
    code, out, err = printed(capsys, forward, *argv)
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1


def test_no_run_no_forwarding(tmp_path, capsys):
    need("tensorboard", "tensorboard")
    code, _, err = printed(capsys, forward, tmp_path, "--tensorboard", tmp_path / "tb")
    assert code == 2 and "run.json is missing" in err and not (tmp_path / "tb").exists()
