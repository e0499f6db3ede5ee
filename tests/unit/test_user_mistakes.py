"""Mistakes in user code that used to end in a traceback, in silence, or in a wrong number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ops.refit.transports import Receiver, Sender, Transport, missing
from pipeline import Backend, Field, Graph, GraphError, Output, Schedule, Stage, StageError, WorkerGroup
from pipeline.engine.driver import Engine
from pipeline.errors import SluiceError, is_users
from pipeline.executors import returned
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from stages import PolicyLoss
from stages.backends import backend_problems
from stages.backends.objective import _both
from stages.formula_check import trial_problems
from tests.errors.harness import command, live_text
from tests.unit.toy import PROMPT, REWARD, Toy

LINE = "graph.py:"


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

    assert missing(Mail()) == "Mail.sender() raised SystemExit: 0"


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
        Engine(made, plan(made)[0], LocalExecutor(), run_dir=RunDir(tmp_path / "run").create()).execute()
    assert error.value.problems[0].where.startswith(f"{__file__}:")


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
