"""Mistakes in user code that used to end in a traceback, in silence, or in a wrong number."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch

from ops.refit.transports import Receiver, Sender, Transport, missing
from pipeline import Backend, Field, Graph, GraphError, Model, Output, Schedule, Stage, StageError, WorkerGroup
from pipeline.declare.stage import setup_problems
from pipeline.engine.driver import Driver
from pipeline.errors import SluiceError, is_users, kind_of
from pipeline.executors import returned
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from stages import (
    CispoLoss,
    ClippedLoss,
    Correction,
    Decoupled,
    Evaluate,
    Generated,
    IcePop,
    PolicyLoss,
    Reward,
    SequenceMask,
    Train,
    TruncatedIS,
)
from stages.backends import backend_problems, model_problems
from stages.backends.objective import _both
from stages.formula_check import trial_problems
from stages.vocabulary import TOKEN_VERSIONS, TRUNCATED
from tests.errors.harness import command, live_text
from tests.unit.toy import PROMPT, REWARD, Toy

LINE = "graph.py:"
LOSSES = [
    ClippedLoss(),
    ClippedLoss(clip=(0.01, 0.01), dual_clip=1.5, kl=0.1),
    ClippedLoss(ratio="sequence", clip=(3e-4, 4e-4), entropy=0.1),
    *(ClippedLoss(aggregation="fixed_length", max_tokens=4), CispoLoss(), CispoLoss(clip=(0.1, 0.1))),
]
CORRECTED = [
    *(TruncatedIS(cap=1.01), TruncatedIS(level="sequence"), IcePop(low=0.99, high=1.01), IcePop(level="sequence")),
    *(SequenceMask(low=0.999, high=1.002), Decoupled()),
]


def problems(*stages: Stage, source: Stage | None = None) -> list[str]:
    """Return the problems of a graph of these stages."""
    made = Graph(name="g", source=source or Toy("prompts", writes=(PROMPT,)), stages=stages, schedule=Schedule(steps=1))
    with pytest.raises(GraphError) as error:
        plan(made)
    return [str(problem) for problem in error.value.problems]


def test_a_stage_is_not_named_like_the_metrics_of_evaluate() -> None:
    (found,) = problems(Toy("eval", reads=(PROMPT,), writes=(REWARD,)))
    assert "a stage is named 'eval'; the metrics eval/... are those of Evaluate" in found


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("uses", lambda self: (), "is a method"),
        ("reads", lambda self: (PROMPT,), "is a method"),
        ("groups", None, "is TypeError: 'NoneType' object is not callable"),
        ("name", property(lambda self: 1 / 0), "is ZeroDivisionError"),
        ("sharding", "dynamic", "is 'dynamic'"),
        ("updates", property(lambda self: exec("raise SystemExit(0)")), "is SystemExit: 0"),
        ("shape", property(lambda self: 1 / 0), "is ZeroDivisionError"),
    ],
)
def test_an_attribute_that_is_a_method_or_raises_is_one_problem(name: str, value: Any, says: str) -> None:
    kind = type(
        "Mine", (Stage,), {"name": "mine", "reads": (PROMPT,), "setup": lambda self, context: None, name: value}
    )
    (found,) = problems(kind())
    assert f"Mine.{name} {says}" in found and "Fix: " in found


@pytest.mark.parametrize("check", [lambda self, graph: "bad", lambda self, graph: exec("raise SystemExit(0)")])
def test_a_check_of_a_stage_yields_problems(check: Any) -> None:
    kind = type("Mine", (Stage,), {"name": "mine", "reads": (PROMPT,), "setup": lambda s, c: None, "check": check})
    (found,) = problems(kind())
    assert "check() of stage 'mine' raised " in found


@pytest.mark.parametrize("checks", [lambda group, where: ["bad"], lambda group, where: exec("raise SystemExit(0)")])
def test_the_checks_of_a_backend_yield_problems(checks: Any) -> None:
    backend = Backend(name="mine", can=("sample",), opener=lambda context: None, checks=checks)
    found = [str(one) for one in backend_problems(WorkerGroup("w", backend=backend), None, "sample")]
    assert [one for one in found if "checks of backend 'mine' raised " in one]


def test_packages_of_a_backend_are_a_tuple() -> None:
    backend = Backend(name="mine", can=("sample",), opener=lambda context: None, packages="torch")  # type: ignore[arg-type]
    found = [str(one) for one in backend_problems(WorkerGroup("w", backend=backend), None, "sample")]
    assert len(found) == 1 and "packages are those that its workers import, a tuple of strings" in found[0]


def test_a_transport_whose_end_exits_is_refused() -> None:
    class Mail(Transport):
        name = "mail"

        def sender(self) -> Sender:
            raise SystemExit(0)

        def receiver(self) -> Receiver:
            raise NotImplementedError

    assert missing(Mail()).startswith(f"Mail.sender() raised SystemExit: 0 ({__file__}:")


def test_graph_that_exits_is_a_problem(tmp_path: Path) -> None:
    text = live_text().replace("def graph(", "def graph(", 1)
    body = text.index(":\n", text.index("-> Graph")) + 2
    (tmp_path / "graph.py").write_text(text[:body] + "    raise SystemExit(0)\n" + text[body:])
    code, _, stderr = command(tmp_path, "graph.py", "--check")
    assert code == 2 and "graph() raised SystemExit: 0" in stderr


@pytest.mark.parametrize("value", [torch.tensor(2.5), torch.tensor([2.5]), np.float32(2.5), np.array([2.5]), 2.5])
def test_a_metric_may_be_any_one_number(value: Any) -> None:
    made = returned.output(Toy("mine"), Output({}, metrics={"size": value})).metrics
    assert made == {"size": 2.5} and type(made["size"]) is float


@pytest.mark.parametrize("metrics", [{"size": torch.ones(3)}, {"size": np.ones(2)}, {3: 1.0}, {"size": None}])
def test_other_metrics_are_refused(metrics: Any) -> None:
    with pytest.raises(StageError, match=r"stage 'mine' returned the metric .*=.*; metrics are numbers with a name"):
        returned.output(Toy("mine"), Output({}, metrics=metrics))


@pytest.mark.parametrize(
    ("metric", "why"),
    [
        ("reward/mean", "the metrics reward/... are those of stage 'reward'"),
        ("time/step_s", "the metrics time/... are the seconds of every stage"),
        ("data/requests", "the metrics data/... are those of the data plane"),
        ("stored/peak_bytes", "the metrics stored/... are the bytes in the data plane"),
        ("dropped/stale", "the metrics dropped/... count groups that were too old or cancelled"),
        ("eval/count", "the metrics eval/... are those of Evaluate"),
    ],
)
def test_a_metric_of_another_stage_is_refused(metric: str, why: str) -> None:
    mine, rest = Toy("mine"), metric.partition("/")[2]
    told = f"stage 'mine' returned the metric '{metric}'; {why}. Fix: return it as '{rest}', which is recorded as mine/"
    with pytest.raises(StageError, match=re.escape(told + rest)):
        returned.output(mine, Output({}, metrics={metric: 77}), [Toy("reward"), mine])


def test_a_metric_with_a_prefix_of_its_own_is_kept() -> None:
    metrics = {"mean": 1.0, "mine/most": 2.0, "val/mean": 3.0}
    mine = Toy("mine")
    assert returned.output(mine, Output({}, metrics=metrics), [Toy("reward"), mine]).metrics == metrics
    sampler = WorkerGroup("sampler", backend="torch")
    evaluate = Evaluate(Model("policy"), Generated("sort"), on=sampler)
    assert returned.output(evaluate, Output({}, metrics={"eval/count": 1.0}), [mine]).metrics == {"eval/count": 1.0}


@dataclass(frozen=True)
class Exits(Stage):
    """Exits in its setup, its runner or its stream."""

    where: str
    name: str = "exits"
    reads = (PROMPT,)
    writes = (Field("seen", dtype="str"),)

    @property
    def shape(self) -> str:  # type: ignore[override]
        return "stream" if self.where == "stream" else "map"

    def setup(self, context: Any) -> Any:
        if self.where == "setup":
            raise SystemExit(0)

        def run(columns: Any, task: Any) -> Any:
            raise SystemExit(3)

        async def stream(columns: Any, task: Any) -> Any:
            yield Output({"seen": columns["prompt"][:1]}, index=[0])
            raise SystemExit(3)

        return stream if self.where == "stream" else run


@dataclass(frozen=True)
class Numbers(Stage):
    name: str = "numbers"
    batch: int = 2
    writes = (PROMPT,)

    def setup(self, context: Any) -> Any:
        return lambda columns, task: {"prompt": [str(group) for group in task.groups]}


@pytest.mark.parametrize("where", ["setup", "map", "stream"])
def test_a_stage_that_exits_fails_the_run_and_says_so(where: str, tmp_path: Path) -> None:
    made = Graph(name="g", source=Numbers(), stages=(Exits(where),), schedule=Schedule(steps=1))
    with pytest.raises(SluiceError, match="SystemExit: ") as error:
        Driver(made, plan(made)[0], LocalExecutor(), run_dir=RunDir(tmp_path / "run").create()).execute()
    assert error.value.problems[0].where.startswith(f"{__file__}:")


@pytest.mark.usefixtures("signals_are_not_ignored")
def test_an_exit_by_a_signal_is_not_the_users() -> None:
    from pipeline.engine.termination import Termination

    termination = Termination()
    termination.asked = True
    before = __import__("signal").getsignal(15)
    try:
        termination._take(15, None)
    except SystemExit as error:
        assert not is_users(error)
    finally:
        __import__("signal").signal(15, before)
    try:
        raise SystemExit(0)
    except SystemExit as error:
        assert is_users(error)
    assert not is_users(KeyboardInterrupt())
    with termination:  # it takes Ctrl-C, so the exception is the user's
        assert is_users(KeyboardInterrupt())


def test_a_stream_that_forgets_one_group_is_told_so_in_the_singular() -> None:
    said = str(returned.unfinished(Toy("draw"), {3}))
    assert "stage 'draw' ended without output for 1 group, 3 among them" in said


@pytest.mark.parametrize(("value", "kind"), [(None, "None"), ([], "a list"), (3, "an int"), (Toy("t"), "a Toy")])
def test_none_is_none_in_every_message(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def test_a_formula_may_be_static_and_returns_a_value_per_token_on_every_batch() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Static(PolicyLoss):
        @staticmethod
        def policy_loss(scored: Any, weight_NT: torch.Tensor) -> torch.Tensor:
            return -weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT

    assert not list(trial_problems(Static(), "graph.py:1"))
    mask_NT = torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"a formula returned \[\] for mask_NT \[3, 2\]: one value per token"):
        _both(torch.tensor(1.0), mask_NT)


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf"])
def test_a_deadline_is_above_0(tmp_path: Path, value: str) -> None:
    (tmp_path / "graph.py").write_text(live_text())
    code, _, stderr = command(tmp_path, "graph.py", f"--deadline-s={value}", "--check")
    assert code == 2 and f"--deadline-s: expected a number above 0, got '{value}'" in stderr


def line_of(function: Any) -> str:
    """Return the file and line where a function of this module begins."""
    return f"{__file__}:{function.__code__.co_firstlineno}"


@dataclass(frozen=True, kw_only=True)
class Weighted(PolicyLoss):
    """A loss of the user's that is right; the classes below get one thing wrong."""

    def policy_loss(self, scored: Any, weight_NT: torch.Tensor) -> Any:
        return -weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT


@dataclass(frozen=True, kw_only=True)
class Halved(Correction):
    """A correction of the user's that is right."""

    def weights(self, scored: Any) -> Any:
        return 0.5 * torch.ones_like(scored.logprobs_NT)


def raises(self: Any, *_: Any) -> Any:
    raise KeyError("strength")


def yields_a_text(self: Any, *_: Any) -> Any:
    yield "bad"


def returns_none(self: Any, *_: Any) -> Any:
    return None


def takes_nothing(self: Any) -> Any:
    return ()


def trained(loss: PolicyLoss) -> list[str]:
    """Return the problems that the check of a Train stage finds in its loss."""
    return [str(problem) for problem in Train(Model("m"), lr=1e-3, loss=loss)._loss_problems()]


@pytest.mark.parametrize(
    ("check", "after", "says"),
    [
        (raises, 1, "raised KeyError: 'strength'"),
        (yields_a_text, 0, "raised TypeError: it yields 'bad', which is neither a Problem"),
        (returns_none, 0, "raised TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_an_error_in_problems_names_the_users_class_and_line(check: Any, after: int, says: str) -> None:
    where = f"{__file__}:{check.__code__.co_firstlineno + after}: "
    (found,) = trained(type("Mine", (Weighted,), {"problems": check})())
    assert found.startswith(f"{where}Mine.problems() {says}") and found.endswith("Fix: correct Mine.problems()")
    (found,) = trained(Weighted(correction=type("Fades", (Halved,), {"problems": check})()))
    assert found.startswith(f"{where}Fades.problems() {says}")
    score = type("Score", (), {"__call__": lambda self, response: 1.0, "problems": check})()
    (found,) = [str(problem) for problem in Reward(score).check(None)]  # type: ignore[arg-type]
    assert found.startswith(f"{where}problems() of reward score {says}")
    warm = type("Warm", (), {"run": lambda self, model, tokenizer, seed: None, "problems": check})()
    (found,) = [str(problem) for problem in model_problems(Model("of/m", warm_start=warm))]
    assert found.startswith(f"{where}Warm.problems() {says}")
    backend = Backend(
        name="mine", can=("sample",), opener=lambda context: None, checks=MethodType(check, None.__class__)
    )
    (found,) = [str(problem) for problem in backend_problems(WorkerGroup("w", backend=backend), None, "sample")]
    assert found.startswith(f"{where}checks of backend 'mine' {says}")


def test_problems_with_another_signature_is_at_its_own_line() -> None:
    (found,) = trained(type("Mine", (Weighted,), {"problems": takes_nothing})())
    assert found.startswith(f"{line_of(takes_nothing)}: Mine.problems() raised TypeError: ")


def test_an_error_in_the_check_of_a_stage_is_at_the_line_that_raised() -> None:
    kind = type("Mine", (Stage,), {"name": "mine", "reads": (PROMPT,), "setup": lambda s, c: print, "check": raises})
    (found,) = problems(kind())
    assert found.startswith(f"{__file__}:{raises.__code__.co_firstlineno + 1}: check() of stage 'mine' raised KeyError")
    assert found.endswith("Fix: correct Mine.check()")


async def later(self: Any, *given: Any) -> Any: ...


def one_by_one(self: Any, *given: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("formula", "says"),
    [(later, "is async"), (one_by_one, "is a generator"), (takes_nothing, "does not take (scored")],
)
def test_a_formula_that_cannot_be_called_is_not_run(formula: Any, says: str) -> None:
    (found,) = trained(type("Mine", (Weighted,), {"policy_loss": formula})())
    assert found.startswith(f"{line_of(formula)}: Mine.policy_loss {says}")
    assert found.endswith("Fix: write def policy_loss(self, scored, weight_NT), which returns a tensor [N, T]")
    (found,) = trained(Weighted(correction=type("Fades", (Halved,), {"weights": formula})()))
    assert found.startswith(f"{line_of(formula)}: Fades.weights {says}")


def random_loss(self: Any, scored: Any, weight_NT: torch.Tensor) -> Any:
    return torch.rand(()) - weight_NT * scored.advantage_N[:, None] * scored.logprobs_NT


def random_slope(self: Any, scored: Any, weight_NT: torch.Tensor) -> Any:
    slope = torch.rand(())
    return scored.logprobs_NT * slope - scored.logprobs_NT.detach() * slope


def random_weights(self: Any, scored: Any) -> Any:
    return torch.rand_like(scored.logprobs_NT)


@pytest.mark.parametrize("formula", [random_loss, random_slope])
def test_a_loss_that_is_not_repeatable_is_called_that(formula: Any) -> None:
    (found,) = trained(type("Mine", (Weighted,), {"policy_loss": formula})())
    assert "Mine.policy_loss gives different values for the same input: " in found and "padding" not in found


def test_so_is_a_correction() -> None:
    (found,) = trained(Weighted(correction=type("Fades", (Halved,), {"weights": random_weights})()))
    assert "Fades.weights gives different values for the same input: weights of three tokens" in found


def normalised(scored: Any) -> Any:
    return (scored.advantage_N - scored.advantage_N.mean()) / (scored.advantage_N.std() + 1e-6)


def by_the_largest(scored: Any) -> Any:
    return scored.advantage_N / scored.advantage_N.abs().max()


def by_the_smallest(scored: Any) -> Any:
    return scored.advantage_N - scored.advantage_N.min()


def by_the_tokens(scored: Any) -> Any:
    return scored.advantage_N * scored.mask_NT.sum()


def by_the_longest(scored: Any) -> Any:
    return scored.advantage_N / scored.mask_NT.sum(1).max()


def by_the_samples(scored: Any) -> Any:
    return scored.advantage_N / len(scored.advantage_N)


def by_the_place(scored: Any) -> Any:
    return scored.advantage_N * torch.arange(1, len(scored.advantage_N) + 1)


def by_the_first(scored: Any) -> Any:
    return scored.advantage_N / scored.advantage_N[0]


def if_any_is_wrong(scored: Any) -> Any:
    return scored.advantage_N * (scored.advantage_N < 0).any()


def if_all_are_wrong(scored: Any) -> Any:
    return scored.advantage_N * (1 + (scored.advantage_N < 0).all())


def by_the_versions(scored: Any) -> Any:
    return scored.advantage_N * 0.9 ** scored.columns["token_versions"].max()


def if_any_is_truncated(scored: Any) -> Any:
    return scored.advantage_N * (1 + scored.columns["truncated"].any())


def if_all_are_truncated(scored: Any) -> Any:
    return scored.advantage_N * (1 + scored.columns["truncated"].all())


def by_the_mean_ratio(scored: Any) -> Any:
    ratio_NT = (scored.old_logprobs_NT - scored.rollout_logprobs_NT).exp() * scored.mask_NT
    return scored.advantage_N * scored.mask_NT.sum() / ratio_NT.sum()


def by_the_oldest(scored: Any) -> Any:
    versions_NT = scored.columns["token_versions"]
    return scored.advantage_N * 0.9 ** versions_NT[scored.mask_NT].min()


MIXED = [
    *(by_the_mean_ratio, by_the_oldest),
    *(normalised, by_the_largest, by_the_smallest, by_the_tokens, by_the_longest, by_the_samples, by_the_place),
    *(by_the_first, if_any_is_wrong, if_all_are_wrong, by_the_versions, if_any_is_truncated, if_all_are_truncated),
]


@pytest.mark.parametrize("mixed", MIXED)
def test_a_formula_that_mixes_samples_is_found(mixed: Any) -> None:
    """In a loss and in a correction, whatever the formula takes from the other samples."""
    reads = (TOKEN_VERSIONS, TRUNCATED)

    def policy_loss(self: Any, scored: Any, weight_NT: torch.Tensor) -> Any:
        return -weight_NT * mixed(scored)[:, None] * scored.logprobs_NT

    def weights(self: Any, scored: Any) -> Any:
        return mixed(scored)[:, None].expand(scored.mask_NT.shape)

    (found,) = trained(type("Mine", (Weighted,), {"policy_loss": policy_loss, "reads": reads})())
    assert "Mine.policy_loss mixes samples: the loss of one sample's tokens, " in found
    (found,) = trained(Weighted(correction=type("Fades", (Halved,), {"weights": weights, "reads": reads})()))
    assert "Fades.weights mixes samples: weights of one sample's tokens, " in found


def by_the_versions_of_all(self: Any, scored: Any) -> Any:
    age_NT = scored.columns["token_versions"].max() - scored.columns["token_versions"]
    return 0.9**age_NT


def test_so_is_an_age_that_counts_from_the_newest_version_of_all_samples() -> None:
    by_age = type("ByAge", (Halved,), {"weights": by_the_versions_of_all, "reads": (TOKEN_VERSIONS,)})
    (found,) = trained(Weighted(correction=by_age()))
    assert "ByAge.weights mixes samples: " in found


@pytest.mark.parametrize("correction", [None, *CORRECTED], ids=repr)
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_our_formulas_pass_the_check_of_a_users(loss: PolicyLoss, correction: Correction | None) -> None:
    assert not list(trial_problems(replace(loss, correction=correction), "graph.py:1"))


class Shows(Stage):
    """A stage whose `setup` the cases below replace."""

    name = "mine"
    reads = (PROMPT,)
    writes: tuple[Field, ...] = ()


class Forgets(Shows):
    def setup(self, context: Any) -> Any:
        """Return nothing."""
        run = lambda columns, task: {}  # noqa: E731, F841


class ReturnsNone(Shows):
    def setup(self, context: Any) -> Any:
        if context:
            return None
        return lambda columns, task: {}


class ReturnsColumns(Shows):
    def setup(self, context: Any) -> Any:
        return {"seen": []}


class Short(Shows):
    def setup(self, context: Any) -> Any:
        return lambda columns: {}


class ShortInside(Shows):
    def setup(self, context: Any) -> Any:
        def run(columns: Any) -> Any:
            return {}

        return run


class LaterInside(Shows):
    def setup(self, context: Any) -> Any:
        async def run(columns: Any, task: Any) -> Any:
            return {}

        return run


class OneByOneInside(Shows):
    def setup(self, context: Any) -> Any:
        def run(columns: Any, task: Any) -> Any:
            yield {}

        return run


class StreamOfNothing(LaterInside):
    shape = "stream"


class StreamInSteps(OneByOneInside):
    shape = "stream"


class Runner:
    def __call__(self, columns: Any) -> Any: ...


class LaterRunner:
    async def __call__(self, columns: Any, task: Any) -> Any: ...


class ReturnsTheClass(Shows):
    def setup(self, context: Any) -> Any:
        return Runner


class ShortRunner(Shows):
    def setup(self, context: Any) -> Any:
        return Runner()


class Awaited(Shows):
    def setup(self, context: Any) -> Any:
        return LaterRunner()


class NotCallable(Shows):
    def setup(self, context: Any) -> Any:
        return Toy("toy")


RUNNERS = [
    (Forgets, "is missing: setup() has no return statement"),
    (ReturnsNone, "is missing: setup() returns None"),
    (ReturnsColumns, "is missing: setup() returns {'seen': []}"),
    (Short, "does not take (columns, task)"),
    (ShortInside, "does not take (columns, task)"),
    (LaterInside, "is async"),
    (OneByOneInside, "is a generator"),
    (StreamOfNothing, "is async and yields nothing"),
    (StreamInSteps, "is a generator that is not async"),
    (ReturnsTheClass, "is the class Runner, not an instance"),
    (ShortRunner, "does not take (columns, task)"),
    (Awaited, "is async"),
    (NotCallable, "is a Toy, which has no __call__()"),
]


@pytest.mark.parametrize(("kind", "says"), RUNNERS)
def test_the_source_of_setup_shows_a_runner_that_cannot_be_called(kind: Any, says: str) -> None:
    found = [each for each in problems(kind()) if "runner" in each]
    assert len(found) == 1 and f": the runner of stage 'mine' {says}; a worker " in found[0]
    assert found[0].startswith(line_of(kind.setup))


@pytest.mark.parametrize(("kind", "says"), RUNNERS[1:])
def test_a_worker_refuses_the_same_before_the_first_step(kind: Any, says: str) -> None:
    stage = kind()
    says = says.replace("returns", "returned").split("{")[0].replace("a Toy, which has no __call__()", "missing")
    with pytest.raises(StageError, match=re.escape(f"the runner of stage 'mine' {says}")):
        returned.runner(stage, stage.setup("context"))


class Wrapped(Shows):
    """A runner that its source does not show."""

    def setup(self, context: Any) -> Any:
        def run(columns: Any) -> Any:
            return {}

        run = partial(lambda more, columns, task: {}, run)
        return run


run = Toy("toy")  # a name that `setup` below gives to something else


class FromALoop(Shows):
    def setup(self, context: Any) -> Any:
        for run in (lambda columns, task: {},):
            return run
        raise ValueError(context)


class Either(Shows):
    def setup(self, context: Any) -> Any:
        if context is not None:

            def run(columns: Any, task: Any, *, more: int = 1) -> Any:
                yield_from = [lambda: (yield)]  # of another function
                return {} if yield_from else None

            return run
        raise ValueError(context)


class Stream(Shows):
    shape = "stream"

    def setup(self, context: Any) -> Any:
        async def run(columns: Any, task: Any) -> Any:
            yield Output({}, index=range(len(columns["prompt"])))

        return run


class Maker(Shows):
    def setup(self, context: Any) -> Any:
        return Made(2)


class Made:
    def __init__(self, size: int) -> None: ...

    def __call__(self, *given: Any) -> Any: ...


@pytest.mark.parametrize("kind", [Wrapped, FromALoop, Either, Stream, Maker])
def test_a_runner_that_can_be_called_passes(kind: Any) -> None:
    assert not list(setup_problems(kind()))
    assert callable(returned.runner(kind(), kind().setup("context")))


@pytest.mark.parametrize(
    ("setup", "says"),
    [(later, "is async"), (one_by_one, "is a generator"), (takes_nothing, "does not take (context)")],
)
def test_setup_returns_the_runner_when_it_is_called(setup: Any, says: str) -> None:
    (found,) = problems(type("Mine", (Shows,), {"setup": setup})())
    assert f"stage 'mine' (Mine) has a setup() that {says}; it returns the runner" in found


def test_a_shape_is_one_of_four() -> None:
    (found,) = problems(type("Mine", (Stream,), {"shape": "strem"})())
    assert "has shape='strem'; the shape of a stage is map, stream, transfer or external" in found


@pytest.mark.parametrize("made", [[1, 2], "text", torch.ones(2), Output("text")])  # type: ignore[arg-type]
def test_a_runner_returns_columns_by_their_names(made: Any) -> None:
    with pytest.raises(StageError, match=r"the runner of stage 'mine' returned .*; it returns columns by their names"):
        returned.output(Toy("mine"), made)
