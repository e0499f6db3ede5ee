"""What a stage returns in parts, in another order or in a buffer that it uses again reaches its readers as it was
returned, or is refused before anything is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import Field, Graph, Output, Schedule, Stage
from pipeline.declare.columns import Ragged
from pipeline.engine.driver import Driver
from pipeline.errors import SluiceError
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir
from tests.unit.test_tensordicts import Numbers

X, IDS, WORD = Field("x", dtype="float32"), Field("own_ids", "int64", "N W"), Field("word", dtype="str")
WHOLE = {"x": torch.tensor([0.0, 1.0, 2.0, 3.0])}


@dataclass(frozen=True)
class Makes(Stage):
    """Returns what `made` returns for two groups of two; a stream yields what it yields, `pause_s` apart."""

    made: Callable[[], Any]
    shape: str = "stream"
    writes: Any = (X,)
    pause_s: float = 0.0
    name: str = "makes"
    per: str = "group"
    reads = (Field("text", dtype="str"),)

    def setup(self, context: Any) -> Any:
        async def stream(columns: Any, task: Any) -> Any:
            for output in self.made():
                yield output
                await asyncio.sleep(self.pause_s)

        return stream if self.shape == "stream" else lambda columns, task: self.made()


@dataclass(frozen=True)
class Look(Stage):
    """Keeps the columns that it gets."""

    seen: Any
    reads: Any = (X,)
    name: str = "look"
    per: str = "batch"

    def setup(self, context: Any) -> Any:
        return lambda columns, task: self.seen.append(columns)


def seen(folder: Any, makes: Makes, *others: Stage) -> dict[str, Any]:
    """Return the columns that a reader gets."""
    found: list[Any] = []
    stages = (makes, *others, Look(found, makes.writes))
    described = Graph(name="outputs", source=Numbers(), stages=stages, schedule=Schedule(steps=1))
    Driver(described, plan(described)[0], LocalExecutor(), run_dir=RunDir(folder / "run").create()).execute()
    return found[0]


def part(values: list[float], index: Any) -> Output:
    return Output({"x": torch.tensor(values)}, index=index)


def buffer() -> Any:
    """Yield the same tensor again and again, and change it in between."""
    held = torch.zeros(2)
    for group in (0, 1):
        held.copy_(torch.tensor([2.0 * group, 2.0 * group + 1]))
        yield Output({"x": held}, index=[2 * group, 2 * group + 1])
    held.fill_(9.0)


@pytest.mark.parametrize(
    "made",
    [
        lambda: [part([3.0, 2.0, 1.0, 0.0], [3, 2, 1, 0])],
        lambda: [part([2.0, 3.0], [2, 3]), part([1.0, 0.0], [1, 0])],
        lambda: [part([2.0, 0.0, 3.0, 1.0], np.array([2, 0, 3, 1]))],
        buffer,
    ],
    ids=["reversed", "parts", "interleaved", "a buffer"],
)
def test_samples_are_where_their_index_says(tmp_path: Any, made: Any) -> None:
    assert seen(tmp_path, Makes(made))["x"].tolist() == [0.0, 1.0, 2.0, 3.0]


REFUSED = {
    "too few rows": ([part([], [0, 1]), part([1.0, 2.0, 3.0, 4.0], [2, 3])], "field 'x' has 0 rows for 2 keys"),
    "another type": (
        [Output({"x": torch.tensor([0, 1])}, index=[0, 1]), part([2.0, 3.0], [2, 3])],
        "field 'x' has dtype int64",
    ),
    "twice in an output": ([part([0.0, 1.0, 2.0, 3.0], [0, 0, 1, 1])], "has sample 0 twice in its index"),
    "twice in two": ([part([0.0, 1.0], [0, 1]), part([5.0, 6.0], [0, 1])], "yielded group 0 twice"),
    "negative": ([part([0.0, 1.0], [-2, -1])], "has index -2"),
    "beyond": ([part([0.0, 1.0], [3, 4])], "has index 4"),
    "a flag": ([part([0.0, 1.0], [False, True])], "has index False"),
    "part of a group": ([part([0.0], [0])], "has a part of group 0"),
    "none": ([], "ended without output for 2 groups"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("pause_s", [0.0, 0.3])  # in one report, or each in its own
def test_parts_that_do_not_fit_are_refused(tmp_path: Any, case: str, pause_s: float) -> None:
    made, text = REFUSED[case]
    with pytest.raises(SluiceError, match=text):
        seen(tmp_path, Makes(lambda: made, pause_s=pause_s))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: part([0.0, 1.0], [0, 1]), "has 2 of 4 samples"),
        (lambda: part([], []), "has 0 of 4 samples"),
        (lambda: Output(WHOLE, index=[0, 1, 2, 2]), "twice in its index"),
    ],
)
def test_a_map_returns_all_samples(tmp_path: Any, made: Any, text: str) -> None:
    with pytest.raises(SluiceError, match=text):
        seen(tmp_path, Makes(made, shape="map"))
    assert seen(tmp_path / "other", Makes(lambda: Output(WHOLE, index=range(4)), shape="map"))["x"].tolist() == [
        0,
        1,
        2,
        3,
    ]


def test_rows_of_parts_stay_apart(tmp_path: Any) -> None:
    parts = [
        Output({"own_ids": Ragged(torch.tensor([10, 11, 12]), (1, 1))}, index=[0, 1]),
        Output({"own_ids": Ragged(torch.tensor([20, 21, 22]), (2, 2))}, index=[2, 3]),
    ]
    with pytest.raises(SluiceError, match="has 3 entries and lengths that sum to 2"):
        seen(tmp_path, Makes(lambda: parts, writes=(IDS,)))


@dataclass(frozen=True)
class Other(Stage):
    """Writes the dimension of `own_ids` with other lengths."""

    name: str = "other"
    writes = (Field("more", "int64", "N W"),)
    reads = (Field("text", dtype="str"),)
    per: str = "batch"

    def setup(self, context: Any) -> Any:
        return lambda columns, task: {"more": Ragged(torch.arange(4), (2, 0, 1, 1))}


def test_two_writers_of_a_dimension_with_other_lengths_are_refused_even_if_nothing_reads_both(tmp_path: Any) -> None:
    rows = {"own_ids": Ragged(torch.arange(4), (1, 1, 1, 1))}
    with pytest.raises(SluiceError, match=r"00000000_g000 has the length \d in W, and \d before"):
        seen(tmp_path, Makes(lambda: rows, shape="map", writes=(IDS,)), Other())


@dataclass(frozen=True)
class Bounded(Makes):
    """Writes at most two tokens per sample, it says."""

    @property
    def bounds(self) -> dict[str, int]:
        return {"W": 2}


def test_a_row_beyond_the_stages_own_bounds_is_refused(tmp_path: Any) -> None:
    def of(*lengths: int) -> Any:
        return lambda: {"own_ids": Ragged(torch.arange(sum(lengths)), lengths)}

    seen(tmp_path / "fits", Bounded(of(2, 0, 1, 2), "map", (IDS,)))
    with pytest.raises(SluiceError, match=r"'own_ids' of length 3 for key 00000000_g001; its bounds allow 2 along W"):
        seen(tmp_path / "long", Bounded(of(2, 3, 1, 2), "map", (IDS,)))


class Named(str):
    """A text of a type of its own."""


@pytest.mark.parametrize(
    ("column", "field", "wanted"),
    [
        (Ragged(torch.arange(4), tuple(np.array([1, 0, 2, 1]))), IDS, [[0], [], [1, 2], [3]]),
        (Ragged(torch.arange(4), torch.tensor([1, 0, 2, 1])), IDS, [[0], [], [1, 2], [3]]),
        (("a", "b", "c", "d"), WORD, ["a", "b", "c", "d"]),
        ([np.str_("a"), Named("b"), "c", "é"], WORD, ["a", "b", "c", "é"]),
        (torch.view_as_complex(-torch.arange(8.0).view(4, 2)).conj().imag, X, [1.0, 3.0, 5.0, 7.0]),
    ],
    ids=["numpy lengths", "a tensor of lengths", "a tuple", "types of text", "a negated view"],
)
def test_equal_values_of_other_types_are_taken(tmp_path: Any, column: Any, field: Field, wanted: list[Any]) -> None:
    found = seen(tmp_path, Makes(lambda: {field.name: column}, shape="map", writes=(field,)))[field.name]
    assert (
        found if isinstance(found, list) else [row.tolist() for row in (found.rows() if field is IDS else found)]
    ) == wanted
    if isinstance(found, list):
        assert {type(text) for text in found} == {str}


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (["a", "b", "c", "\ud800"], "key 00000001_g001: half of a surrogate pair"),
        (torch.zeros(4).to_sparse(), "give a tensor|is a"),
        (torch.zeros(4, device="meta"), "is a"),
    ],
    ids=["surrogate", "sparse", "meta"],
)
def test_what_cannot_be_stored_is_refused_with_its_field(tmp_path: Any, column: Any, text: str) -> None:
    field = WORD if isinstance(column, list) else X
    with pytest.raises(SluiceError, match=text) as raised:
        seen(tmp_path, Makes(lambda: {field.name: column}, shape="map", writes=(field,)))
    assert f"field '{field.name}'" in str(raised.value)


def test_a_metric_is_the_mean_over_the_parts_that_report_it(tmp_path: Any) -> None:
    metrics: list[Any] = []
    for pause_s in (0.0, 0.3):
        parts = [part([0.0, 1.0], [0, 1]), Output({"x": torch.zeros(2)}, {"acc": 1.0}, index=[2, 3])]
        graph = Graph(
            name="metrics", source=Numbers(), stages=(Makes(lambda: parts, pause_s=pause_s), Look([])),  # noqa: B023
            schedule=Schedule(steps=1),
        )  # fmt: skip
        Driver(graph, plan(graph)[0], LocalExecutor(), on_step=lambda step, found: metrics.append(found)).execute()
    assert [found["makes/acc"] for found in metrics] == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["int64", "bool", "str"])
def test_a_reward_of_ones_own_is_any_column(tmp_path: Any, dtype: str) -> None:
    field = Field("reward", dtype=dtype)
    column: Any = ["a", "b", "c", "d"] if dtype == "str" else torch.tensor([0, 1, 1, 0], dtype=getattr(torch, dtype))
    found = seen(tmp_path, Makes(lambda: {"reward": column}, shape="map", writes=(field,)))["reward"]
    assert (found if dtype == "str" else found.tolist()) == (column if dtype == "str" else column.tolist())
