"""Virtual time against hand-computed schedules, faults, what-if changes, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.gpu import replay
from pipeline import Schedule, simulate
from pipeline.analysis.report import analyse
from pipeline.errors import GraphError, StageError
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.schedule.events import AttemptLost, Finished, Landed
from pipeline.simulation.distributions import parse
from pipeline.simulation.durations import Costs, Drawn, Durations
from pipeline.simulation.recording import disagreement, recorded, simulated
from pipeline.simulation.virtual_run import Fault, Simulation
from pipeline.simulation.whatif import Changes
from tests.examples import few
from tests.unit import toy
from tests.unit.simulated_runs import write_run

GRAPH = """
from pipeline import Schedule
from tests.unit import toy
from tests.unit.simulated_runs import write_run

def graph(steps: int = 6, batch: int = 4, max_staleness: int = 0):
    schedule = Schedule(steps=steps, max_staleness=max_staleness)
    return toy.graph(batch=batch, schedule=schedule, **toy.streaming())
"""
SECONDS = {
    "prompts": "0", "rollout": "1", "reward": "0", "logprobs": "0.25", "ref": "0.125", "train": "0.5", "refit": "0.125",
    "evaluate": "0", "samples": "0",
}  # fmt: skip
STAGES = [f"--stage={name}={text}" for name, text in SECONDS.items()]


def planned(schedule: Schedule, *, batch: int = 4, **changes) -> Plan:
    return plan(toy.graph(batch=batch, schedule=schedule, **toy.streaming(**changes)))[0]


def times(costs: Costs | None = None, **seconds: str) -> Durations:
    return Durations({name: Drawn(parse(text)) for name, text in (SECONDS | seconds).items()}, costs or Costs())


def published(events) -> list[float]:
    return [event.at_s for event in events if isinstance(event, trace.Published)]


def run(schedule: Schedule, durations: Durations, *, batch: int = 4, changes=None, **options) -> list:
    return Simulation(planned(schedule, batch=batch, **(changes or {})), durations, **options).run()


def test_a_synchronous_step_is_the_sum_of_its_stages():
    step_s = 1 + 0.25 + 0.125 + 0.5 + 0.125  # rollout, prev and ref logprobs on one learner, train, refit
    assert published(run(Schedule(steps=3), times())) == pytest.approx([0.125 + n * step_s for n in range(4)])


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 3), st.sampled_from(["in_flight", "drain"]))
@settings(deadline=None, max_examples=few(25))
def test_k_batches_ahead_is_the_recursion_by_hand(rollout, train, k, refit):
    """Batch n is sampled once version n - k exists, and trained once it is sampled and version n exists.

    A draining refit waits for the batches that are being sampled."""
    rollout_s, train_s, steps = rollout / 10, train / 10, 8
    made = times(rollout=f"{rollout_s}", train=f"{train_s}", logprobs="0", ref="0", refit="0")
    found = published(run(Schedule(steps=steps, max_staleness=k, refit=refit), made))
    ends: list[float] = [0.0]
    sampled = [rollout_s] * (k + 1)
    for n in range(steps):
        ends.append(max(ends[n], sampled[n]) + train_s)
        if refit == "drain":
            ends[-1] = max([ends[-1], *sampled[: min(steps, len(sampled))]])
        sampled.append(ends[-1] + rollout_s)
    assert found == pytest.approx(ends)


def test_a_kept_run_on_gpus_is_predicted_two_steps_ahead_from_the_record_of_a_synchronous_one(capsys):
    with replay.records(None) as folder:
        same, ahead = replay.predicted(folder)
        typed = ["--max-staleness", "2", "--refit", "in_flight", "--json"]
        found = json.loads(command(capsys, str(folder / "0"), *typed)[1])
    assert abs(same["error %"]) < 2 and abs(ahead["error %"]) <= replay.AIM
    assert found["averaged_steps"] == [4, 7] and round(found["step_s"], 3) == ahead["predicted s"]
    assert (same["max_staleness"], ahead["max_staleness"]) == (0, 2) and ahead["measured s"] < same["measured s"]


@pytest.mark.parametrize("staleness", [0, 2])
def test_kept_runs_on_gpus_are_simulated_as_they_were(staleness):
    """With two steps ahead, up to three streams were computed at a time, and the engine had room for two."""
    with replay.records(None) as folder:
        recording = recorded(folder / str(staleness))
    assert recording.durations.costs.room == ({"sampler": 1024} if staleness else {})
    real = analyse(recording.events, recording.plan)
    for seed in range(8):
        found = simulated(recording, Changes(), seed=seed)[1]
        assert disagreement(found, real) is None
        if staleness:  # the first step of the other one compiled
            assert found.steps.averaged == real.steps.averaged == "steps 4 to 7"
            assert found.steps.warm_up[0] == pytest.approx(real.steps.warm_up[0], rel=0.15)


def test_draining_waits_for_the_streams_and_swapping_in_flight_does_not():
    slow = dict(rollout="lognormal(1, 1.0)", train="0.1")
    drained = published(run(Schedule(steps=20, max_staleness=1), times(**slow)))[-1]
    swapped = published(run(Schedule(steps=20, max_staleness=1, refit="in_flight"), times(**slow)))[-1]
    assert swapped < 0.95 * drained


def test_a_gpu_computes_running_samples_again_when_weights_come():
    """A group has 100 tokens per second here."""
    schedule, again_s = Schedule(steps=6, max_staleness=1, refit="in_flight"), 1e-4
    plain, events = (run(schedule, times(Costs(again_s=each), rollout="1 @ 0.1")) for each in (0.0, again_s))
    spans = {e.step: e for e in events if isinstance(e, trace.Ran) and e.stage == "rollout"}
    before = {e.step: e for e in plain if isinstance(e, trace.Ran) and e.stage == "rollout"}
    step, swap_s = next((n, s) for s in published(events) for n, e in spans.items() if e.start_s < s < e.end_s)
    assert before[step].start_s == spans[step].start_s
    tokens = 100 * (swap_s - spans[step].start_s) * 4 * planned(schedule).group_size
    assert spans[step].end_s - before[step].end_s == pytest.approx(again_s * tokens)
    drained = Schedule(steps=6, max_staleness=1)
    assert published(run(drained, times(Costs(again_s=1.0)))) == published(run(drained, times()))


def test_tokens_of_a_group_that_saw_a_swap_have_two_versions():
    schedule = Schedule(steps=10, max_staleness=1, refit="in_flight")
    events = run(schedule, times(rollout="lognormal(1, 1.0)", train="0.1"))
    versions = [pair for e in events if isinstance(e, trace.Put) for pair in e.versions]
    assert any(old < new for old, new in versions) and all(new - old <= 1 for old, new in versions)
    trained = [e for e in events if isinstance(e, trace.Trained)]
    assert {e.version - old for e in trained for old in e.oldest} == {0, 1}


def test_what_is_too_old_is_dropped_and_no_staleness_exceeds_the_bound():
    schedule = Schedule(steps=30, max_staleness=1, on_stale="drop", refit="in_flight")
    events = run(schedule, times(rollout="lognormal(1, 1.5)", train="0.1"), batch=8)
    ages = Counter(e.version - old for e in events if isinstance(e, trace.Trained) for old in e.oldest)
    assert max(ages) == 1
    reasons = Counter(e.reason for e in events if isinstance(e, trace.Dropped))
    assert reasons["cancelled"] > 0
    assert all(all(e.tokens) for e in events if isinstance(e, trace.Dropped) and e.reason == "stale")


@pytest.mark.parametrize(("cores", "factor"), [(None, 1.0), (4, 1.0), (2, 2.0), (1, 4.0)])
def test_stages_that_compute_at_the_same_time_share_the_cores(cores, factor):
    """Rollout and train each keep two cores busy, on lanes of their own."""
    schedule = Schedule(steps=6, max_staleness=1, refit="in_flight")
    made = times(rollout="1 @ 2", train="1 @ 2", logprobs="0", ref="0", refit="0")
    ends = published(run(schedule, made, cores=cores))
    assert ends[4] - ends[3] == pytest.approx(factor)


def test_waiting_is_not_slowed_down():
    schedule = Schedule(steps=6, max_staleness=1, refit="in_flight")
    made = times(rollout="1", train="1 @ 2", logprobs="0", ref="0", refit="0")
    ends = published(run(schedule, made, cores=2))
    assert ends[4] - ends[3] == pytest.approx(1.0)


def test_the_driver_takes_one_report_after_the_other():
    judges = {"reward": {"on": toy.WorkerGroup("judge", workers=4)}}
    events = run(Schedule(steps=1), times(Costs(driver_s=0.01), reward="1/group"), changes=judges)
    ends = [e.end_s for e in events if isinstance(e, trace.Ran) and e.stage == "reward"]
    told = [e.at_s for e in events if isinstance(e, trace.Acknowledged) and e.stage == "reward"]
    assert len(set(ends)) == 1  # all at the same time
    assert told == pytest.approx([ends[0] + n * 0.01 for n in (1, 2, 3, 4)])


def test_a_batch_is_divided_over_the_workers_of_a_sharded_stage():
    made = times(train="0.1/sample", logprobs="0", ref="0")
    one, two = (published(run(Schedule(steps=1), made, changes={"learner": n}))[-1] for n in (1, 2))
    assert one - two == pytest.approx(8 * 0.1 / 2)


def test_latencies_and_checkpoints_count():
    costs = Costs(dispatch_s={"train": 0.5}, report_s={"train": 0.25})
    ends = published(run(Schedule(steps=3), times(costs)))
    assert ends == pytest.approx([0.125 + n * (2.0 + 0.75) for n in range(4)])
    slow = [e for e in run(Schedule(steps=3), times(Costs(checkpoint_s=7.0))) if isinstance(e, trace.Checkpointed)]
    assert [e.end_s - e.start_s for e in slow] == [7.0]


def test_more_workers_take_the_tasks_of_a_step_at_the_same_time():
    made = times(reward="1/group")
    one = published(run(Schedule(steps=2), made))[-1]
    four = published(run(Schedule(steps=2), made, changes={"reward": {"on": toy.WorkerGroup("judge", workers=4)}}))[-1]
    assert one - four == pytest.approx(2 * 3)


def test_the_same_seed_gives_the_same_events_and_another_gives_others():
    schedule = Schedule(steps=6, max_staleness=2, on_stale="drop", refit="in_flight")
    made = times(rollout="lognormal(1, 1)", train="uniform(0.1, 0.5)")
    first, again, other = (run(schedule, made, cores=2, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_a_group_takes_as_long_under_one_schedule_as_under_another():
    made = times(rollout="lognormal(1, 1)")
    delays = []
    for schedule in (Schedule(steps=4), Schedule(steps=4, max_staleness=2)):
        events = run(schedule, made)
        began = {
            group: e.at_s
            for e in events
            if isinstance(e, trace.Submitted) and e.stage == "rollout"
            for group in e.groups
        }
        delays.append(
            {
                g: round(e.end_s - began[g], 9)
                for e in events
                if isinstance(e, trace.Put) and e.stage == "rollout"
                for g in e.groups
            }
        )
    assert delays[0] == delays[1] and len(set(delays[0].values())) > 8


@pytest.mark.parametrize("kind", ["before_put", "after_put", "mid_stream", "late", "twice"])
@pytest.mark.parametrize("stage", ["rollout", "logprobs", "train", "refit"])
def test_a_fault_costs_time_and_loses_nothing(stage, kind):
    told = []

    def faults(task):
        hit = task.stage == stage and task.step == 1 and task.attempt == 0
        return Fault(kind=kind, groups=2, delay_s=0.05) if hit else None

    schedule = Schedule(steps=4, max_staleness=1, refit="in_flight")
    events = run(schedule, times(rollout="lognormal(1, 0.5)"), faults=faults, watch=lambda *seen: told.append(seen))
    lost = {e.task for e in events if isinstance(e, trace.Retried)}
    assert len(lost) == (0 if kind == "twice" else 1)
    claimed = [group for e in events if isinstance(e, trace.Claimed) for group in e.groups]
    assert sorted(claimed) == list(range(16))
    put = Counter((e.stage, g) for e in events if isinstance(e, trace.Put) for g in e.groups)
    assert set(put.values()) == {1}
    assert [e.version for e in events if isinstance(e, trace.Published)] == [0, 1, 2, 3, 4]
    failed = False
    for _, reported, _ in told:  # reports of a lost attempt do not reach the scheduler
        for event in reported:
            if failed and isinstance(event, Landed):
                assert event.task not in lost
            if failed and isinstance(event, Finished):
                assert event.task.number not in lost
            failed |= isinstance(event, AttemptLost)
    assert any(isinstance(e, trace.Fenced) for e in events) == (kind == "late")


def test_a_straggler_is_slow_and_nothing_else():
    slow = run(
        Schedule(steps=2), times(),
        faults=lambda task: Fault(kind="straggles", factor=3.0) if (task.stage, task.step) == ("train", 1) else None,
    )  # fmt: skip
    assert published(slow)[-1] == pytest.approx(0.125 + 2 * 2.0 + 2 * 0.5)


def test_a_gate_drops_its_share_and_batches_are_full():
    kept = toy.Field("kept", dtype="bool")
    gate = {"filter": dict(reads=(toy.REWARD,), writes=(kept,), gate=kept, per="group")}
    made = times(Costs(drop_rate=0.4, drop_reason="all alike"), filter="0")
    events = run(Schedule(steps=20), made, batch=8, changes=gate)
    claimed = [len(e.groups) for e in events if isinstance(e, trace.Claimed)]
    assert claimed == [8] * 20
    dropped = [e for e in events if isinstance(e, trace.Dropped)]
    count = sum(len(e.groups) for e in dropped)
    assert {(e.stage, e.reason) for e in dropped} == {("filter", "all alike")}
    assert count / (count + 160) == pytest.approx(0.4, abs=0.1)
    with pytest.raises(StageError, match="max_rounds"):
        run(Schedule(steps=3), times(Costs(drop_rate=1.0), filter="0"), changes=gate)


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_changed_plan_is_the_plan_of_the_changed_graph(k, on_stale):
    if k == 0 and on_stale == "drop":
        return
    schedule = Schedule(steps=9, max_staleness=k, on_stale=on_stale, refit="in_flight")
    change = Changes(steps=9, max_staleness=k, on_stale=on_stale, refit="in_flight", groups="2x")
    expected = planned(schedule, batch=8)
    found = change.applied(planned(Schedule(steps=3), batch=4), times())[0]
    without = {"stages": ()}  # their source locations differ
    assert msgspec.structs.replace(found, **without) == msgspec.structs.replace(expected, **without)


def test_rollout_is_never_further_ahead_than_staleness_allows():
    deep = planned(Schedule(steps=3, max_staleness=3, pipeline_depth=2))
    assert Changes(max_staleness=1).applied(deep, times())[0].ahead == 1
    assert Changes(max_staleness=5).applied(deep, times())[0].ahead == 2
    assert Changes(max_staleness=2, pipeline_depth=9).applied(deep, times())[0].ahead == 2


def test_changes_of_seconds():
    plan_, changed = Changes(refit_s=2.0, speed={"train": 5.0}, stages={"rollout": "3"}).applied(
        planned(Schedule(steps=2)), times()
    )
    ends = published(Simulation(plan_, changed).run())
    assert ends == pytest.approx([2.0 + n * (3 + 0.25 + 0.125 + 0.1 + 2.0) for n in range(3)])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Changes(groups="0x"), "neither a number of groups nor a factor"),
        (Changes(groups="many"), "neither a number of groups nor a factor"),
        (Changes(max_staleness=-1), "it must be 0 or more"),
        (Changes(workers={"sampleer": 2}), "did you mean sampler"),
        (Changes(workers={"sampler": 0}), "cannot have 0 workers"),
        (Changes(speed={"trian": 2.0}), "did you mean train"),
        (Changes(speed={"train": 0.0}), "not a factor"),
        (Changes(stages={"train": "soon"}), "neither a number of seconds"),
        (Changes(refit_s=-1.0), "not a time"),
    ],
)
def test_what_cannot_be_changed_is_told(change, told):
    with pytest.raises(GraphError, match=told):
        change.applied(planned(Schedule(steps=2)), times())


def test_groups_that_take_turns_cannot_run_ahead():
    in_turns = planned(Schedule(steps=2))
    first, *others = in_turns.groups
    in_turns = replace(in_turns, groups=(first, *(replace(group, colocated=first.name) for group in others)))
    with pytest.raises(GraphError, match=r"shares the GPUs of .* cannot run ahead\. Fix: --max-staleness 0"):
        Changes(max_staleness=1).applied(in_turns, times())
    assert Changes(max_staleness=0, steps=3).applied(in_turns, times())[0].steps == 3


def recorded_in(folder: Path) -> Path:
    """Return the run directory of a simulated run, as a real run would leave it."""
    made = times(rollout="lognormal(1, 0.5)", train="0.5 @ 2")
    (folder / "run.json").write_text(json.dumps({"machine": "x86_64, 2 cores"}))
    return write_run(folder, planned(Schedule(steps=8)), made, cores=2)


@pytest.fixture
def record(tmp_path) -> Path:
    return recorded_in(tmp_path)


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    code = simulate.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_recorded_run_is_simulated_as_it_was_and_changed(record, capsys):
    code, out, _ = command(capsys, str(record), "--max-staleness", "1", "--refit", "in_flight")
    assert code == 0
    assert all(column in out for column in ("measured", "simulated as it was", "changed", "rollout-bound"))
    measured, again, changed = (
        float(text) for text in out.split("step, mean")[1].split("\n")[0].split() if text != "s"
    )
    assert again == pytest.approx(measured, rel=0.03)
    assert changed < 0.9 * measured


@pytest.mark.journal_expected  # without metrics
def test_a_record_that_is_not_simulated_well_comes_with_a_warning(record, tmp_path, capsys):
    """Two more seconds pass between the tasks of one step and those of the next."""
    moved = []
    for line in (record / "events.jsonl").read_bytes().splitlines():
        event = json.loads(line)
        late_s = 2.0 * (event.get("step", -1) + 1)
        moved.append(event | {name: event[name] + late_s for name in ("at_s", "start_s", "end_s") if name in event})
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "plan.json").write_bytes((record / "plan.json").read_bytes())
    (slow / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in moved))
    for flags in ([], ["--max-staleness", "1"]):
        assert "warning" not in command(capsys, str(record), *flags)[1]
        out = " ".join(command(capsys, str(slow), *flags)[1].split())
        assert "note: warning: simulated as it was, a step takes" in out and "so this record foretells no change" in out
        notes = json.loads(command(capsys, str(slow), *flags, "--json")[1])["notes"]
        assert any(note.startswith("warning: simulated as it was") for note in notes)


def test_json_is_one_object(record, capsys):
    code, out, _ = command(capsys, str(record), "--json", "--groups", "2x")
    told = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert {"step_s", "utilisation", "staleness", "dropped", "critical_path"} <= told.keys()
    assert told["groups"] == 8 and told["cores"] == 2.0
    assert told["measured"]["step_s"] == pytest.approx(told["step_s"], rel=0.5)


def test_a_graph_file_takes_its_own_flags_and_distributions(tmp_path, capsys):
    file = tmp_path / "graph.py"
    file.write_text(GRAPH)
    code, out, _ = command(capsys, str(file), "--batch", "8", "--steps", "5", "--max-staleness", "1", "--json", *STAGES)
    told = json.loads(out)
    assert (code, told["groups"], told["steps"], told["max_staleness"]) == (0, 8, 5, 1)


CLASHING = """
import json as text
from pipeline import Schedule
from tests.unit import toy

def graph(
    steps: int = 6,
    seed: int = 7,
    workers: int = 4,  # processes of the loader
    groups: int = 8,
    speed: float = 1.5,
    cores: str = "all",
    stage: int = 2,
    refit: bool = True,
    on_stale: str = "ask",
    json: bool = False,
    run: str = "first",
):
    values = dict(locals())
    with open(__file__ + ".json", "w") as file:
        text.dump(values, file)
    return toy.graph(batch=4, schedule=Schedule(steps=steps), **toy.streaming())
"""
DEFAULTS = {
    "steps": 6, "seed": 7, "workers": 4, "groups": 8, "speed": 1.5, "cores": "all", "stage": 2, "refit": True,
    "on_stale": "ask", "json": False, "run": "first",
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ([], {}),
        (["--steps", "4", "--seed", "3"], {"steps": 4, "seed": 3}),
        (["--workers", "sampler=2", "--groups", "2x", "--speed", "train=2x", "--cores", "3"], {}),
        (["--refit", "in_flight", "--max-staleness", "1", "--on-stale", "drop"], {}),
        (["--graph-workers", "2", "--graph-groups=5", "--graph-speed", "2"], {"workers": 2, "groups": 5, "speed": 2.0}),
        (["--graph-cores", "3", "--graph-stage", "9", "--graph-json"], {"cores": "3", "stage": 9, "json": True}),
        (["--no-graph-refit", "--graph-on-stale", "", "--run", "b"], {"refit": False, "on_stale": "", "run": "b"}),
    ],
)
def test_a_flag_is_given_to_a_parameter_only_if_both_mean_the_same(arguments, changes, tmp_path, capsys):
    file = tmp_path / "graph.py"
    file.write_text(CLASHING)
    code, out, err = command(capsys, str(file), "--json", *STAGES, *arguments)
    assert code == 0 and json.loads(out), err
    assert json.loads((tmp_path / "graph.py.json").read_text()) == DEFAULTS | changes
    given = {word.partition("=")[0] for word in (*STAGES, "--json", *arguments) if word.startswith("--")}
    clashing = given & {"--workers", "--groups", "--speed", "--cores", "--stage", "--refit", "--on-stale", "--json"}
    warned = [line.partition(": ")[0] for line in err.splitlines() if "it does not set the parameter" in line]
    assert sorted(warned) == sorted(clashing)
    fix = "Fix: set the parameter with --graph-stage\n"
    assert (
        f"--stage: warning: it does not set the parameter 'stage' of graph(); it is a flag of the simulation. {fix}"
        in err
    )


def test_a_value_that_the_parameter_does_not_take_is_told(tmp_path, capsys):
    file = tmp_path / "graph.py"
    file.write_text("from typing import Literal\ndef graph(steps: Literal[3, 6] = 3): ...")
    code, _, err = command(capsys, str(file), "--steps", "4")
    assert code == 2 and err.startswith(
        "--steps 4: expected one of 3, 6, got '4'; parameter 'steps' of graph() gets it"
    )


def test_the_help_of_a_graph_file_lists_its_parameters(tmp_path, capsys):
    file = tmp_path / "graph.py"
    file.write_text(CLASHING)
    with pytest.raises(SystemExit, match="0"):
        simulate.main([str(file), "--help"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    listed = lines[lines.index("parameters of graph():") + 1 :]
    assert "--graph-workers INT 4 processes of the loader" in listed and "--run TEXT first" in listed
    assert not [line for line in listed if line.startswith(("--steps", "--seed"))], "they are those of the simulation"
    for words in ([], [str(tmp_path)]):
        with pytest.raises(SystemExit, match="0"):
            simulate.main([*words, "--help"])
        assert "parameters of graph():" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no run is named"),
        (["--nope"], "--nope: there is no such flag"),
        (["--max-stalenes=1", "--json"], "did you mean --max-staleness?"),
        (["nowhere"], "there is no such file"),
        (["{folder}"], "plan.json does not exist"),
        (["{record}", "--max-stalenes", "1"], "did you mean --max-staleness?"),
        (["{record}", "--on-stale", "keep"], "expected one of wait, drop, got 'keep'"),
        (["{record}", "--workers", "sampler"], "the flag takes a name and a whole number to 999999"),
        (["{record}", "--workers", "sampler=nan"], "the flag takes a name and a whole number to 999999"),
        (["{record}", "--environments", "rollout=4"], "no calls of 'rollout' that wait for a process are recorded"),
        (["{record}", "--stage", "rollout=lognormal(1)"], "lognormal takes 2 numbers"),
        (["{record}", "--cores", "0"], "cores"),
        (["{record}", "--cores", "1e-300"], "a machine has 0.01 to 1,000,000 cores"),
        (["{record}", "--cores", "nan"], "a machine has 0.01 to 1,000,000 cores"),
        (["{graph}", "--steps", "0"], "--steps 0: it is too small"),
        (["{record}", "--steps", "9" * 17], "the most are 100,000 steps"),
        (["{record}", "--groups", "9" * 9], "1,000,000 groups per step"),
        (["{record}", "--groups", "1000x", "--steps", "9999"], "10,000,000 in all"),
        (["{record}", "--groups", ""], "--groups: its value is empty"),
        (["{record}", "--speed", f"train=0.{'0' * 40}1x"], "it is not a factor"),
        (["{record}", "--refit-s", "1e300"], "it must be 0 to 1,000,000,000 seconds"),
        (["{record}", "--refit-s", "nan"], "it must be 0 to 1,000,000,000 seconds"),
        (["{record}", "--stage", "train=1e308"], "a number is too large"),
        (["{record}", "--seed", "-1"], "--seed: expected a whole number, 0 or more, got '-1'"),
        (["{graph}"], "the durations of prompts, rollout"),
    ],
)
def test_mistakes_on_the_command_line_are_told(arguments, told, record, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    graph = tmp_path / "graph.py"
    graph.write_text(GRAPH)
    places = {"{folder}": str(empty), "{record}": str(record), "{graph}": str(graph)}
    code, out, err = command(capsys, *(places.get(text, text) for text in arguments))
    assert code == 2 and told in err and "Fix: " in err and not out


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("plan.json", "{}", "it cannot be read"),
        ("events.jsonl", '{"type":"unheard"}\n', "it cannot be read"),
        ("events.jsonl", "", "fewer than two steps have ended"),
    ],
)
def test_a_record_that_is_damaged_or_too_short_is_told(file, text, told, tmp_path_factory, capsys):
    record = recorded_in(tmp_path_factory.mktemp("damaged"))  # not where the checker looks for runs
    (record / file).write_text(text)
    code, _, err = command(capsys, str(record))
    assert code == 2 and told in err


def test_the_command_loads_neither_torch_nor_ray():
    script = (
        "import sys, pipeline.simulate, pipeline.analysis\n"
        "print(sorted({'torch', 'ray', 'transformers', 'transfer_queue', 'numpy', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
