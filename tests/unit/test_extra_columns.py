"""Columns of any type: from a data row, through a run, to the stage that declares them."""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pipeline import Field, Graph, Output, Schedule, Stage, StageError
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.columns import Ragged
from pipeline.declare.handle import keys_of
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.plan.planner import plan
from stages.prompts import Prompts
from stages.reward import Reward
from tests.optional import need
from tests.unit.test_prompts import draw, problem, problems, write

torch.set_num_threads(1)

LEVEL = Field("level", "int64", low=0)
SCORE = Field("score", "bfloat16")
HARD = Field("hard", "bool")
BOX = Field("box", "int16", "N 2 2")
PIXELS = Field("pixel_values", "float32", "N Q 3")
IMAGE = Field("image", "uint8", "N B")
TYPED = (LEVEL, SCORE, HARD, BOX, PIXELS)
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def rows(count):
    """Return rows whose values identify the row."""
    return [
        {
            "prompt": f"q{i}",
            "answer": "",
            "level": i,
            "score": i / 2,
            "hard": i % 2 == 0,
            "box": [[i, 1], [-i, 3]],
            "pixel_values": [[i, j, 0.5] for j in range(i % 4)],
        }
        for i in range(count)
    ]


def same(a, b):
    """Return whether two columns are equal in type, shape and every bit."""
    if isinstance(a, list):
        return a == b
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return a.lengths == b.lengths and same(a.values, b.values)
    return a.dtype == b.dtype and torch.equal(a, b)


def test_numbers_and_nested_lists(tmp_path):
    stage = Prompts(write(tmp_path / "d.jsonl", rows(4)), extra=TYPED, shuffle=False)
    assert problems(stage) == []
    assert stage.writes[2:] == TYPED
    columns = draw(stage, [3, 0], group_size=2)
    assert same(columns["level"], torch.tensor([3, 3, 0, 0]))
    assert same(columns["score"], torch.tensor([1.5, 1.5, 0, 0], dtype=torch.bfloat16))
    assert same(columns["hard"], torch.tensor([False, False, True, True]))
    boxes = [[[3, 1], [-3, 3]]] * 2 + [[[0, 1], [0, 3]]] * 2
    assert same(columns["box"], torch.tensor(boxes, dtype=torch.int16))
    pixels = torch.tensor([[3, 0, 0.5], [3, 1, 0.5], [3, 2, 0.5]] * 2)
    assert same(columns["pixel_values"], Ragged(pixels, (3, 3, 0, 0)))
    assert same(draw(stage, [0])["pixel_values"], Ragged(torch.empty(0, 3), (0,)))


def test_parquet_and_datasets_give_what_jsonl_gives(tmp_path):
    pa, pq = need("data", "pyarrow"), need("data", "pyarrow.parquet")
    datasets = need("data", "datasets")
    datasets.disable_progress_bars()
    pq.write_table(pa.Table.from_pylist(rows(9)), tmp_path / "d.parquet")
    features = datasets.Features(
        {
            **dict.fromkeys(("prompt", "answer"), datasets.Value("string")),
            "level": datasets.Value("int32"),
            "score": datasets.Value("float64"),
            "hard": datasets.Value("bool"),
            "box": datasets.Array2D((2, 2), "int64"),
            "pixel_values": datasets.List(datasets.List(datasets.Value("float32"))),
        }
    )
    datasets.Dataset.from_list(rows(9), features=features).save_to_disk(tmp_path / "saved")
    expected = draw(Prompts(write(tmp_path / "d.jsonl", rows(9)), extra=TYPED), range(12), group_size=2)
    for source in (tmp_path / "d.parquet", tmp_path / "saved"):
        stage = Prompts(source, extra=TYPED)
        assert problems(stage) == []
        columns = draw(stage, range(12), group_size=2)
        assert all(same(columns[name], expected[name]) for name in expected)


def test_a_field_may_have_another_name_than_its_column(tmp_path):
    path = write(
        tmp_path / "d.jsonl", [{"prompt": "a", "answer": "b", "extra_info": {"level": 3, "Image Size": [4, 5]}}]
    )
    size = Field("size", "int32", "N 2")
    stage = Prompts(path, extra=(("extra_info.level", LEVEL), ("extra_info.Image Size", size)))
    assert problems(stage) == []
    columns = draw(stage, [0])
    assert same(columns["level"], torch.tensor([3]))
    assert same(columns["size"], torch.tensor([[4, 5]], dtype=torch.int32))


@pytest.mark.parametrize(
    ("made", "value", "what"),
    [
        (LEVEL, "3", 'is "3"'),
        (LEVEL, None, "is null"),
        (LEVEL, True, "is true"),
        (LEVEL, 2.0, "is 2.0, not a whole number"),
        (LEVEL, -1, "is -1, which is out of range"),
        (LEVEL, [1], "is [1]"),
        (LEVEL, 2**63, f"is {2**63}, which is out of range"),
        (Field("level", "uint8"), 256, "is 256, which is out of range"),
        (Field("level", "float32"), float("nan"), "is NaN, which is out of range"),
        (Field("level", "float16"), 70000, "is 70000, which is out of range"),
        (Field("level", "float32", high=1.0), 1.5, "is 1.5, which is out of range"),
        (Field("level", "float64"), 10**400, f"is 1{'0' * 59}..., which is out of range"),
        (HARD, 1, "is 1"),
        (BOX, [[1, 2]], "has the shape [1, 2]"),
        (BOX, [[1, 2], [3]], "is a nested list whose parts differ in length"),
        (BOX, [[1, 2], [3, 4.5]], "holds float64"),
        (BOX, [[1, 2], [3, None]], "holds values that are not numbers"),
        (BOX, [[1, 2], [3, 2**15]], "is 32768, which is out of range"),
        (BOX, 7, "is 7"),
        (BOX, "x", 'is "x"'),
        (PIXELS, [1.0, 2.0, 3.0], "has the shape [3]"),
        (PIXELS, [[1.0, 2.0]], "has the shape [1, 2]"),
        (PIXELS, [[1.0, 2.0, float("inf")]], "is Infinity, which is out of range"),
        (PIXELS, None, "is null"),
        (IMAGE, "no.png", "names the missing file 'no.png'"),
        (IMAGE, {"bytes": None, "path": None}, "is an image without bytes and without a path"),
        (IMAGE, ["a.png", "b.png"], "holds 2 images, and a row has one"),
        (IMAGE, [1, 300], "is 300, which is out of range"),
        (IMAGE, None, "is null"),
    ],
)
def test_a_value_that_does_not_fit_is_named_before_and_during_the_run(tmp_path, made, value, what):
    column = made.name
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "b", column: value}])
    found = problem(Prompts(path, extra=(made,)))
    assert found.where == f"{path}:1"
    assert found.what == f"column {column!r} {what}"
    assert f"is {made.dtype}, dims {made.dims!r}" in found.why
    with pytest.raises(StageError) as error:
        draw(Prompts(path, extra=(made,)), [0])
    assert error.value.problems == (found,)


def test_a_list_of_parquet_with_a_hole_in_it(tmp_path):
    pa, pq = need("data", "pyarrow"), need("data", "pyarrow.parquet")
    for name, value in (("hole", [[1.0, None, 3.0]]), ("short", [[1.0, 2.0, 3.0], [1.0]])):
        row = {"prompt": "a", "answer": "b", "pixel_values": value}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    whats = [problem(Prompts(tmp_path / f"{name}.parquet", extra=PIXELS)).what for name in ("hole", "short")]
    assert whats == [
        "column 'pixel_values' holds values that are not numbers",
        "column 'pixel_values' is a nested list whose parts differ in length",
    ]


def test_numbers_are_checked_in_every_row_before_the_first_step(tmp_path):
    path = write(tmp_path / "d.jsonl", [*rows(1500), {**rows(1)[0], "level": "?"}])
    assert problems(Prompts(path, extra=(LEVEL,))) == []
    with pytest.raises(StageError, match=r"d\.jsonl:1501: column 'level'"):
        draw(Prompts(path, extra=(LEVEL,)), [0])


def test_images_stay_encoded(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(PNG)
    values = ["images/a.png", {"path": str(tmp_path / "images" / "a.png")}, ["images/a.png"], list(PNG)]
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "answer": str(i), "image": v} for i, v in enumerate(values)])
    stage = Prompts(path, extra=(IMAGE,), shuffle=False)
    assert problems(stage) == []
    column = draw(stage, range(4), group_size=2)["image"]
    assert column.values.dtype == torch.uint8
    assert [bytes(row.tolist()) for row in column.rows()] == [PNG] * 8


def test_images_of_parquet_and_datasets(tmp_path):
    pa, pq = need("data", "pyarrow"), need("data", "pyarrow.parquet")
    datasets = need("data", "datasets")
    datasets.disable_progress_bars()
    held = {"prompt": "a", "answer": "b", "image": {"bytes": PNG, "path": "elsewhere.png"}}
    pq.write_table(
        pa.Table.from_pylist([held, {**held, "image": {"bytes": PNG * 2, "path": None}}]), tmp_path / "d.parquet"
    )
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"], "image": [PNG]}), tmp_path / "plain.parquet")
    plain = datasets.Dataset.from_list([held])
    plain.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    for source, expected in (("d.parquet", [PNG, PNG * 2]), ("plain.parquet", [PNG]), ("saved", [PNG])):
        stage = Prompts(tmp_path / source, extra=(IMAGE,), shuffle=False)
        assert problems(stage) == []
        column = draw(stage, range(len(expected)))["image"]
        assert [bytes(row.tolist()) for row in column.rows()] == expected


@dataclass(frozen=True)
class Samples(Stage):
    """Makes three samples per prompt; reads only the prompt."""

    name: str = "samples_of"
    per: str = "group"
    group_size: int = 3
    reads: Sequence[Field] = (Field("prompt", "str"),)
    writes: Sequence[Field] = (Field("sample", "int64"),)

    def setup(self, context: Any) -> Any:
        return lambda columns, task: {"sample": torch.arange(len(columns["prompt"]))}


@dataclass(frozen=True)
class Look(Stage):
    """Records the columns it receives."""

    reads: Sequence[Field] = ()
    name: str = "look"
    per: str = "group"
    seen: list = field(default_factory=list, hash=False, compare=False)

    def setup(self, context: Any) -> Any:
        def run(columns: dict, task: Any) -> Output:
            self.seen.append((task, columns))
            return Output(metrics={"mean_level": columns["level"].double().mean().item()})

        return run


def test_a_stage_that_declares_them_gets_them_for_every_sample_of_the_group(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    path = write(tmp_path / "d.jsonl", [{**row, "image": "a.png"} for row in rows(10)])
    fields = (*TYPED, IMAGE)
    source = Prompts(path, batch=4, extra=fields)
    look = Look(reads=(*fields, Field("sample", "int64")))
    graph = Graph(name="g", source=source, stages=(Samples(), look), schedule=Schedule(steps=3, seed=7))
    Driver(graph, plan(graph)[0], LocalExecutor()).execute()
    assert sorted(group for task, _ in look.seen for group in task.groups) == list(range(12))
    for task, columns in look.seen:
        expected = draw(source, task.groups, group_size=3, seed=7)
        assert columns.keys() == {made.name for made in look.reads}
        assert all(same(columns[made.name], expected[made.name]) for made in fields)


def test_the_data_plane_gives_back_what_was_put(tmp_path):
    stage = Prompts(write(tmp_path / "d.jsonl", rows(6)), extra=TYPED)
    columns = draw(stage, range(8), group_size=2)
    plane = MemoryPlane()
    plane.register("p", stage.writes, ["reader"])
    handle = plane.put(keys_of(range(8), 2), columns, partition="p", stage="prompts")
    assert handle.lengths == {"Q": columns["pixel_values"].lengths}
    for part in (handle, handle.slice(3, 11), handle.reorder([15, 0, 4])):
        index = [handle.keys.index(key) for key in part.keys]
        got = plane.get(part, [made.name for made in stage.writes], reader="reader")
        assert got["level"].tolist() == columns["level"][index].tolist()
        rows_of = columns["pixel_values"].rows()
        assert same(got["pixel_values"], Ragged.of([rows_of[i] for i in index]))
        assert same(got["box"], columns["box"][index])


def test_a_reader_of_another_type_is_a_problem_of_the_graph(tmp_path):
    from pipeline import GraphError

    source = Prompts(write(tmp_path / "d.jsonl", rows(2)), extra=LEVEL)
    look = Look(reads=(Field("level", "float32"),))
    with pytest.raises(GraphError, match="'look' reads 'level' as float32"):
        plan(Graph(name="g", source=source, stages=(look,), schedule=Schedule(steps=1)))


def test_texts_and_typed_columns_side_by_side(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": "a", "answer": "b", "level": 3, "unit": "m"}])
    columns = draw(Prompts(path, extra=("unit", LEVEL)), [0], group_size=2)
    assert list(columns) == ["prompt", "answer", "unit", "level"]
    assert columns["unit"] == ["m", "m"]
    assert json.dumps(columns["level"].tolist()) == "[3, 3]"


def test_a_column_that_is_only_named_has_the_type_of_its_values(tmp_path):
    made = [{**row, "half": row["level"] + 0.5 * (i % 2), "info": {"rank": i}} for i, row in enumerate(rows(4))]
    path = write(tmp_path / "d.jsonl", made)
    source = Prompts(path, extra=("level", "half", "hard", "answer_text", ("info.rank", "rank"), "info.rank"))
    named = {made.name: made.dtype for made in source.writes}
    assert named == {"prompt": "str", "answer": "str", "level": "int64", "half": "float32", "hard": "bool",
                     "answer_text": "str", "rank": "int64"}  # fmt: skip
    assert {made.name: made.dtype for made in Prompts(path, extra="level", as_text="level").writes}["level"] == "str"
    mixed = write(tmp_path / "mixed.jsonl", [{"prompt": "", "answer": "", "level": level} for level in ("1", 2)])
    assert Prompts(mixed, extra="level").writes[-1].dtype == "str"
    assert Prompts(tmp_path / "none.jsonl", extra="level").writes[-1].dtype == "str"


@pytest.mark.parametrize(
    ("good", "odd", "dtype", "what", "fix"),
    [
        (7, None, "int64", "is null; most of the others are numbers", "write a number, or remove the row"),
        (7, True, "int64", "is true; most of the others are numbers", "write a number, or remove the row"),
        (7, "x", "int64", 'is "x"; most of the others are numbers', "write a number, or remove the row"),
        (7.5, [1], "float32", "is [1]; most of the others are numbers", "write a number, or remove the row"),
        (False, 1, "bool", "is 1; most of the others are truths", "write true or false, or remove the row"),
        (7, ..., "int64", "is missing; this line has 'prompt', 'answer'", "name the columns with"),
        (
            7,
            2**70,
            "int64",
            f"is {2**70}, which is out of range; the field 'level' is int64",
            "give each row one value",
        ),
        ("a", 1, "str", "is 1, which is not a string; an extra column is all strings", "write it as a string"),
        ("a", None, "str", "is null, which is not a string; an extra column is all strings", "write it as a string"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
def test_of_a_column_that_is_only_named_the_odd_row_is_named(tmp_path, good, odd, dtype, what, fix, at):
    made = [{"prompt": str(i), "answer": "", "level": good} for i in range(3)]
    made[at]["level"] = odd
    if odd is ...:
        del made[at]["level"]
    path = write(tmp_path / "d.jsonl", made)
    source = Prompts(path, extra="level")
    assert source.writes[-1].dtype == dtype
    found = problem(source)
    assert found.where == f"{path}:{at + 1}"
    assert f"{found.what}; {found.why}".startswith(f"column 'level' {what}") and found.fix.startswith(fix)


def test_a_named_column_of_a_parquet_file_has_the_type_of_its_values(tmp_path):
    need("data", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": ["", ""], "level": [3, 4]}), tmp_path / "d.parquet")
    columns = draw(Prompts(tmp_path / "d.parquet", extra="level"), [0, 1])
    assert sorted(columns["level"].tolist()) == [3, 4]


def typed(prompt: str, level: int, half: float, hard: bool) -> float:
    assert (type(level), type(half), type(hard)) == (int, float, bool)
    return level + half


def untyped(level, hard, answer) -> float:
    assert (type(level), type(hard), answer) == (int, bool, "")
    return float(hard)


@pytest.mark.parametrize("functions", [(typed,), (untyped,), (typed, untyped), (untyped, typed)])
def test_a_reward_gets_numbers_as_the_data_has_them(tmp_path, functions):
    made = [{**row, "half": row["level"] / 2} for row in rows(4)]
    path = write(tmp_path / "d.jsonl", made)
    source = Prompts(path, batch=4, extra=("level", "half", "hard"))
    graph = Graph(name="g", source=source, stages=(Samples(), Reward(*functions)), schedule=Schedule(steps=1))
    seen: list[dict[str, float]] = []
    driver = Driver(graph, plan(graph)[0], LocalExecutor(), on_step=lambda step, metrics: seen.append(metrics))
    driver.execute()
    means = {typed: (0 + 1 + 2 + 3) * 1.5 / 4, untyped: 0.5}
    assert seen[0]["reward/mean"] == pytest.approx(sum(means[function] for function in functions))


def test_who_writes_a_field_says_its_type(tmp_path):
    from pipeline import GraphError

    source = Prompts(write(tmp_path / "d.jsonl", rows(2)), extra=Field("level", "any"))
    with pytest.raises(GraphError, match="'prompts' writes 'level' as any"):
        plan(Graph(name="g", source=source, stages=(Reward(untyped),), schedule=Schedule(steps=1)))
