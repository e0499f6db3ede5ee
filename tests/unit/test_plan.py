"""The plan of a graph, and every check that a graph must pass before it is planned."""

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from pipeline import Field, Graph, GraphError, Model, Schedule, Stage, WorkerGroup
from pipeline.cli.load import load
from pipeline.declare.sharding import Sharding
from pipeline.declare.stage import External
from pipeline.errors import Problem, shown
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from tests.unit import toy
from tests.unit.toy import LEARNER, LOGPROBS, POLICY, PROMPT, RESPONSE, REWARD, SAMPLER, SERVED, TRAINED, Toy

QUICKSTART = Path(__file__).resolve().parents[2] / "graphs/quickstart.py"
SCORE = Field("score", dtype="float32")
EXTRA = Field("extra", dtype="int32")


def planned(graph):
    return plan(graph)[0]


def edges(made):
    return {(edge.field, edge.writer, edge.reader, edge.back) for edge in made.edges}


def layers(made):
    return [{stage.name for stage in layer} for layer in made.layers]


def fences(made):
    return {(fence.before, fence.after, fence.lag) for fence in made.fences}


def test_edges_come_from_field_names():
    assert edges(planned(toy.graph())) == {
        ("prompt", "prompts", "rollout", False),
        ("prompt", "prompts", "reward", False),
        ("response", "rollout", "reward", False),
        ("response", "rollout", "logprobs", False),
        ("reward", "reward", "train", False),
        ("logprobs", "logprobs", "train", False),
        ("trained_weights", "train", "refit", False),
        ("served_weights", "refit", "evaluate", False),
        ("served_weights", "refit", "rollout", True),
        ("prompt", "prompts", "samples", False),
        ("response", "rollout", "samples", False),
        ("reward", "reward", "samples", False),
    }


def test_the_order_of_the_stages_changes_nothing_but_their_order():
    graph = toy.graph()
    made, turned = planned(graph), planned(replace(graph, stages=graph.stages[::-1]))
    assert layers(turned) == layers(made)
    assert edges(turned) == edges(made)
    assert fences(turned) == fences(made)


def test_layers_follow_the_fields_of_one_step():
    assert layers(planned(toy.graph())) == [
        {"prompts"}, {"rollout"}, {"reward", "logprobs"}, {"train", "samples"}, {"refit"}, {"evaluate"},
    ]  # fmt: skip


def test_fences_order_what_shares_weights():
    assert fences(planned(toy.graph())) == {
        ("train", "logprobs", 1),
        ("logprobs", "train", 0),
        ("refit", "train", 1),
        ("evaluate", "refit", 1),
    }


def test_no_fence_where_nothing_is_shared():
    frozen = POLICY.frozen()
    assert ("train", "logprobs", 1) not in fences(planned(toy.graph(logprobs={"models": (frozen,)})))
    elsewhere = planned(toy.graph(reward={"on": LEARNER}))
    assert fences(elsewhere) == fences(planned(toy.graph()))


def test_a_field_lives_until_its_last_reader():
    lives = {life.field: (life.writer, set(life.readers)) for life in planned(toy.graph()).lifetimes}
    assert lives["prompt"] == ("prompts", {"rollout", "reward", "samples"})
    assert lives["logprobs"] == ("logprobs", {"train"})
    assert lives["served_weights"] == ("refit", {"rollout", "evaluate"})


def test_placement_is_by_worker_group_and_the_host_is_last():
    made = planned(toy.graph(reward={"on": WorkerGroup("scorers", workers=2, gpus=2, cpus=0.5, threads=3)}))
    placed = {group.name: group for group in made.groups}
    assert [*placed] == ["sampler", "scorers", "learner", "host"]
    assert placed["sampler"].stages == ("rollout", "refit", "evaluate")
    assert placed["learner"].stages == ("logprobs", "train", "refit")
    assert placed["host"].stages == ("prompts", "samples")
    scorers = placed["scorers"]
    assert (scorers.workers, scorers.gpus, scorers.cpus, scorers.threads) == (2, 2, 0.5, 3)
    assert made.stage("refit").groups == ("learner", "sampler")


def test_numbers_of_the_plan():
    made = planned(toy.graph(batch=6, schedule=Schedule(steps=3, max_staleness=0, checkpoint_every=2)))
    assert (made.batch, made.group_size, made.steps, made.checkpoint_every, made.capacity) == (6, 2, 3, 2, 12)
    assert planned(toy.graph(schedule=Schedule(steps=1, capacity=5))).capacity == 5
    stale = toy.graph(schedule=Schedule(steps=1, max_staleness=3), train={"corrects_off_policy": True})
    assert planned(stale).capacity == 5 * 4
    assert made.weights_fields == ("trained_weights", "served_weights")
    by_field = {(edge.field, edge.bytes_per_sample, edge.ragged) for edge in made.edges}
    assert {("logprobs", 4, "T"), ("prompt", 32, None), ("trained_weights", 0, None)} <= by_field
    wide = Field("pixels", dtype="bfloat16", dims="N Q 3 4")
    made = planned(toy.graph(rollout={"writes": (RESPONSE, wide)}, reward={"reads": (PROMPT, RESPONSE, wide)}))
    assert ("pixels", 24, "Q") in {(edge.field, edge.bytes_per_sample, edge.ragged) for edge in made.edges}
    assert "pixels" not in made.stage("samples").reads


def test_a_stage_runs_at_every_nth_step_and_at_the_last():
    evaluate = planned(toy.graph()).stage("evaluate")
    assert [step for step in range(-1, 5) if evaluate.runs_at(step, 5)] == [-1, 1, 3, 4]


def test_an_external_stage_has_no_worker_and_its_fields_are_not_kept():
    outside = External((SCORE,), timeout_s=5)
    graph = toy.graph(train={"reads": (REWARD, LOGPROBS, SCORE)})
    made = planned(replace(graph, stages=(*graph.stages, outside)))
    assert made.stage("external").groups == ()
    assert made.stage("external").timeout_s == 5
    assert "score" not in made.stage("samples").reads


def test_a_field_from_outside_has_the_lengths_of_one_that_a_stage_writes():
    graph = toy.graph()
    own, shared = (External((Field("marks", dtype="int64", dims=dims),)) for dims in ("N K", "N T"))
    read = Toy("look", reads=own.fields)
    with pytest.raises(GraphError, match="field 'marks' of 'external' has the dimension K, which no stage writes"):
        planned(replace(graph, stages=(*graph.stages, own, read)))
    planned(replace(graph, stages=(*graph.stages, shared, replace(read, reads=shared.fields))))


def test_a_plan_is_plain_data():
    made = planned(toy.graph())
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made
    with pytest.raises(KeyError):
        made.stage("rolout")


def test_the_plan_of_the_quickstart():
    made, warnings = plan(load(QUICKSTART).build({"prompts_per_step": 8, "samples_per_prompt": 4, "steps": 5}))
    assert (made.name, made.batch, made.group_size, made.steps) == ("quickstart", 8, 4, 5)
    assert {
        ("prompt", "prompts", "rollout", False),
        ("response", "rollout", "reward", False),
        ("reward", "reward", "advantage", False),
        ("advantage", "advantage", "train", False),
        ("prev_logprobs", "prev_logprobs", "train", False),
        ("trained_weights", "train", "refit", False),
        ("served_weights", "refit", "rollout", True),
    } <= edges(made)
    assert {("train", "prev_logprobs", 1), ("prev_logprobs", "train", 0), ("refit", "train", 1)} <= fences(made)
    assert {stage.where.partition(":")[0] for stage in made.stages if stage.name != "samples"} == {str(QUICKSTART)}
    assert all(warning.warning for warning in warnings)


def test_a_copy_points_at_its_own_line_and_a_frozen_model_at_the_models():
    model = Model("m")
    here = model.location
    assert model.frozen().location == here
    for made in (replace(model, seed=3), replace(LEARNER, gpus=1)):
        assert (made.location.file, made.location.line) == (__file__, here.line + 3)
    copy = replace(Toy("a"), name="b")
    assert (copy.location.file, copy.name) == (__file__, "b")
    assert copy.location.line > here.line
    assert Model("m") == model and WorkerGroup("a") == WorkerGroup("a")
    assert "location" not in repr(model)


def test_a_stage_is_named_by_itself_its_class_or_its_base():
    @dataclass(frozen=True)
    class Named(Toy):
        name: str = "given"

    class Plain(toy.Stage):
        pass

    class Child(Named):
        pass

    assert [Named().name, Named("x").name, Child().name, Plain().name] == ["given", "x", "given", "plain"]


def test_warnings_do_not_stop_a_plan():
    made, warnings = plan(toy.graph(reward={"writes": (REWARD, Field("spread", "float32", "N T"))}))
    assert [warning.what for warning in warnings] == ["field 'spread' of 'reward' is not read by any stage"]
    assert made.name == "toy"
    assert plan(toy.graph())[1] == []
    said = Problem(where="here", what="odd", why="it is", fix="even", warning=True)
    assert plan(toy.graph(reward={"found": [said]}))[1] == [said]


def test_all_problems_are_raised_together_and_each_once():
    twice = Problem(where="here", what="wrong", why="it is", fix="right")
    graph = toy.graph(
        batch=0, reward={"found": [twice]}, train={"found": [twice]}, logprobs={"reads": (EXTRA,)}, rollout={"per": "x"}
    )
    with pytest.raises(GraphError) as error:
        plan(graph)
    assert [problem.what for problem in error.value.problems] == [
        "batch=0",
        "stage 'logprobs' reads 'extra', which no stage writes",
        "stage 'rollout' has per='x'",
        "wrong",
    ]


def named(**changes):
    """Return the toy graph with some attributes replaced."""
    return replace(toy.graph(), **changes)


def grown(*stages, **changes):
    """Return the toy graph with additional stages."""
    graph = toy.graph(**changes)
    return replace(graph, stages=(*graph.stages, *stages))


def on(**numbers):
    """Return the toy graph with its reward on a worker group with these parameters."""
    return toy.graph(reward={"on": WorkerGroup(**({"name": "scorers"} | numbers))})


def scheduled(**numbers):
    """Return the toy graph with another schedule."""
    return toy.graph(schedule=Schedule(**({"steps": 3} | numbers)))


OTHER = WorkerGroup("other", backend="torch")
STRUCTURE = {
    "graph name 'a/b' is not usable as a folder name": lambda: named(name="a/b"),
    "graph name None is not usable as a folder name": lambda: named(name=None),
    "host is 'here'": lambda: named(host="here"),
    "schedule is 3": lambda: named(schedule=3),
    "stages is one stage": lambda: named(stages=Toy("a")),
    "stages is 3": lambda: named(stages=3),
    "source is the class Toy": lambda: named(source=Toy),
    "stages[0] is 'x'": lambda: named(stages=("x",)),
    "2 stages are named 'train'": lambda: grown(Toy("train")),
    "a stage is named 'samples'": lambda: grown(Toy("samples")),
    "stage 'reward' runs on 'host'": lambda: toy.graph(reward={"on": "host"}),
    "stage 'logprobs' has the model 'policy'": lambda: toy.graph(logprobs={"models": ("policy",)}),
    "stage 'logprobs' has the model 3": lambda: toy.graph(logprobs={"trains": 3}),
    "stage 'reward' has reads='prompt'": lambda: toy.graph(reward={"reads": "prompt"}),
    "stage 'reward' has writes=('reward',)": lambda: toy.graph(reward={"writes": ("reward",)}),
    f"stage 'rollout' has reads_back={shown(SERVED)}": lambda: toy.graph(rollout={"reads_back": SERVED}),
}
CHECKS = {
    **{f"Schedule(steps={bad!r})": lambda bad=bad: scheduled(steps=bad) for bad in (0, -1, 2.0, "3", True, None)},
    "Schedule(max_staleness=-1)": lambda: scheduled(max_staleness=-1),
    "Schedule(checkpoint_every=-1)": lambda: scheduled(checkpoint_every=-1),
    "Schedule(keep_groups=-1)": lambda: scheduled(keep_groups=-1),
    "Schedule(seed=-1)": lambda: scheduled(seed=-1),
    "Schedule(capacity=0)": lambda: scheduled(capacity=0),
    "Schedule(capacity=3)": lambda: scheduled(capacity=3),
    "Schedule(max_staleness=1) and no stage corrects for it": lambda: scheduled(max_staleness=1),
    "batch=0": lambda: toy.graph(batch=0),
    "batch='4'": lambda: toy.graph(batch="4"),
    "batch=True": lambda: toy.graph(batch=True),
    "source 'prompts' reads 'reward'": lambda: toy.graph(
        source=Toy("prompts", reads=(REWARD,), writes=(PROMPT,)), reward={"reads": ()}
    ),
    "2 stages make samples ('rollout', 'more')": lambda: grown(Toy("more", group_size=2)),
    "stage 'rollout' makes 0 samples of each prompt": lambda: toy.graph(rollout={"group_size": 0}),
    "stage 'rollout' makes 1000 samples of each prompt": lambda: toy.graph(rollout={"group_size": 1000}),
    "stage 'rollout' makes '2' samples of each prompt": lambda: toy.graph(rollout={"group_size": "2"}),
    "stage 'extra' reads 'score', which no stage writes": lambda: grown(Toy("extra", reads=(SCORE,))),
    "stage 'reward' reads 'score', which no stage writes": lambda: toy.graph(reward={"reads_back": (SCORE,)}),
    "stage 'extra' has per='step'": lambda: grown(Toy("extra", per="step")),
    "stage 'extra' has every=0": lambda: grown(Toy("extra", every=0)),
    "stage 'extra' has every=True": lambda: grown(Toy("extra", every=True)),
    "stage 'extra' has every=2 and writes 'score'": lambda: grown(
        Toy("extra", writes=(SCORE,), every=2), Toy("reader", reads=(SCORE,))
    ),
    "transfer 'send' names 1 worker group": lambda: grown(Toy("send", shape="transfer", on=LEARNER, to=LEARNER)),
    "two different worker groups are named 'sampler'": lambda: toy.graph(
        reward={"on": WorkerGroup("sampler", backend="python")}
    ),
    "two different worker groups are named 'host'": lambda: on(name="host", backend="torch"),
    "worker group name 'a/b' is not usable as a file name": lambda: on(name="a/b"),
    "worker group 'scorers' has workers=0": lambda: on(workers=0),
    "worker group 'scorers' has gpus=-1": lambda: on(gpus=-1),
    "worker group 'scorers' has threads=-1": lambda: on(threads=-1),
    "worker group 'scorers' has cpus=-1": lambda: on(cpus=-1),
    "worker group 'scorers' has cpus=nan": lambda: on(cpus=float("nan")),
    "worker group 'scorers' has 3 GPUs and 2 workers": lambda: on(workers=2, gpus=3),
    "worker group 'scorers' has 3 workers, a batch has 4 groups": lambda: on(workers=3),
    "stage 'again' updates a model on 2 workers and has no sharding": lambda: grown(
        Toy("again", trains=Model("other"), on=WorkerGroup("many", backend="torch", workers=2))
    ),
    "stage 'again' has sharding; it is a map stage per sample and reads nothing": lambda: grown(
        Toy("again", on=LEARNER, sharding=Sharding())
    ),
    "worker group 'scorers' has 3 workers, and 2 tensor x 1 context x 1 pipeline parallel": lambda: on(
        workers=3, tensor_parallel=2
    ),
    "worker group 'scorers' has 3 data-parallel replicas, a batch has 4 groups": lambda: on(
        workers=6, tensor_parallel=2
    ),
    "worker group 'scorers' has tensor_parallel=0": lambda: on(tensor_parallel=0),
    "worker group 'scorers' has fetch='all'": lambda: on(fetch="all"),
    "worker group 'scorers' has fetch='leader' and no model parallelism": lambda: on(workers=2, fetch="leader"),
    "stage 'train' updates the frozen model 'policy'": lambda: toy.graph(
        train={"trains": POLICY.frozen()}, logprobs={"models": ()}
    ),
    "'train' and 'again' both update 'policy'": lambda: grown(Toy("again", trains=POLICY, on=LEARNER)),
    "stage 'evaluate' uses 'policy' on 'other', where nothing updates it": lambda: toy.graph(evaluate={"on": OTHER}),
    "stage 'evaluate' uses 'policy' on the host group, where nothing updates it": lambda: toy.graph(
        evaluate={"on": None}
    ),
    "the stages form a cycle: reward -[reward]-> train -[extra]-> reward": lambda: toy.graph(
        reward={"reads": (PROMPT, RESPONSE, EXTRA)}, train={"writes": (TRAINED, EXTRA)}
    ),
    "the stages form a cycle: echo -[score]-> echo": lambda: grown(Toy("echo", (SCORE,), (SCORE,))),
    "stage 'extra' reads 'reward' as float64 [N], 'reward' writes float32 [N]": lambda: grown(
        Toy("extra", reads=(Field("reward", dtype="float64"),))
    ),
    "stage 'extra' reads 'logprobs' as float32 [N P] in 'nat', 'logprobs' writes float32 [N T] in 'nat'": (
        lambda: grown(Toy("extra", reads=(Field("logprobs", dtype="float32", dims="N P", unit="nat"),)))
    ),
    "stage 'extra' reads 'reward' as float32 [N] in 'nat', 'reward' writes float32 [N]": lambda: grown(
        Toy("extra", reads=(Field("reward", dtype="float32", unit="nat"),))
    ),
}


@pytest.mark.parametrize("what", [*STRUCTURE, *CHECKS])
def test_check(what):
    with pytest.raises(GraphError) as error:
        plan((STRUCTURE | CHECKS)[what]())
    assert [problem.what for problem in error.value.problems] == [what]


@pytest.mark.parametrize(
    ("shape", "why"), [("map", "a field has one writer"), ("transfer", "a served model has one Refit")]
)
def test_two_writers_of_a_field(shape, why):
    second = {
        "map": Toy("second", writes=(REWARD,)),
        "transfer": Toy("second", reads=(TRAINED,), writes=(SERVED,), shape="transfer", on=LEARNER, to=SAMPLER),
    }[shape]
    with pytest.raises(GraphError) as error:
        plan(grown(second))
    (problem,) = error.value.problems
    assert problem.why == why
    assert "'second'" in problem.what


def test_gpus_are_counted_where_their_number_is_given():
    graph = toy.graph(reward={"on": WorkerGroup("scorers", workers=2, gpus=2)}, evaluate={"on": replace(SAMPLER)})
    assert plan(graph)[0] == plan(graph, gpus=2)[0]
    with pytest.raises(GraphError) as error:
        plan(graph, gpus=1)
    assert [problem.what for problem in error.value.problems] == [
        "the worker groups ask for 2 GPUs (scorers 2), 1 available"
    ]


def test_a_check_of_a_stage_that_raises_is_a_problem_of_that_stage():
    class Broken(Stage):
        @property
        def reads(self):
            raise KeyError("column")

    graph = Graph(name="toy", source=Toy("s", batch=1), stages=(Broken(),), schedule=Schedule(steps=1))
    with pytest.raises(GraphError, match=r"has reads=.*KeyError: 'column'.*; reads must be a tuple of Fields"):
        plan(graph)
