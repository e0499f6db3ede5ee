"""The prompt source: rows by admission number, and the problems of invalid files and parameters."""

import json
from pathlib import Path

import cloudpickle
import pytest

from pipeline import Field, Graph, Model, Schedule, StageContext, StageError, Task, WorkerGroup
from stages.backends import model_problems
from stages.prompt_lengths import prompt_problems
from stages.prompts import Prompts
from stages.sources import Dataset, Mixture
from stages.sources.draws import open_rows
from stages.sources.schema import Schema
from stages.tasks import Generated

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL = Generated(digits=2, held_out=30)
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": "easy" if i % 2 else "hard"} for i in range(10)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def draw(stage, groups, group_size=1, seed=0):
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=seed, group_size=group_size, run_dir=None, shared={})
    return stage.setup(context)({}, Task(stage="prompts", step=0, groups=tuple(groups))).columns


def problems(stage):
    return list(stage.check(Graph(name="g", source=stage, stages=(), schedule=Schedule(steps=1))))


def problem(stage):
    (only,) = problems(stage)
    return only


def test_a_group_has_its_prompt_once_a_sample():
    columns = draw(Prompts(SMALL), [3, 5], group_size=2)
    (three, five) = SMALL.train(3), SMALL.train(5)
    assert columns == {"prompt": [three[0]] * 2 + [five[0]] * 2, "answer": [three[1]] * 2 + [five[1]] * 2}


@pytest.mark.parametrize("kind", ["generated", "file"])
def test_a_row_depends_on_its_admission_number_only(tmp_path, kind):
    source = SMALL if kind == "generated" else write(tmp_path / "d.jsonl", ROWS)
    together = draw(Prompts(source), range(25))["prompt"]
    alone = [draw(Prompts(source), [a])["prompt"][0] for a in reversed(range(25))]
    assert together == alone[::-1]


def test_a_file_is_shuffled_anew_each_epoch(tmp_path):
    stage = Prompts(write(tmp_path / "d.jsonl", ROWS), extra=("level",))
    columns = draw(stage, range(30))
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    epochs = [rows[i : i + 10] for i in (0, 10, 20)]
    for epoch in epochs:
        assert sorted(row["prompt"] for row in epoch) == sorted(row["prompt"] for row in ROWS)
        assert all(row in ROWS for row in epoch)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_follows_the_seed_of_the_run_unless_given(tmp_path):
    for source in (SMALL, write(tmp_path / "d.jsonl", ROWS)):
        runs = [draw(Prompts(source), range(10), seed=seed)["prompt"] for seed in (0, 1)]
        assert runs[0] != runs[1]
        fixed = [draw(Prompts(source, seed=1), range(10), seed=seed)["prompt"] for seed in (0, 5)]
        assert fixed == [runs[1]] * 2


def test_columns_are_named_by_the_user(tmp_path):
    rows = [{"q": "1+1=", "a": "2", "unit": "m", "n": 5}]
    stage = Prompts(write(tmp_path / "d.jsonl", rows), prompt="q", answer="a", extra=("unit",))
    assert [(field.name, field.dtype) for field in stage.writes] == [
        ("prompt", "str"), ("answer", "str"), ("unit", "str"),
    ]  # fmt: skip
    assert draw(stage, [0]) == {"prompt": ["1+1="], "answer": ["2"], "unit": ["m"]}
    assert problems(stage) == []


def test_description():
    stage = Prompts(SMALL, batch=4)
    assert (stage.name, stage.batch, stage.reads) == ("prompts", 4, ())
    assert stage.location.file == __file__
    assert cloudpickle.loads(cloudpickle.dumps(stage)) == stage
    assert hash(stage) == hash(Prompts(SMALL, batch=4))
    assert problems(stage) == []


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": ""}\n\n  \n{"prompt": "b", "answer": "c"}')
    assert problems(Prompts(path)) == []
    assert list(open_rows(path, Schema())) == [("a", ""), ("b", "c")]


def test_a_missing_file_names_the_near_one(tmp_path):
    write(tmp_path / "train.jsonl", ROWS)
    stage = Prompts(str(tmp_path / "trian.jsonl"))
    assert str(problem(stage)) == (
        f"{stage.location}: '{tmp_path}/trian.jsonl' does not exist; rows are read from a JSONL file, by its path from "
        f"the working directory. Fix: did you mean '{tmp_path}/train.jsonl'?"
    )
    assert "one JSON object per line" in problem(Prompts(tmp_path / "no" / "such.jsonl")).fix


GOOD = '{"prompt": "a", "answer": "b"}'


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ("{", "this line is not JSON", "write lines such as"),
        ("[1, 2]", "this line holds a JSON list, not an object", "write lines such as"),
        ('{"promt": "a", "answer": "b"}', "column 'prompt' is missing", "did you mean 'promt'?"),
        ('{"prompt": "a", "solution": "b"}', "column 'answer' is missing", "answer="),
        ("{}", "column 'prompt' is missing", "prompt="),
        ('{"prompt": 3, "answer": "b"}', "column 'prompt' is 3, which is not a string", '"prompt": "3"'),
        ('{"prompt": "a", "answer": null}', "column 'answer' is null, which is not a string", '"answer": "2"'),
        ('{"prompt": "", "answer": "b"}', "column 'prompt' is empty", "write a prompt, or remove the row"),
        ('{"prompt": "\\ud800", "answer": "b"}', "column 'prompt' has half of a surrogate pair", "write both halves"),
        ("[" * 100_000, "this line is not JSON", "write lines such as"),
    ],
)
def test_a_bad_line_is_named_with_its_number_before_and_during_the_run(tmp_path, line, what, fix):
    path = tmp_path / "d.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    found = problem(Prompts(path))
    assert found.where == f"{path}:3"
    assert found.what.startswith(what)
    assert fix in found.fix
    with pytest.raises(StageError, match=r"d\.jsonl:3: ") as error:
        draw(Prompts(path), [0])
    assert error.value.problems == (found,)


def test_a_line_that_is_not_utf8(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff", "answer": "b"}\n')
    assert problem(Prompts(path)).where == f"{path}:2"


def test_many_bad_lines_are_counted(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"question": "a", "answer": "b"}] * 50)
    *shown, rest = problems(Prompts(path))
    assert [found.where for found in shown] == [f"{path}:{i}" for i in (1, 2, 3)]
    assert rest.what == "47 more of the first 50 lines are invalid"


def test_an_empty_file(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\n")
    assert problem(Prompts(path)).what == "the file has no rows"
    with pytest.raises(StageError, match="the file has no rows"):
        draw(Prompts(path), [0])


def test_repeated_rows_are_a_warning(tmp_path):
    found = problem(Prompts(write(tmp_path / "d.jsonl", [*ROWS, ROWS[0], ROWS[1]])))
    assert found.warning
    assert found.what == "2 of the first 12 rows repeat an earlier one"


def test_the_check_reads_the_first_thousand_lines_and_the_run_all(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "answer": ""}}\n' for i in range(1000)) + "{\n")
    assert problems(Prompts(path)) == []
    with pytest.raises(StageError, match=":1001: this line is not JSON"):
        draw(Prompts(path), [0])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": 2.5}, "batch=2.5"),
        ({"seed": -1}, "seed=-1"),
        ({"source": 4}, "source is an int"),
        ({"source": SMALL, "extra": ("level",)}, "columns prompt, answer, level of a Generated task"),
        ({"extra": ("level", "level")}, "column 'level' is used 2 times"),
        ({"prompt": "answer"}, "column 'answer' is used 2 times"),
        ({"prompt": None}, "column None is not a string"),
        ({"prompt": "level", "extra": ("prompt",)}, "extra column 'prompt'"),
        ({"extra": ("Level",)}, "extra column 'Level'"),
        ({"extra": (7,)}, "extra column 7"),
        ({"extra": ("level", ("Level", "level"))}, "extra column 'Level'"),
        ({"extra": (("level", "dataset"),), "source": Dataset("x.jsonl", name="x")}, "extra column 'level'"),
        ({"extra": (("level", "messages"),), "chat": True}, "extra column 'level'"),
        ({"extra": (Field("weights", "weights", dims=""),)}, "extra column 'weights'"),
        ({"answer": 3}, "column 3 is not a string"),
        ({"as_text": (3,)}, "column 3 is not a string"),
        ({"template": "{}"}, "template='{}'"),
        ({"template": "{prompt"}, "template='{prompt'"),
        ({"template": "{prompt:3}"}, "template='{prompt:3}'"),
        ({"template": "Say it"}, "template='Say it'"),
        ({"template": 3}, "template=3"),
        ({"template": "{prompt}", "prompt": "level"}, "prompt='level' and a template"),
        ({"chat": 1}, "chat=1"),
        ({"shuffle": None}, "shuffle=None"),
        ({"system": "Be brief"}, "system='Be brief' without chat=True"),
        ({"source": SMALL, "shuffle": False}, "shuffle=False for a Generated task"),
        ({"source": Dataset(())}, "Dataset(())"),
        ({"source": Dataset("x.jsonl", split=1)}, "Dataset(..., split=1)"),
        ({"source": Mixture()}, "Mixture() has no source"),
        ({"source": Mixture(SMALL)}, "Mixture has Generated(task='reverse', digits=2, held_out=30, seed=0)"),
        ({"source": Mixture((3, 1))}, "Mixture has a source that is an int"),
        ({"source": Mixture((SMALL, 0))}, "the weight of 'reverse' is 0"),
        ({"source": Mixture((SMALL, 1), (SMALL, 1))}, "2 sources are named 'reverse'"),
        ({"source": Mixture((SMALL, 1), (Dataset("x"), 1e-9))}, "the weight of 'x' is below 1/100,000 of the sum"),
    ],
)
def test_bad_parameters(tmp_path, arguments, what):
    rows = [{**row, "Level": "1"} for row in ROWS]
    stage = Prompts(**{"source": write(tmp_path / "d.jsonl", rows), **arguments})
    found = problem(stage)
    assert found.what == what
    assert found.where == str(stage.location)


def test_a_prompt_that_is_too_long_is_counted_with_the_tokenizer_of_a_folder(tmp_path):
    """Of the words that this tokenizer knows each is one token, so bytes alone do not say which prompt is too long."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"sum": 0, "difference": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 12}')
    rows = ["difference " * 8, "sum " * 8 + "sum", "sum"]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f'{{"prompt": "{row.strip()}", "answer": ""}}\n' for row in rows))

    def found(max_tokens):
        source = Prompts(data)
        return list(prompt_problems(Model(str(tmp_path)), source.source, source.layout, max_tokens, "stage 'rollout'"))

    assert found(3) == []
    (problem,) = found(4)
    assert (problem.where, problem.fix) == (f"{data}:2", "max_tokens=3, or leave out such rows")
    assert "9 tokens" in problem.what and "12 positions" in problem.why
    (tmp_path / "tokenizer.json").write_text("{}")  # reported apart
    assert found(4) == []


def test_a_name_without_an_owner_is_that_of_a_model_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert [problem.what[:22] for problem in model_problems(Model("gpt2"))] == ["the model 'gpt2' is no"]
    (tmp_path / "models--gpt2").mkdir()
    assert list(model_problems(Model("gpt2"))) == list(model_problems(Model("owner/gpt2"))) == []
