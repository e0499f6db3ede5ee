"""Row sources: files, folders, patterns, Parquet, saved and hub data sets, and mixtures of them."""

import json
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.random import shuffled
from pipeline import StageError
from stages.prompts import Prompts
from stages.sources import Dataset, Mixture
from stages.sources.draws import open_rows
from stages.sources.mixture import LONGEST_WINDOW, turns
from stages.sources.schema import Schema
from stages.tasks import Generated
from tests.examples import few
from tests.optional import need
from tests.unit.test_prompts import REPOSITORY, draw, problem, problems, write

TEXTS = Schema()


def rows(count, prefix="q"):
    return [{"prompt": f"{prefix}{i}", "answer": str(i)} for i in range(count)]


def prompts(source, **options):
    """Return the prompts of a data set in file order."""
    return [prompt for prompt, _ in open_rows(source, Schema(**options))]


# Files


def test_files_of_a_pattern_a_folder_and_a_list_lie_one_after_the_other(tmp_path):
    for name, prefix in (("b.jsonl", "b"), ("a.jsonl", "a"), ("notes.txt", "no")):
        write(tmp_path / name, rows(2, prefix))
    assert prompts(tmp_path) == prompts(tmp_path / "*.jsonl") == ["a0", "a1", "b0", "b1"]
    assert prompts(Dataset([tmp_path / "b.jsonl", tmp_path / "a.jsonl"])) == ["b0", "b1", "a0", "a1"]
    stage = Prompts(tmp_path, shuffle=False)
    assert problems(stage) == []
    assert draw(stage, range(6))["prompt"] == ["a0", "a1", "b0", "b1", "a0", "a1"]


def test_a_pattern_goes_into_folders_and_its_characters_may_be_those_of_a_name(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    write(tmp_path / "x" / "y" / "deep.jsonl", rows(1))
    write(tmp_path / "odd[1].jsonl", rows(2))
    assert prompts(tmp_path / "**" / "deep.jsonl") == ["q0"]
    assert prompts(tmp_path / "odd[1].jsonl") == ["q0", "q1"]


def test_the_split_of_a_folder_must_be_chosen(tmp_path):
    write(tmp_path / "train.jsonl", rows(3, "train"))
    write(tmp_path / "test.jsonl", rows(2, "test"))
    found = problem(Prompts(tmp_path))
    assert found.what == f"'{tmp_path}' holds test.jsonl, train.jsonl"
    assert found.fix == f"write Dataset('{tmp_path}', split='train')"
    with pytest.raises(StageError, match="held-out"):
        draw(Prompts(tmp_path), [0])
    assert prompts(Dataset(tmp_path, split="test")) == ["test0", "test1"]
    assert "did you mean" not in problem(Prompts(Dataset(tmp_path, split="validation"))).fix
    assert problem(Prompts(Dataset(tmp_path, split="tran"))).fix == "split='train', or leave it out"


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"], [0, 1]),
        (["math_train.jsonl", "math_test.jsonl"], [0]),
        (["train.jsonl", "train_sft.jsonl"], [0]),
        (["constrained.jsonl", "train.jsonl"], [1]),
    ],
)
def test_a_split_is_a_word_of_the_name(tmp_path, names, chosen):
    for i, name in enumerate(names):
        write(tmp_path / name, rows(1, f"file{i}-"))
    assert prompts(Dataset(tmp_path, split="train")) == [f"file{i}-0" for i in chosen]


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda f: Dataset(f), "is a folder without a data file", "give the path of a file"),
        (lambda f: (f / "data").mkdir() or (write(f / "data/a.jsonl", rows(1)) and Dataset(f)), "without", "f}/data'?"),
        (lambda f: Dataset(f / "*.jsonl"), "no file matches", "name a file"),
        (lambda f: Dataset(f / "train.parquet"), "train.parquet' does not exist", "give the path"),
        (lambda f: Dataset(write(f / "a.jsonl", rows(1)), config="main"), "config='main' of", "leave out config="),
        (lambda f: Dataset(write(f / "a.jsonl", rows(1)), revision="v1"), "revision='v1' of", "leave out revision="),
        (
            lambda f: Dataset(write(f / "a.jsonl", rows(1)), split="train"),
            "has 'train' in its name",
            "leave out split=",
        ),
        (lambda f: write(f / "a.jsonl", rows(1)) and Dataset((f, f / "b.jsonl")), "b.jsonl' does not exist", "a.jsonl"),
        (lambda f: (f / "dead.jsonl").symlink_to("no") or Dataset(f / "dead.jsonl"), "does not exist", "give the path"),
        (lambda f: Dataset("/dev/null"), "'/dev/null' is neither a file nor a folder", "give the path"),
        (lambda f: Dataset("no_such_owner/"), "'no_such_owner' does not exist", "give the path"),
    ],
)
def test_what_is_not_there(tmp_path, make, what, fix):
    stage = Prompts(make(tmp_path))
    found = problem(stage)
    assert found.where == str(stage.location)
    assert what in found.what
    assert fix.replace("f}", str(tmp_path)) in found.fix
    with pytest.raises(StageError):
        draw(stage, [0])


def test_a_folder_that_is_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "math.jsonl", rows(1))
    assert "'data/mth.jsonl' does not exist" in problem(Prompts("data/mth.jsonl")).what
    assert problem(Prompts("data/maths")).what == "'data/maths' does not exist"
    assert prompts("data/math.jsonl") == ["q0"]


def test_a_bad_line_of_any_file_is_named(tmp_path):
    write(tmp_path / "a.jsonl", rows(2))
    (tmp_path / "b.jsonl").write_text('{"prompt": "x", "answer": "y"}\n\n{"prompt": "x"}\n')
    assert problem(Prompts(tmp_path)).where == f"{tmp_path}/b.jsonl:3"
    with pytest.raises(StageError, match=r"b\.jsonl:3: column 'answer' is missing"):
        draw(Prompts(tmp_path), [0])


def test_a_line_that_went_bad_after_the_start_is_named_when_it_is_drawn(tmp_path):
    path = write(tmp_path / "d.jsonl", rows(3))
    lines = path.read_text().splitlines()
    opened = open_rows(path, TEXTS)
    path.write_text("\n".join([lines[0], "#" * len(lines[1]), lines[2]]) + "\n")
    assert opened[2] == ("q2", "2")
    with pytest.raises(StageError, match=r"d\.jsonl:2: this line is not JSON"):
        opened[1]


def test_rows_by_number_with_blank_lines_and_without_a_last_newline(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(json.dumps(row).encode() + b"\r\n \t" for row in rows(4)))
    opened = open_rows(path, TEXTS)
    assert [opened[i][0] for i in (3, 1, 0, 2)] == ["q3", "q1", "q0", "q2"]
    with pytest.raises(IndexError):
        opened[4]


def test_a_compressed_file(tmp_path):
    import gzip

    path = tmp_path / "d.jsonl"
    path.write_bytes(gzip.compress(json.dumps(rows(1)[0]).encode()))
    assert problem(Prompts(path)).fix == "decompress the file"


# Columns


NESTED = {
    "question": "1+1=",
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"index": "7"},
    "n": 3,
    "a.b": "dots",
}


def test_columns_by_dotted_paths(tmp_path):
    stage = Prompts(
        write(tmp_path / "d.jsonl", [NESTED]),
        prompt="question",
        answer="reward_model.ground_truth",
        extra=("extra_info.index", ("a.b", "dots")),
    )
    assert problems(stage) == []
    assert draw(stage, [0]) == {"prompt": ["1+1="], "answer": ["2"], "index": ["7"], "dots": ["dots"]}
    found = problem(Prompts(write(tmp_path / "d.jsonl", [NESTED]), prompt="question", answer="reward_model.truth"))
    assert found.fix == "did you mean 'reward_model.ground_truth'?"


def test_a_template_makes_the_prompt(tmp_path):
    path = write(tmp_path / "d.jsonl", [NESTED])
    stage = Prompts(path, template="{{Q}}: {question} {n} {extra_info.index}\nA:", answer="reward_model.ground_truth")
    assert draw(stage, [0])["prompt"] == ["{Q}: 1+1= 3 7\nA:"]
    assert problem(Prompts(path, template="{quest}", answer="question")).what == "column 'quest' is missing"
    assert problem(Prompts(path, template="{extra_info}", answer="question")).what.startswith(
        "column 'extra_info' is {"
    )
    path = write(tmp_path / "e.jsonl", [{"question": "", "answer": "1"}])
    assert problem(Prompts(path, template="{question}")).what == "the prompt is empty"


def test_other_values_become_text_where_that_is_asked_for(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": "1+1=", "answer": 2, "tags": ["é", 1.0], "ok": True}])
    found = problem(Prompts(path))
    assert found.what == "column 'answer' is 2, which is not a string"
    assert found.fix.endswith("or Prompts(..., as_text=('answer',))")
    stage = Prompts(path, extra=("tags", "ok"), as_text=("answer", "tags", "ok"))
    assert draw(stage, [0]) == {"prompt": ["1+1="], "answer": ["2"], "tags": ['["é", 1.0]'], "ok": ["true"]}
    assert problem(Prompts(path, as_text=("answr", "answer"))).fix == "did you mean 'answer'?"
    path = write(tmp_path / "d.jsonl", [{"prompt": "1+1=", "answer": None}])
    assert problem(Prompts(path, as_text="answer")).what == "column 'answer' is null, which is not a string"


def test_no_answer(tmp_path):
    stage = Prompts(write(tmp_path / "d.jsonl", [{"prompt": "a"}]), answer=None)
    assert problems(stage) == []
    assert draw(stage, [0]) == {"prompt": ["a"]}
    found = problem(Prompts(Dataset(tmp_path / "d.jsonl", answer="b"), answer=None))
    assert "all rows have the same fields" in found.why


TALK = [{"role": "system", "content": "Be brief.", "name": None}, {"role": "user", "content": "1+1="}]


def test_a_conversation_is_written_beside_the_text_of_its_last_message(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": TALK, "answer": "2"}, {"prompt": "2+2=", "answer": "4"}])
    stage = Prompts(path, chat=True, system="Think.", shuffle=False)
    assert problems(stage) == []
    columns = draw(stage, [0, 1])
    assert [field.name for field in stage.writes] == list(columns) == ["prompt", "answer", "messages"]
    assert columns["prompt"] == ["1+1=", "2+2="]
    assert [json.loads(text) for text in columns["messages"]] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}],
        [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2="}],
    ]
    assert problem(Prompts(path)).fix == "write Prompts(..., chat=True)"
    templated = draw(Prompts(path, chat=True, template="Answer {answer}", shuffle=False), [1])
    assert json.loads(templated["messages"][0]) == [{"role": "user", "content": "Answer 4"}]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([], "column 'prompt' is [], which is not a list of messages"),
        (["hello"], "column 'prompt' has a message 0 whose role or content is not a string"),
        ([*TALK, {"role": "user"}], "column 'prompt' has a message 2 whose role or content is not a string"),
        ([{"role": "assistant", "content": "2"}], "column 'prompt' ends with a message of the assistant"),
        ([{"role": "user", "content": ""}], "column 'prompt' ends with an empty message"),
        ([{"role": "user", "content": "\ud800"}], "column 'prompt' has half of a surrogate pair in message 0"),
        (5, "column 'prompt' is 5, which is not a string"),
        ("", "column 'prompt' is empty"),
    ],
)
def test_what_is_no_conversation(tmp_path, value, what):
    path = write(tmp_path / "d.jsonl", [{"prompt": value, "answer": ""}])
    assert problem(Prompts(path, chat=True)).what == what


# Parquet and `datasets`


@pytest.fixture
def parquet(tmp_path):
    """A function that writes rows to a Parquet file in two row groups."""
    pa, pq = need("data", "pyarrow"), need("data", "pyarrow.parquet")

    def make(found, name="d.parquet"):
        pq.write_table(pa.Table.from_pylist(found), tmp_path / name, row_group_size=max(1, len(found) // 2))
        return tmp_path / name

    return make


def test_parquet_gives_what_jsonl_gives(tmp_path, parquet):
    nested = [{**NESTED, "question": f"{i}", "unread": b"\xff"} for i in range(7)]
    options = {"prompt": "question", "answer": "reward_model.ground_truth"}
    options["extra"] = (("extra_info.index", "index"), ("a.b", "dots"))
    lines = write(tmp_path / "d.jsonl", [{k: v for k, v in row.items() if k != "unread"} for row in nested])
    stages = [Prompts(path, **options) for path in (parquet(nested), lines)]
    assert [problems(stage) for stage in stages] == [[], []]
    first, second = (draw(stage, range(20), group_size=2) for stage in stages)
    assert first == second


@pytest.mark.parametrize(
    ("found", "options", "where", "what", "fix"),
    [
        (rows(3), {"prompt": "promt"}, "", "column 'promt' is missing", "did you mean 'prompt'?"),
        (rows(3), {"answer": "answer.text"}, "", "column 'answer.text' is missing", "did you mean 'answer'?"),
        (
            [NESTED],
            {"prompt": "question", "answer": "extra_info.idx"},
            "",
            "'extra_info.idx' is",
            "'extra_info.index'?",
        ),
        ([*rows(2), {"prompt": "a", "answer": None}], {}, "[2]", "column 'answer' is null", "as a string"),
        (
            [*rows(1), {"prompt": "", "answer": "b"}],
            {},
            "[1]",
            "column 'prompt' is empty",
            "write a prompt, or remove the row",
        ),
        ([{"prompt": "a", "answer": 2}], {}, "[0]", "column 'answer' is 2", "as_text=('answer',)"),
        ([{"prompt": TALK, "answer": "2"}], {}, "[0]", "column 'prompt' is a list of messages", "chat=True"),
    ],
)
def test_a_bad_row_of_parquet_is_named_before_and_during_the_run(parquet, found, options, where, what, fix):
    path = parquet(found)
    told = problem(Prompts(path, **options))
    assert told.where == f"{path}{where}"
    assert what in told.what and fix in told.fix
    with pytest.raises(StageError) as error:
        draw(Prompts(path, **options), [0])
    assert error.value.problems == (told,)


def test_every_row_of_parquet_is_read_before_the_first_step(parquet):
    path = parquet([*rows(2100), {"prompt": "a", "answer": None}])
    assert problems(Prompts(path)) == []
    with pytest.raises(StageError, match=r"d\.parquet\[2100\]: column 'answer' is null"):
        draw(Prompts(path), [0])


def test_a_file_that_is_no_parquet_and_one_without_rows(tmp_path, parquet):
    pa, pq = need("data", "pyarrow"), need("data", "pyarrow.parquet")
    path = write(tmp_path / "d.parquet", rows(1))
    assert problem(Prompts(path)).what.startswith("this is not a Parquet file")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), path)
    assert problem(Prompts(path)).what == "the file has no rows"
    write(tmp_path / "d.jsonl", rows(1))
    assert "Parquet files and others: d.jsonl, d.parquet" in problem(Prompts(tmp_path)).what


def test_messages_of_parquet(parquet):
    stage = Prompts(parquet([{"prompt": TALK, "answer": "2"}]), chat=True)
    assert problems(stage) == []
    assert json.loads(draw(stage, [0])["messages"][0])[0] == {"role": "system", "content": "Be brief."}


@pytest.fixture
def datasets():
    found = need("data", "datasets")
    found.disable_progress_bars()
    return found


def test_a_folder_that_datasets_saved(tmp_path, datasets):
    one = datasets.Dataset.from_list(rows(5))
    one.select([4, 0, 2]).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(tmp_path / "two")
    assert problems(Prompts(tmp_path / "one")) == []
    assert prompts(tmp_path / "one") == ["q4", "q0", "q2"]
    assert prompts(Dataset(tmp_path / "two", split="test")) == ["q0"]
    found = problem(Prompts(tmp_path / "two"))
    assert found.why == "its splits are train, test"
    assert found.fix == f"write Dataset('{tmp_path}/two', split='train')"
    assert problem(Prompts(Dataset(tmp_path / "one", split="train"))).fix == "leave out split="
    assert problem(Prompts(tmp_path / "one", answer="answr")).fix == "did you mean 'answer'?"
    bad = datasets.Dataset.from_list([*rows(2), {"prompt": "a", "answer": None}])
    bad.save_to_disk(tmp_path / "bad")
    with pytest.raises(StageError, match=r"bad\[2\]: column 'answer' is null"):
        draw(Prompts(tmp_path / "bad"), [0])


@pytest.fixture
def hub_cache(tmp_path, datasets, monkeypatch):
    """A `datasets` cache as left by a download of openai/gsm8k, with the network off."""
    import huggingface_hub

    folder = tmp_path / "gsm8k"
    folder.mkdir()
    write(folder / "train.jsonl", rows(4, "train"))
    write(folder / "test.jsonl", rows(2, "test"))
    cache = tmp_path / "cache"
    datasets.load_dataset(str(folder), cache_dir=str(cache))
    (cache / "gsm8k").rename(cache / "openai___gsm8k")
    monkeypatch.chdir(tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def test_a_data_set_of_the_hub(hub_cache):
    stage = Prompts(Dataset("openai/gsm8k", config="default", split="train"), shuffle=False)
    assert problems(stage) == []
    assert draw(stage, range(4))["prompt"] == ["train0", "train1", "train2", "train3"]
    assert prompts(Dataset("openai/gsm8k", split="train[1:3]")) == ["train1", "train2"]
    assert prompts(Dataset(hub_cache, config="default", split="test")) == ["test0", "test1"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Dataset("openai/gsm8k"), "no split of 'openai/gsm8k' is chosen; its splits are train, test"),
        (Dataset("openai/gsm8k", split="trian"), "openai/gsm8k: the data set cannot be loaded: Unknown split"),
        (Dataset("openai/gsm8k", config="mian", split="train"), "cannot be loaded: .* Available configs"),
        (Dataset("openai/gms8k", split="train"), "openai/gms8k: the data set cannot be loaded"),
        (Dataset("openai/gsm8k", split="train", prompt="question"), "column 'question' is missing; the data set has"),
    ],
)
def test_a_data_set_of_the_hub_that_cannot_be_read(hub_cache, dataset, message):
    with pytest.raises(StageError, match=message):
        draw(Prompts(dataset), [0])


def test_a_package_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.sources.dataset.find_spec", lambda name: None)
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    for source, package in (("openai/gsm8k", "datasets"), (tmp_path / "d.parquet", "pyarrow")):
        found = problem(Prompts(source))
        assert found.what == f"the package {package!r} is not installed"
        assert found.fix == "pip install 'sluice-rl[data]'"
    assert problems(Prompts(write(tmp_path / "d.jsonl", rows(1)))) == []


def test_descriptions_and_checks_load_no_reader(tmp_path):
    write(tmp_path / "d.jsonl", rows(1))
    code = f"""
import sys
from pipeline import Graph, Schedule
from stages import Prompts
from stages.sources import Dataset, Mixture
for source in (Mixture((Dataset("openai/gsm8k"), 1), (Dataset({str(tmp_path)!r}), 2)), "openai/gsm8k"):
    stage = Prompts(source)
    assert not list(stage.check(Graph(name="g", source=stage, stages=(), schedule=Schedule(steps=1))))
print([name for name in ("numpy", "torch", "pyarrow", "datasets", "huggingface_hub") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


# Order and mixtures


def test_the_order_is_that_of_the_seed_and_the_number_of_the_draw(tmp_path):
    path = write(tmp_path / "d.jsonl", rows(9))
    drawn = draw(Prompts(path, seed=5), range(30))["prompt"]
    assert drawn == [f"q{shuffled(5, admission, 9)}" for admission in range(30)]


def mixture(folder):
    return Mixture(
        (Dataset(write(folder / "a.jsonl", rows(7, "a")), name="easy"), 3),
        (
            Dataset(
                write(folder / "b.jsonl", [{"q": f"b{i}", "gold": ""} for i in range(4)]), prompt="q", answer="gold"
            ),
            1,
        ),
        (Generated(digits=2, held_out=30), 0.5),
    )


def test_a_mixture_draws_in_proportion_each_source_in_its_own_epochs(tmp_path):
    stage = Prompts(mixture(tmp_path))
    assert problems(stage) == []
    columns = draw(stage, range(90))
    names = columns["dataset"]
    easy, second, generated = "easy", str(tmp_path / "b.jsonl"), "reverse"
    for start in range(0, 90, 9):
        window = names[start : start + 9]
        assert [window.count(name) for name in (easy, second, generated)] == [6, 2, 1]
    of = {name: [p for p, n in zip(columns["prompt"], names) if n == name] for name in dict.fromkeys(names)}
    for name, count in ((easy, 7), (second, 4)):
        epochs = [of[name][i : i + count] for i in range(0, len(of[name]) // count * count, count)]
        assert all(len(set(epoch)) == count for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1
    assert of[generated] == [Generated(digits=2, held_out=30).train(i, order=_seed(2))[0] for i in range(10)]


def _seed(k):
    from stages.sources.draws import _NEXT_SEED

    return k * _NEXT_SEED % 2**64


def test_sources_of_one_length_are_not_shuffled_alike(tmp_path):
    parts = [(Dataset(write(tmp_path / f"{p}.jsonl", rows(20, p))), 1) for p in "ab"]
    drawn = draw(Prompts(Mixture(*parts)), range(40))["prompt"]
    orders = [[int(prompt[1:]) for prompt in drawn if prompt[0] == p] for p in "ab"]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_a_row_of_a_mixture_depends_on_its_admission_number_only(tmp_path):
    stage = Prompts(mixture(tmp_path), seed=3)
    together = draw(stage, range(50))
    order = random.Random(0).sample(range(50), 50)
    one_by_one = {admission: draw(stage, [admission]) for admission in order}
    for name, column in together.items():
        assert column == [one_by_one[admission][name][0] for admission in range(50)]


def test_another_process_gives_the_same_rows(tmp_path):
    here = draw(Prompts(mixture(tmp_path)), [40, 2, 17])
    code = (
        "import sys, json, pathlib\nfrom tests.unit.test_sources import *\n"
        "print(json.dumps(draw(Prompts(mixture(pathlib.Path(sys.argv[1]))), [40, 2, 17])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout or "null") == here, done.stderr


@settings(max_examples=few(60), deadline=None)
@given(st.lists(st.one_of(st.integers(1, 30), st.sampled_from([0.1, 0.25, 0.7, 1.5])), min_size=1, max_size=5))
def test_turns_are_exact_over_a_window_and_close_everywhere(weights):
    whose = turns(weights)
    window = len(whose.source)
    drawn = [0] * len(weights)
    for draw_number in range(2 * window + 1):
        for k, weight in enumerate(weights):
            share = draw_number * weight / sum(weights)
            bound = 1e-9 if draw_number % window == 0 else (1 + len(weights)) / 2
            assert abs(drawn[k] - share) <= bound
        k, rank = whose.at(draw_number)
        assert rank == drawn[k]
        drawn[k] += 1


def test_weights_without_a_short_window_are_rounded():
    whose = turns([0.123456789, 1])
    assert len(whose.source) == LONGEST_WINDOW
    assert whose.counts == (10989, 89011)


def test_a_problem_of_any_part_of_a_mixture(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}])
    good = write(tmp_path / "e.jsonl", rows(2))
    assert problem(Prompts(Mixture((str(good), 1), (str(path), 1)))).where == f"{path}:1"
    assert problem(Prompts(Mixture((Dataset(good, template="{}"), 1)))).what == "template='{}'"
    found = problem(Prompts(Mixture((Generated(), 1)), extra=("level",)))
    assert found.what == "a Generated task has no column 'level'"


def test_the_columns_of_a_data_set_go_before_those_of_the_stage(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"question": "1+1=", "solution": "2"}])
    own = Dataset(path, name="own", prompt="question", answer="solution")
    assert draw(Prompts(own, template="{no}"), [0]) == {"prompt": ["1+1="], "answer": ["2"], "dataset": ["own"]}
    own = Dataset(path, template="Q {question}")
    assert draw(Prompts(own, answer="solution"), [0]) == {"prompt": ["Q 1+1="], "answer": ["2"]}


def test_whatever_arrow_raises_when_it_opens_a_data_set_is_one_plain_error() -> None:
    pa = pytest.importorskip("pyarrow")
    from stages.sources import arrow

    def load() -> None:
        raise pa.lib.ArrowNotImplementedError("Integers with less than 8 bits not implemented")

    with pytest.raises(StageError, match="the data set cannot be loaded: Integers with less"):
        arrow._loaded("saved", load)
