"""The filter stage: which groups it drops and why, and what a run with a gate records."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import cloudpickle
import msgspec
import numpy
import pytest
import torch

from pipeline import Field, Graph, GraphError, Output, Schedule, Stage, StageContext, StageError, Task, WorkerGroup
from pipeline.declare.columns import Ragged
from pipeline.declare.stage import External, Gate
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.record import trace as record
from pipeline.rundir import RunDir
from stages import Filter
from tests.unit import toy

torch.set_num_threads(1)
PROMPT, SCORE, MARK = Field("prompt", dtype="str"), Field("reward", dtype="float32"), Field("mark", dtype="float32")


def run(stage, columns, group_size=2, groups=(7, 9)):
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=group_size, run_dir=None, shared={})
    return stage.setup(context)(columns, Task(stage="filter", step=2, groups=groups))


def whats(stage, group_size=2):
    return [found.what for found in stage.check(SimpleNamespace(group_size=group_size))]


def line_of(function):
    return f"{__file__}:{inspect.getsourcelines(function)[1]}"


def learnable(reward: list[float], truncated: list[bool], least: float = 0.1) -> bool:
    return least < sum(reward) / len(reward) < 0.9 and not all(truncated)


def test_equal_rewards_are_dropped():
    out = run(Filter("zero_spread"), {"reward": torch.tensor([1.0, 1.0, 0.0, 1.0])})
    assert out.dropped == {0: "every reward is 1"}
    assert out.columns["kept"].tolist() == [True, True]
    assert out.columns["kept"].dtype == torch.bool
    all_lost = run(Filter(), {"reward": torch.tensor([0.25, 0.25, -1.0, -1.0])})
    assert all_lost.dropped == {0: "every reward is 0.25", 1: "every reward is -1"}
    assert all_lost.columns["kept"].tolist() == []
    nearly = torch.tensor([0.3, 0.3 + 1e-6, 0.0, -0.0])
    assert run(Filter(), {"reward": nearly}).dropped == {1: "every reward is 0"}
    last = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    assert run(Filter(), {"reward": last}, group_size=3).dropped == {1: "every reward is 1"}


def test_another_field_may_count():
    stage = Filter(of="reward_exact_match")
    assert [(made.name, made.dtype) for made in stage.reads] == [("reward_exact_match", "float32")]
    out = run(stage, {"reward_exact_match": torch.tensor([1.0, 0.0, 1.0, 1.0])})
    assert out.dropped == {1: "every reward_exact_match is 1"}


def test_a_function_decides_on_the_columns_of_one_group():
    stage = Filter(learnable)
    assert [(made.name, made.dtype) for made in stage.reads] == [("reward", "float32"), ("truncated", "bool")]
    columns = {"reward": torch.tensor([0.5, 0.0, 0.0, 1.0, 0.0, 0.0])}
    columns["truncated"] = torch.tensor([False, True, True, True, False, False])
    out = run(stage, columns, groups=(0, 1, 2))
    assert out.dropped == {1: "learnable() is False", 2: "learnable() is False"}
    assert len(out.columns["kept"]) == 2


def test_a_function_gets_plain_values():
    seen = []

    def look(response: list[str], response_ids: list[list[int]], level: list[str]):
        seen.append((response, response_ids, level))
        return numpy.bool_(True)

    ids = Ragged.of([torch.tensor([4]), torch.tensor([5, 6])])
    columns = {"response": ["a", "b"], "response_ids": ids, "level": ["x", "x"]}
    assert run(Filter(look), columns, groups=(3,)).dropped == {}
    assert seen == [(["a", "b"], [[4], [5, 6]], ["x", "x"])]


def test_the_stage_travels_to_a_worker():
    assert pickle.loads(cloudpickle.dumps(Filter(learnable))).reads == Filter(learnable).reads


@pytest.mark.parametrize("value", [None, 1, 0.5, "yes", [True, True]])
def test_a_function_that_returns_no_bool_is_an_error_that_names_the_group(value):
    def rule(reward):
        return value

    with pytest.raises(StageError) as error:
        run(Filter(rule), {"reward": torch.tensor([1.0, 0.0, 0.0, 0.0])})
    (problem,) = error.value.problems
    assert problem.where == line_of(rule)
    assert problem.what == f"filter rule rule returned {value!r} for group 7 of step 3, called with reward=[1.0, 0.0]"


def test_a_function_that_raises_is_an_error_that_names_the_group():
    def inverse(reward):
        return sum(1 / value for value in reward) > 1

    with pytest.raises(StageError) as error:
        run(Filter(inverse), {"reward": torch.tensor([1.0, 2.0, 1.0, 0.0])})
    (problem,) = error.value.problems
    assert problem.what == (
        "filter rule inverse raised ZeroDivisionError: float division by zero for group 9 of step 3, "
        "called with reward=[1.0, 0.0]"
    )


def test_bad_descriptions_are_refused():
    assert whats(Filter("zero_spread")) == whats(Filter(learnable, max_rounds=2)) == []
    assert whats(Filter("zero-spread")) == ["unknown rule 'zero-spread'"]
    (problem,) = Filter("zero-spread").check(SimpleNamespace(group_size=2))
    assert problem.fix == "did you mean 'zero_spread'?"
    assert whats(Filter(3)) == ["3 is neither a rule nor a function"]
    assert whats(Filter(lambda reward: True)) == ["the rule is a lambda, which has no name of its own"]
    assert whats(Filter(), group_size=1) == ["every group has one sample, so zero_spread drops every group"]
    assert whats(Filter(learnable), group_size=1) == []
    for field in ("response", "response_ids", "trained_weights", "No Field", 3):
        assert whats(Filter(of=field)) == [f"Filter has of={field!r}"]
    assert whats(Filter(learnable, of="truncated")) == ["Filter has of='truncated' and a function as its rule"]

    async def later(reward): ...
    def nothing(least=0.1): ...
    def anything(*fields, reward): ...
    def weights(trained_weights): ...

    assert whats(Filter(later)) == ["filter rule later is async"]
    assert whats(Filter(nothing)) == ["filter rule nothing reads no field"]
    assert whats(Filter(anything)) == ["filter rule anything has the parameter *fields"]
    assert whats(Filter(weights)) == ["filter rule weights has the parameter trained_weights"]


@dataclass(frozen=True)
class Numbers(Stage):
    """A source whose prompts are the group numbers."""

    batch: int = 4
    name: str = "numbers"
    group_size: int = 2
    writes: Sequence[Field] = (PROMPT,)

    def setup(self, context):
        return lambda columns, task: {"prompt": [str(group) for group in task.groups for _ in range(2)]}


@dataclass(frozen=True)
class Score(Stage):
    """Gives equal rewards to groups whose number modulo 3 is `equal`, or to all groups if `equal` is -1."""

    equal: int = 0
    name: str = "score"
    per: str = "group"
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (SCORE,)

    def setup(self, context):
        def run(columns, task):
            numbers = [int(text) for text in columns["prompt"]]
            spread = [0.0 if self.equal in (-1, number % 3) else float(i % 2) for i, number in enumerate(numbers)]
            return Output({"reward": torch.tensor(spread)}, {"mean": sum(numbers) / len(numbers)})

        return run


@dataclass(frozen=True)
class Look(Stage):
    """Records the group numbers it receives, read from the prompts."""

    seen: list
    name: str = "look"
    per: str = "batch"
    reads: Sequence[Field] = (PROMPT,)

    def setup(self, context):
        def run(columns, task):
            self.seen.append([int(text) for text in columns["prompt"][::2]])
            return Output(metrics={"mean": sum(task.groups) / len(task.groups)})

        return run


def graph(*stages, steps=3, **options):
    return Graph(name="gated", source=Numbers(), stages=stages, schedule=Schedule(steps=steps, **options))


def execute(described, tmp_path, **options):
    run_dir = RunDir(tmp_path / "run").create()
    driver = Driver(described, plan(described)[0], LocalExecutor(), run_dir=run_dir, **options)
    driver.execute()
    lines = [msgspec.json.decode(line) for line in run_dir.metrics.read_bytes().splitlines()]
    return lines, [event for _, event in record.read(run_dir.events)], run_dir


@dataclass(frozen=True)
class Overwrites(Look):
    """Reports a metric of another stage."""

    def setup(self, context):
        return lambda columns, task: Output(metrics={"score/mean": 77})


def test_a_metric_of_another_stage_ends_the_run(tmp_path):
    with pytest.raises(StageError, match=r"'look' returned the metric 'score/mean'; .* those of stage 'score'"):
        execute(graph(Score(), Overwrites([])), tmp_path)


class Sends(toy.Toy):
    """A transfer that reports a metric of another stage."""

    def setup(self, context):
        return lambda rendezvous, task: rendezvous.offer(None) or Output(metrics={"reward/mean": 7})


def test_a_metric_of_another_stage_ends_the_run_of_a_transfer_too(tmp_path):
    described = toy.graph()
    stages = [
        Sends(**{each.name: getattr(stage, each.name) for each in fields(stage)})
        if stage.shape == "transfer"
        else stage
        for stage in described.stages
    ]
    with pytest.raises(StageError, match=r"'refit' returned the metric 'reward/mean'; .* those of stage 'reward'"):
        execute(replace(described, stages=tuple(stages)), tmp_path)


def test_a_run_trains_the_first_groups_that_are_kept_and_records_the_others(tmp_path):
    seen = []
    lines, events, run_dir = execute(graph(Score(), Filter(), Look(seen)), tmp_path)
    assert seen == [[1, 2, 4, 5], [7, 8, 10, 11], [13, 14, 16, 17]], "every third group is dropped"
    counts = [[line[f"filter/{name}"] for name in ("admitted", "dropped", "acceptance")] for line in lines]
    assert counts == [[6, 2, 1 - 2 / 6]] * 3
    assert [line["score/mean"] for line in lines] == pytest.approx([2.5, 8.5, 14.5]), "over all that were sampled"
    assert [line["look/mean"] for line in lines] == pytest.approx([3, 9, 15]), "over the batch"
    drops = [(event.step, event.groups, event.reason) for event in events if isinstance(event, record.Dropped)]
    why = "every reward is 0"
    assert drops == [(0, (0, 3), why), (1, (6, 9), why), (2, (12, 15), why)]
    assert [event.rows_left for event in events if isinstance(event, record.Ended)] == [0]
    cleared = [group for event in events if isinstance(event, record.Cleared) and event.last for group in event.groups]
    assert sorted(cleared) == list(range(18))
    samples = [msgspec.json.decode(line) for line in run_dir.samples(0).read_bytes().splitlines()]
    assert [row["key"] for row in samples[::2]] == [f"{group:08d}_g000" for group in (1, 2, 4, 5)]
    assert "kept" not in samples[0]


def test_a_run_whose_groups_are_all_dropped_ends_with_an_error_that_says_so(tmp_path):
    with pytest.raises(StageError) as error:
        execute(graph(Score(equal=-1), stage := Filter(max_rounds=3), Look([])), tmp_path)
    (problem,) = error.value.problems
    assert problem.where == str(stage.location)
    assert problem.what == (
        "stage 'filter' dropped 12 of 12 groups at step 1 and the batch of 4 is not full: 12 (every reward is 0)"
    )
    failed = [event for _, event in record.read(tmp_path / "run" / "events.jsonl") if isinstance(event, record.Failed)]
    assert [(event.stage, event.step) for event in failed] == [("filter", 0)]


def test_what_comes_from_outside_is_waited_for_before_a_group_is_dropped(tmp_path):
    """The outside process writes to every admitted group, dropped or not, and no rows are left."""
    seen = []
    described = graph(Score(), External((MARK,), timeout_s=20.0), Filter(), Look(seen), MarkedTwice(), steps=2)
    executor = LocalExecutor()
    run_dir = RunDir(tmp_path / "run").create()
    driver = Driver(described, plan(described)[0], executor, run_dir=run_dir)
    driver.loop.outside.due = lambda: True  # check on every pass, not once per second
    wait = executor.wait

    def wait_and_write(timeout_s):
        results = wait(timeout_s)
        if not results:  # the graph is blocked until the outside process writes
            for step in driver.scheduler.steps_in_flight():
                for group in driver.scheduler.absent(step, "mark"):
                    executor.plane.write_outside("gated", f"{group:08d}.0", {"mark": torch.ones(2)})
        return results

    executor.wait = wait_and_write
    driver.execute()
    assert seen == [[1, 2, 4, 5], [7, 8, 10, 11]]
    events = [event for _, event in record.read(run_dir.events)]
    assert [event.rows_left for event in events if isinstance(event, record.Ended)] == [0]
    marked = {
        group for event in events if isinstance(event, record.Put) and "mark" in event.fields for group in event.groups
    }
    assert marked == set(range(12))


@dataclass(frozen=True)
class MarkedTwice(Stage):
    """Reads the field that the outside process writes."""

    name: str = "marked"
    per: str = "group"
    reads: Sequence[Field] = (MARK,)

    def setup(self, context):
        return lambda columns, task: Output(metrics={"sum": float(columns["mark"].sum())})


@dataclass(frozen=True)
class Dropper(Stage):
    """Drops the groups at `positions`; only allowed with a `gate`."""

    positions: tuple = (0,)
    name: str = "dropper"
    per: str = "group"
    reads: Sequence[Field] = (PROMPT,)
    writes: Sequence[Field] = (MARK,)
    gate: Gate | None = None

    def setup(self, context):
        kept = torch.ones(2 * (4 - len(self.positions)))
        return lambda columns, task: Output({"mark": kept}, dropped=dict.fromkeys(self.positions, "bad"))


@pytest.mark.parametrize(("positions", "gate"), [((0,), None), ((4,), MARK), ((-1,), MARK)])
def test_only_a_gate_drops_and_only_groups_that_it_has(positions, gate, tmp_path):
    with pytest.raises(StageError) as error:
        execute(graph(Dropper(positions, gate=gate and Gate(gate)), MarkedTwice()), tmp_path)
    assert error.value.problems[0].what == f"stage 'dropper' drops groups {list(positions)} of 4"


def test_a_gate_with_nothing_behind_it_is_refused():
    with pytest.raises(GraphError) as error:
        plan(graph(Score(), Filter()))
    assert [problem.what for problem in error.value.problems] == ["no stage follows 'filter'"]
