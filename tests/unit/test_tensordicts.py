"""Columns as TensorDicts: conversions both ways, and stages that take and return them, also in a replay."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from pipeline import Field, Graph, Output, Schedule, Stage, export
from pipeline.data_plane import kept
from pipeline.data_plane.tensordicts import as_tensordict, from_tensordict, is_tensordict
from pipeline.declare.columns import Ragged
from pipeline.engine.driver import Driver
from pipeline.errors import SluiceError
from pipeline.executors.local import LocalExecutor
from pipeline.executors.replay import load_inputs, run_again
from pipeline.plan.planner import plan
from pipeline.rundir import RunDir

TEXT, IDS, BOX = Field("text", dtype="str"), Field("ids", "int64", "N T"), Field("box", "float32", "N 2")
TWICE, SIZE, SUM = Field("twice", dtype="str"), Field("size", "float32"), Field("pairs", "int64", "N T 2")


def same(one: Any, other: Any) -> bool:
    """Whether two columns are equal."""
    if isinstance(one, Ragged):
        return isinstance(other, Ragged) and one.lengths == other.lengths and torch.equal(one.values, other.values)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_columns_survive_the_way_there_and_back(lengths: list[int]) -> None:
    count, total = len(lengths), sum(lengths)
    columns = {
        "text": [f"é{i}" for i in range(count)],
        "ids": Ragged(torch.arange(total), tuple(lengths)),
        "twice": Ragged(torch.arange(total), tuple(lengths)),
        "pairs": Ragged(torch.arange(2 * total).view(total, 2), tuple(lengths)),
        "box": torch.rand(count, 2),
    }
    made = as_tensordict(columns, count)
    assert made.batch_size == torch.Size([count]) and made["text"] == columns["text"]
    assert [row.tolist() for row in made["ids"].unbind()] == [row.tolist() for row in columns["ids"].rows()]
    assert torch.equal((made["ids"] + made["twice"]).values(), 2 * columns["ids"].values), "they can be computed with"
    back = from_tensordict(made)
    assert back.keys() == columns.keys() and all(same(columns[name], back[name]) for name in columns)


@pytest.mark.parametrize("lengths", [(2, 3), (2, 2), (0, 4)])
def test_a_lazy_stack_of_samples_has_its_columns(lengths: tuple[int, int]) -> None:
    ids = [torch.arange(length) for length in lengths]
    samples = [TensorDict({"ids": row, "box": torch.ones(2), "size": torch.tensor(0.5), "text": "é"}) for row in ids]
    made = from_tensordict(lazy_stack(samples), {"ids"})
    assert same(made["ids"], Ragged.of(ids)) and made["text"] == ["é", "é"]
    assert torch.equal(made["box"], torch.ones(2, 2)) and torch.equal(made["size"], torch.tensor([0.5, 0.5]))
    if lengths == (2, 3):
        assert same(from_tensordict(lazy_stack(samples))["ids"], Ragged.of(ids)), "nothing else it could be"


def test_rows_of_a_lazy_stack_that_do_not_go_together_are_left_to_the_checks() -> None:
    rows = [TensorDict({"ids": torch.zeros(2, 3)}), TensorDict({"ids": torch.zeros(2)})]
    assert isinstance(from_tensordict(lazy_stack(rows))["ids"], list)


def test_nested_tensors_of_any_layout_become_ragged() -> None:
    rows = [torch.arange(3), torch.arange(1), torch.arange(2)]
    strided = torch.nested.nested_tensor(rows, layout=torch.strided)
    holes = torch.nested.narrow(torch.arange(12).view(3, 4), 1, 0, torch.tensor([3, 1, 2]), layout=torch.jagged)
    made = from_tensordict(TensorDict({"strided": strided, "holes": holes}, batch_size=[3]))
    assert same(made["strided"], Ragged.of(rows))
    assert same(made["holes"], Ragged(torch.tensor([0, 1, 2, 4, 8, 9]), (3, 1, 2)))
    assert is_tensordict(TensorDict({}, batch_size=[2])) and not is_tensordict({"a": 1})


@dataclass(frozen=True)
class Numbers(Stage):
    """Writes plain columns of every kind."""

    name: str = "numbers"
    batch: int = 2
    group_size: int = 2
    writes = (TEXT, IDS, BOX)

    def setup(self, context: Any) -> Any:
        def run(columns: Any, task: Any) -> Any:
            count = 2 * len(task.groups)
            lengths = tuple(1 + i % 3 for i in range(count))
            return {
                "text": [str(group) for group in task.groups for _ in range(2)],
                "ids": Ragged(torch.arange(sum(lengths)), lengths),
                "box": torch.arange(2.0 * count).view(count, 2),
            }

        return run


@dataclass(frozen=True)
class InTensorDicts(Stage):
    """Takes a TensorDict, and returns one, itself or in an Output."""

    whole: bool
    fails: bool = False
    name: str = "twice"
    reads = (TEXT, IDS, BOX)
    writes = (TWICE, SIZE, SUM)
    shows = (SUM,)
    takes_tensordict = True

    def vocabulary(self, context: Any) -> list[bytes]:
        return [b"a"]

    def setup(self, context: Any) -> Any:
        def run(given: TensorDict, task: Any) -> Any:
            if self.fails:
                raise ArithmeticError(f"{type(given).__name__} of {given.batch_size[0]}")
            values, offsets = given["ids"].values(), given["ids"].offsets()
            pairs = torch.nested.nested_tensor_from_jagged(torch.stack([values, values], 1), offsets=offsets)
            made = TensorDict({"size": given["box"].sum(1), "pairs": pairs}, batch_size=given.batch_size)
            made["twice"] = [2 * text for text in given["text"]]
            return made if self.whole else Output(made, metrics={"samples": float(given.batch_size[0])})

        return run


@dataclass(frozen=True)
class Look(Stage):
    """Keeps the plain columns that it gets."""

    seen: Any
    name: str = "look"
    per = "batch"
    reads = (TWICE, SIZE, SUM)

    def setup(self, context: Any) -> Any:
        return lambda columns, task: self.seen.append(columns)


def run(tmp_path: Any, stage: Stage, seen: list[Any]) -> Graph:
    described = Graph(name="dicts", source=Numbers(), stages=(stage, Look(seen)), schedule=Schedule(steps=1))
    Driver(described, plan(described)[0], LocalExecutor(), run_dir=RunDir(tmp_path / "run").create()).execute()
    return described


@pytest.mark.parametrize("whole", [True, False], ids=["a TensorDict", "in an Output"])
def test_a_stage_takes_and_returns_tensordicts(tmp_path: Any, whole: bool) -> None:
    seen: list[Any] = []
    run(tmp_path, InTensorDicts(whole), seen)
    (columns,) = seen
    assert columns["twice"] == ["00", "00", "11", "11"] and columns["size"].tolist() == [1, 5, 9, 13]
    assert columns["pairs"].lengths == (1, 2, 3, 1) and columns["pairs"].values.tolist() == [[i, i] for i in range(7)]


def test_the_kept_samples_are_exported_as_one(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, InTensorDicts(True), [])
    file, told = tmp_path / "made" / "samples.pt", []
    once, logger = torch.fx._symbolic_trace.is_fx_tracing_warning, logging.getLogger("torch.fx._symbolic_trace")
    monkeypatch.setattr(logger, "handlers", [handler := logging.Handler()])
    handler.emit = told.append
    once.cache_clear()
    assert export.main([str(tmp_path / "run"), "--samples", str(file)]) == 0
    assert not told, "torch warns of its own code"
    once.cache_clear()
    once()
    assert len(told) == 1, "of other code it still does"
    made = torch.load(file)
    assert made.batch_size == torch.Size([4]) and made["step"].tolist() == [0] * 4
    assert made["text"] == ["0", "0", "1", "1"] and made["size"].tolist() == [1, 5, 9, 13]
    assert [row[:, 0].tolist() for row in made["pairs"].unbind()] == [[0], [1, 2], [3, 4, 5], [6]]
    (path,) = (tmp_path / "run" / "samples").glob("*.jsonl")
    path.write_text(path.read_text().replace("[[0,0]]", "[]"))
    file.unlink()
    export.main([str(tmp_path / "run"), "--samples", str(file)])
    assert [len(row) for row in torch.load(file)["pairs"].unbind()] == [0, 2, 3, 1]
    other = str(tmp_path / "other.pt")
    path.write_text("{not a sample\n")
    assert export.main([str(tmp_path / "run"), "--samples", other]) == 2
    shutil.rmtree(tmp_path / "run" / "samples")
    assert export.main([str(tmp_path / "run"), "--samples", other]) == 2
    assert "step_000001.jsonl:1: it cannot be" in (said := capsys.readouterr().err) and "it has no kept samples" in said
    assert not Path(other).exists()


@pytest.mark.parametrize("values", [[0.5, 1e300], [[0.5], [1e300]], [[1], [1e300]], [[], [1e300]]], ids=str)
def test_an_exported_number_beyond_float32_stays_finite(values: list[Any]) -> None:
    made = kept._column(values)
    given = [number for value in values for number in (value if isinstance(value, list) else [value])]
    assert (made.values if isinstance(made, Ragged) else made).tolist() == given
    assert kept._column([0.5, 2.0]).dtype == torch.float32


def test_it_fails_and_is_replayed_on_the_same_form(tmp_path: Any) -> None:
    with pytest.raises(SluiceError, match="TensorDict of 4"):
        run(tmp_path, InTensorDicts(True, fails=True), [])
    described = Graph(
        name="dicts", source=Numbers(), stages=(InTensorDicts(True), Look([])), schedule=Schedule(steps=1)
    )
    folder = tmp_path / "run/failures/step_000001_twice"
    made = run_again(described, folder, *load_inputs(folder))
    assert made.columns["twice"] == ["00", "00", "11", "11"]


def test_a_tensordict_with_other_columns_is_refused(tmp_path: Any) -> None:
    @dataclass(frozen=True)
    class Wrong(InTensorDicts):
        def setup(self, context: Any) -> Any:
            return lambda columns, task: columns

    with pytest.raises(
        SluiceError, match="the output of stage 'twice' lacks pairs, size, twice and adds box, ids, text"
    ):
        run(tmp_path, Wrong(True), [])
