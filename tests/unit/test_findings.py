"""Runs read from disk: findings, hints, comparison, and the commands that print them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import analyse, simulate
from pipeline.analysis.comparison import Pair, compare
from pipeline.analysis.findings import find
from pipeline.errors import GraphError
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.record.runs import list_runs, open_run, read_metrics, state_of, tail_metrics
from pipeline.rundir import RunDir
from pipeline.simulation.durations import Costs
from pipeline.simulation.hints import _changes, hints
from pipeline.simulation.recording import recording_of
from pipeline.simulation.whatif import Changes
from tests.doors import REPOSITORY
from tests.examples import few
from tests.unit import toy
from tests.unit.records import SECONDS, records, times
from tests.unit.simulated_runs import write_run

pytestmark = pytest.mark.journal_expected  # records cut off on purpose
SLOW_TRAIN = {"rollout": "0.5", "train": "1.0"}


def write(folder: Path, *, steps: int = 8, seconds: dict[str, str] | None = None, batch: int = 4, **schedule) -> Path:
    """Write a run directory of the toy graph and return its path."""
    graph = toy.graph(batch=batch, schedule=toy.Schedule(steps=steps, **schedule), **toy.streaming())
    made = plan(graph)[0]
    folder.mkdir(parents=True)
    write_run(folder, made, times(made, Costs(), **(SECONDS | (seconds or {}))))
    described = {"graph": "toy", "started": "2026-01-01T00:00:00+0000", "machine": "x86_64, 2 cores"}
    (folder / "run.json").write_text(json.dumps(described | {"args": {"steps": steps} | schedule}))
    return folder


@pytest.fixture(scope="module")
def sync(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("sync") / "sync", seconds=SLOW_TRAIN)


def plain(found) -> object:
    """Return findings after a round trip through JSON."""
    return json.loads(msgspec.json.encode(found))


def printed(capsys, command, *argv) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr of a command."""
    code = command.main([str(part) for part in argv])
    return code, *capsys.readouterr()


def test_every_record_can_be_read_wherever_it_ends(sync, tmp_path, capsys):
    lines = (sync / "events.jsonl").read_bytes().splitlines(keepends=True)
    for end in (0, 1, 5, len(lines) // 3, len(lines) // 2, len(lines) - 1):
        cut = tmp_path / f"cut-{end}"
        cut.mkdir()
        (cut / "plan.json").write_bytes((sync / "plan.json").read_bytes())
        (cut / "events.jsonl").write_bytes(b"".join(lines[:end]) + lines[end][: len(lines[end]) // 2])
        run = open_run(cut)
        assert run.state == "unfinished" and len(run.events) == end and run.metrics == []
        find(run)
        assert printed(capsys, analyse, cut, "--json")[0] == 0
        assert printed(capsys, analyse, cut)[0] == 0
        (cut / "events.jsonl").write_bytes(b"".join(lines[:end] + lines))  # now resumed
        assert len(open_run(cut).events) == len(lines)


def test_what_is_found_holds_together(sync):
    run = open_run(sync)
    found = find(run)
    start_s, end_s, steps = found.window
    assert steps == len(found.report.steps.seconds) and end_s - start_s == pytest.approx(
        sum(found.report.steps.seconds)
    )
    assert {one.group: one.idle_s / one.wall_s for one in found.groups} == pytest.approx(
        {group: 1 - share for group, share in found.report.utilisation.items()}
    )
    by_stage = {}
    for path in found.paths[-steps:]:
        for stage, seconds in path.seconds("stage").items():
            by_stage[stage] = by_stage.get(stage, 0.0) + seconds / steps
    assert by_stage == pytest.approx(found.report.critical_path.by_stage)
    one = find(run, step=3)
    assert one.window[2] == 1 and [path.step for path in one.paths] == [3] and list(one.slack.steps) == [3]
    assert one.paths[0].spans == found.paths[3].spans
    assert one.window[:2] == (one.paths[0].start_s, one.paths[0].end_s)
    with pytest.raises(GraphError, match="to 8"):
        find(run, step=8)


def test_states(sync):
    problems = {"stage": None, "step": None, "error": "", "at_s": 0.0}
    assert state_of(None) == "unfinished"
    assert state_of(trace.Failed(problems=("x",), **problems)) == "failed"
    assert state_of(trace.Failed(problems=(), **problems)) == "interrupted"
    assert open_run(sync).state == "finished"


def test_a_folder_of_runs_is_listed_from_the_ends_of_their_files(sync, tmp_path):
    assert list_runs(tmp_path / "none") == []
    for name, last in (
        ("a", b'{"type":"failed","problems":["x"],'),
        ("b", b'{"type":"put","stage":"x"}\n'),
        ("c", b""),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"graph": "toy", "started": f"2026-01-0{ord(name) - 96}"}))
        (folder / "events.jsonl").write_bytes(b'{"type":"x"}\n' + last)
    (tmp_path / "c" / "run.json").write_text("{")
    (tmp_path / "d").mkdir()
    (tmp_path / "a" / "plan.json").write_text('{"steps": 7}')
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 5}\n{"step": 6')
    failed = trace.Failed(stage=None, step=None, error="", problems=("x",), at_s=0.0)
    (tmp_path / "a" / "events.jsonl").write_bytes(b"{}\n" + msgspec.json.encode(failed) + b"\n")
    listed = [(run.name, run.graph, run.state, run.step, run.steps) for run in list_runs(tmp_path)]
    assert listed == [
        ("b", "toy", "unfinished", 0, None),
        ("a", "toy", "failed", 5, 7),
        ("c", "", "unfinished", 0, None),
    ]
    whole = list_runs(sync.parent)[0]
    assert (whole.state, whole.step, whole.steps) == ("finished", 8, 8)


def test_metrics_are_read_from_an_offset(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert list(read_metrics(path)) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    first = len('{"step": 1}\n')
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 2}]
    assert list(read_metrics(path, first)) == [{"step": 2}]
    assert list(tail_metrics(path, first)) == [(2 * first, {"step": 2})]


def test_a_hint_is_what_its_command_prints(sync, capsys):
    found = hints(recording_of(open_run(sync)), sync)
    assert found.hints[0].times == max(hint.times for hint in found.hints) > 1.2
    assert any(hint.text == "train twice as fast" for hint in found.hints)
    assert all("--steps" in hint.command and hint.times >= 1.01 for hint in found.hints)
    base = json.loads(printed(capsys, simulate, *shlex.split(found.base)[3:], "--json")[1])
    assert base["step_s"] == found.simulated_s
    for hint in found.hints:
        told = json.loads(printed(capsys, simulate, *shlex.split(hint.command)[3:], "--json")[1])
        assert told["step_s"] == hint.step_s and hint.times == pytest.approx(base["step_s"] / told["step_s"])


def test_a_record_that_is_not_simulated_well_has_a_warning_and_no_hints(sync, capsys):
    run = open_run(sync)
    assert hints(recording_of(run), sync).hints
    slower = msgspec.structs.replace(
        recording_of(run), durations=Changes(speed={"train": 0.5}).applied(run.plan, recording_of(run).durations)[1]
    )
    found = hints(slower, sync)
    assert not found.hints and found.simulated_s > 1.15 * found.measured_s
    note = found.notes[0]
    assert note.startswith("warning: ") and note.endswith("% more than measured, so there are no hints")


def test_steps_are_counted_without_metrics(sync, tmp_path, capsys):
    """A record that was stopped in its sixth step."""
    lines = (sync / "events.jsonl").read_bytes().splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if b'"step_ended","step":4' in line)
    (tmp_path / "plan.json").write_bytes((sync / "plan.json").read_bytes())
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[: end + 1]))
    out = printed(capsys, analyse, tmp_path)[1]
    assert "unfinished, 5 of 8 steps" in out and "over 4 steps after the first 1: steps 2 to 5" in out


def test_a_change_that_gains_no_more_than_a_smaller_one_is_no_hint(sync):
    for one in hints(recording_of(open_run(sync)), sync).hints:
        for other in hints(recording_of(open_run(sync)), sync).hints:
            assert not {*other.flags} < {*one.flags} or one.times > other.times


def test_no_hint_asks_for_gpus_that_the_machine_may_not_have(tmp_path):
    """Another worker would share the groups of a step, but all GPUs may be in use."""
    run = write(tmp_path / "run", seconds={"rollout": "0.2/group @ 1"})
    recording = recording_of(open_run(run))
    more = [hint for hint in hints(recording, run).hints if "--workers" in hint.flags]
    groups = tuple(msgspec.structs.replace(group, gpus=group.workers) for group in recording.plan.groups)
    on_gpus = msgspec.structs.replace(recording, plan=msgspec.structs.replace(recording.plan, groups=groups))
    assert more and not [hint for hint in hints(on_gpus, run).hints if "--workers" in hint.flags]


@pytest.mark.parametrize(
    ("threads", "cores", "proposed"),
    [
        ({}, 1, set()),
        ({}, 2, {"sampler", "learner"}),
        ({"sampler": 2, "learner": 2}, 2, set()),
        ({"sampler": 2, "learner": 2}, 4, {"sampler", "learner"}),
        ({"sampler": 2}, 3, {"learner"}),
        ({"sampler": 1, "learner": 8}, 8, set()),
    ],
)
def test_no_hint_asks_for_more_threads_than_the_machine_has_cores(tmp_path, threads, cores, proposed):
    run = write(tmp_path / "run", seconds=SLOW_TRAIN | {"rollout": "0.2/group @ 1"})
    recording = recording_of(open_run(run))
    groups = tuple(
        msgspec.structs.replace(group, threads=threads.get(group.name, 0)) for group in recording.plan.groups
    )
    planned = msgspec.structs.replace(recording.plan, groups=groups)
    tried = _changes(msgspec.structs.replace(recording, plan=planned, cores=float(cores)), find(open_run(run)).report)
    assert {name for _, _, change in tried for name in change.workers} == proposed


def test_a_stage_that_has_not_run_is_said_to_take_no_time(tmp_path):
    run = open_run(write(tmp_path / "run", seconds=SLOW_TRAIN))
    events = [event for event in run.events if getattr(event, "stage", "") != "evaluate"]
    found = hints(recording_of(msgspec.structs.replace(run, events=events)), run.path)
    assert "evaluate has not run yet: assumed to take no time" in found.notes
    assert "--stage evaluate=0" in found.base and found.hints


def test_two_runs_side_by_side(sync, tmp_path):
    other = write(tmp_path / "ahead", seconds=SLOW_TRAIN | {"train": "0.25"}, max_staleness=1, batch=2)
    found = compare(open_run(sync), open_run(other))
    assert (found.first, found.second) == ("sync", "ahead")
    assert found.stages["train"].difference == pytest.approx(-0.75)
    assert found.step_s.first == find(open_run(sync)).report.steps.mean and found.step_s.difference < -0.75
    changed = {(change.kind, change.name, change.what): (change.before, change.after) for change in found.changes}
    assert changed["setting", "max_staleness", ""] == (0, 1) and changed["setting", "batch", ""] == (4, 2)
    assert changed["flag", "max_staleness", ""] == (None, 1)
    assert found.metrics["time/step_s"][3].difference < 0
    same = compare(open_run(sync), open_run(sync))
    assert same.changes == () and all(pair.difference == 0 for pair in same.stages.values())


def test_stages_edges_and_worker_groups_that_differ(tmp_path, sync):
    stages = toy.streaming(reward={"on": toy.WorkerGroup("judge", workers=2)})
    del stages["ref"]
    stages["train"] |= {"reads": (toy.REWARD, toy.LOGPROBS, toy.VERSIONS)}
    made = plan(toy.graph(batch=4, schedule=toy.Schedule(steps=8), **stages))[0]
    changes = compare(open_run(sync), msgspec.structs.replace(open_run(sync), plan=made, events=[])).changes
    named = {(change.kind, change.name, change.what) for change in changes}
    assert {
        ("stage", "ref", ""), ("edge", "ref -> train: ref_logprobs", ""), ("worker group", "judge", ""),
        ("stage", "reward", "groups"), ("stage", "train", "reads"),
    } <= named  # fmt: skip
    assert next(c for c in changes if c.name == "judge").before is None
    assert all(change.before != change.after for change in changes)


def test_metrics_of_runs_of_different_lengths_and_names():
    from pipeline.analysis.comparison import compare_metrics

    first = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 2, "a": 3.0}, {"b": 1}]
    found = compare_metrics(first, [{"step": 2, "a": 5, "b": "text"}, {"step": 3, "c": 1.0}])
    assert found == {
        "a": {1: Pair(first=1.0, second=None), 2: Pair(first=3.0, second=5.0)},
        "b": {},
        "c": {3: Pair(first=None, second=1.0)},
    }


def test_the_command_prints_what_the_functions_return(sync, capsys):
    code, text, _ = printed(capsys, analyse, sync)
    found = find(open_run(sync))
    assert code == 0 and found.report.critical_path.sentence in text
    assert "sync: finished, 8 of 8 steps" in text and "trained_weights (train)" in text
    assert f"{found.report.critical_path.by_stage['train']:.3f} s" in text and "x  train twice as fast" in text
    told = json.loads(printed(capsys, analyse, sync, "--json")[1])
    assert told["report"]["step_s"] == found.report.steps.mean and "gaps" not in told["idle"]
    assert told["idle"]["groups"] == plain(found.groups)
    assert told["paths"] == plain(found.paths) and told["hints"]["hints"]
    assert {int(number): spare for number, spare in told["slack"]["tasks"].items()} == found.slack.tasks
    one = json.loads(printed(capsys, analyse, sync, "--step", 3, "--json")[1])
    assert one["idle"]["gaps"] == plain(find(open_run(sync), step=2).gaps) and one["hints"] is None
    assert "step 3: " in printed(capsys, analyse, sync, "--step", 3)[1]


def test_the_command_compares(sync, tmp_path, capsys):
    other = write(tmp_path / "ahead", max_staleness=1)
    _, text, _ = printed(capsys, analyse, sync, "--compare", other)
    assert "setting max_staleness: 0 -> 1" in text and "flag max_staleness: absent -> 1" in text
    told = json.loads(printed(capsys, analyse, sync, "--compare", other, "--json")[1])
    assert told == json.loads(msgspec.json.encode(compare(open_run(sync), open_run(other))))
    assert "are the same" in printed(capsys, analyse, sync, "--compare", sync)[1]


@pytest.mark.parametrize("command", [("analyse",), ("simulate", "--json"), ("export", "--csv", "{made}")])
def test_a_run_directory_is_read_without_networkx(sync, tmp_path, command):
    name, *flags = (part.format(made=tmp_path / "made") for part in command)
    code = f"import sys; sys.modules['networkx'] = None\nfrom pipeline.{name} import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(sync), *flags],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "no run is named"),
        (["--nope"], "--nope: there is no such flag"),
        (["nowhere"], "plan.json does not exist"),
        (["RUN", "--step", "9"], "--step 9: that step is not in the record"),
        (["RUN", "--step", "0"], "--step 0: that step is not in the record"),
        (["RUN", "--step", "2", "--compare", "RUN"], "both flags are given"),
        (["RUN", "--jsn"], "did you mean --json?"),
        (["BROKEN"], "it cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(sync, tmp_path, capsys, argv, told):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "plan.json").write_text("{")
    (broken / "events.jsonl").write_text("")
    code, out, err = printed(capsys, analyse, *({"RUN": sync, "BROKEN": broken}.get(part, part) for part in argv))
    assert (code, out) == (2, "") and told in err and "Traceback" not in err


def ran(events: list[trace.TraceEvent]) -> list[trace.Ran]:
    return [event for event in events if isinstance(event, trace.Ran)]


@settings(max_examples=few(40), deadline=None)
@given(records(), st.floats(0, 1))
def test_the_end_of_a_long_record_is_read_without_its_beginning(tmp_path_factory, record, share):
    planned, events = record
    run_dir = RunDir(tmp_path_factory.mktemp("run")).create()
    run_dir.plan.write_bytes(msgspec.json.encode(planned))
    writer = trace.TraceWriter(run_dir.events)
    for event in events:
        writer.write(event)
    writer.close()
    whole = open_run(run_dir.path)
    size = run_dir.events.stat().st_size
    assert open_run(run_dir.path, recent_bytes=size).events == whole.events
    part = open_run(run_dir.path, recent_bytes=4096 + int(share * size))
    assert part.state == whole.state
    assert ran(part.events) == ran(whole.events)[len(ran(whole.events)) - len(ran(part.events)) :]
    found = find(part)
    for path in found.paths:
        assert sum(span.end_s - span.start_s for span in path.spans) == pytest.approx(path.end_s - path.start_s)
    for worker in found.workers:
        assert sum(idle.seconds for idle in worker.parts) == pytest.approx(worker.idle_s)
