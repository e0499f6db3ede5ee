"""Files that a crash, a failing disk or another program has damaged: each reader reads them, or ends with one plain
error. It never ends in a traceback, and never takes endless time or memory.

Every test draws kinds of damage; see `damage.py`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipeline import Field, Model
from pipeline.data_plane.memory import MemoryPlane
from pipeline.data_plane.outside import Address, OutsideProcess
from pipeline.data_plane.signed import KEY_BYTES
from pipeline.data_plane.transfer_queue import Settings, TransferQueuePlane
from pipeline.errors import CheckpointError, DataPlaneError, GraphError, StageError
from pipeline.forward import Tail, describe
from pipeline.forwarders.step_times import LARGEST_S, StepTimes
from pipeline.record import checkpoint
from pipeline.rundir import RunDir
from pipeline.web import pages
from pipeline.web.offline import offline
from stages.backends.interface import Optimization
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.shards import Shards
from stages.backends.torch.optimize import TorchLearner
from stages.sources.dataset import Dataset
from stages.sources.draws import open_rows
from stages.sources.schema import Schema
from tests.errors.harness import DEF, LINES, TOP, command, graph_text, live_text
from tests.examples import few
from tests.optional import need
from tests.unit import tiny_graph
from tests.unit.damage import answered, bounded, damaged, damages
from tests.unit.test_model_files import in_two_files

pytestmark = pytest.mark.journal_expected  # damaged records
LOCAL = ("--executor", "local", "--run-dir", "run")


def examples(count: int) -> settings:
    """Return settings for this many examples. A failure is not made simpler: another seed is another damage."""
    return settings(
        max_examples=few(count),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph that trains a model, and its run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copyfile(tiny_graph.__file__, folder / "graph.py")
    assert command(folder, "graph.py", *LOCAL)[0] == 0
    return folder


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a graph without a model, its run of two steps, and the inputs of a task that failed."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "graph.py").write_text(live_text())
    assert command(folder, "graph.py", *LOCAL)[0] == 0
    (folder / "fails.py").write_text(
        live_text(score="def score(prompt: str, answer: str) -> float:\n    return 1 / 0\n\n\n")
    )
    assert command(folder, "fails.py", "--executor", "local", "--run-dir", "failed")[0] == 3
    return folder


RECORD = ("plan.json", "events.jsonl", "metrics.jsonl", "run.json", "samples/step_000001.jsonl")
COMMANDS = (
    ("analyse", "run", "--json"),
    ("analyse", "run"),
    ("analyse", "run", "--compare", "run"),
    ("simulate", "run", "--steps", "3"),
    ("export", "run", "--perfetto", "trace.json", "--csv", "tables"),
    ("export", "run", "--samples", "samples.pt"),
    ("run", "--list", "."),
)


@examples(80)
@given(st.sampled_from(RECORD), st.sampled_from(COMMANDS), damages())
def test_the_record_of_a_run(trained: Path, name: str, words: tuple[str, ...], how: tuple[str, int]) -> None:
    with damaged(trained / "run" / name, how):
        answered(trained, *words[1:], program=words[0])


@examples(40)
@given(
    st.sampled_from((*RECORD, "samples/vocabulary.json")), st.sampled_from([*pages.PAGES, "runs", "offline"]), damages()
)
def test_the_pages_of_the_view(trained: Path, name: str, page: str, how: tuple[str, int]) -> None:
    pages._KEPT._made.clear()
    run = trained / "run"
    with damaged(run / name, how), bounded():
        try:
            if page == "offline":
                "".join(offline(run))
            else:
                made = pages.runs(trained) if page == "runs" else pages.PAGES[page](run, {"step": "0", "other": "run"})
                msgspec.json.encode(made)
        except GraphError as error:
            assert error.problems


def test_a_record_with_a_time_that_cannot_be_gives_no_advice(trained: Path) -> None:
    events = trained / "run" / "events.jsonl"
    before = events.read_bytes()
    lines = [json.loads(line) for line in before.splitlines()]
    damaged = next(line for line in lines if line["type"] == "ran" and line["stage"] == "prompts" and line["step"])
    damaged["start_s"] = 1.5e308
    try:
        events.write_text("".join(json.dumps(line) + "\n" for line in lines))
        pages._KEPT._made.clear()
        found = pages.PAGES["advice"](trained / "run", {})
    finally:
        events.write_bytes(before)
    assert not found["hints"] and "a line of type 'ran' has the times [1.5e+308, " in found["notes"][0]


@examples(20)
@given(st.sampled_from(("metrics.jsonl", "run.json", "events.jsonl")), damages())
def test_what_is_forwarded(trained: Path, name: str, how: tuple[str, int]) -> None:
    with damaged(trained / "run" / name, how), bounded():
        try:
            describe(trained / "run")
            lines, times = Tail(RunDir(trained / "run").metrics).lines(), StepTimes(RunDir(trained / "run").events)
            for at_s, line in times.of(lines, last=True):
                assert isinstance(line["step"], int) and 0.0 <= at_s <= LARGEST_S
        except GraphError as error:
            assert error.problems


@examples(24)
@given(
    st.sampled_from(
        ("run.json", "plan.json", "metrics.jsonl", "events.jsonl", "lock", "checkpoints/step_000002/manifest.json",
         "checkpoints/step_000002/count/count.json")
    ),
    damages(),
)  # fmt: skip
def test_a_resume(counted: Path, tmp_path_factory: pytest.TempPathFactory, name: str, how: tuple[str, int]) -> None:
    folder = tmp_path_factory.mktemp("resume")
    shutil.copytree(counted, folder, dirs_exist_ok=True)
    with damaged(folder / "run" / name, how):
        answered(folder, "graph.py", *LOCAL, "--resume", "--steps", "3")
    shutil.rmtree(folder)


@examples(10)
@given(st.sampled_from(("task.json", "columns.json", "columns.safetensors")), damages())
def test_a_replay(counted: Path, name: str, how: tuple[str, int]) -> None:
    (folder,) = (counted / "failed" / "failures").iterdir()
    with damaged(folder / name, how):
        assert answered(counted, "fails.py", "--replay", str(folder))[0]


def signed(folder: Path) -> None:
    """Let the manifest of a checkpoint have the sizes and hashes of its files."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for name in manifest["files"]:
        with suppress(OSError):
            text = (folder / name).read_bytes() if (folder / name).is_file() else b""
            manifest["files"][name] = {"size_bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


MODEL_FILES = ("train/model/tensors.json", "train/model/config.json", "train/weights.safetensors", "manifest.json")


@examples(20)
@given(st.sampled_from(MODEL_FILES), damages(), st.booleans())
def test_the_model_of_a_checkpoint(trained: Path, name: str, how: tuple[str, int], sign: bool) -> None:
    folder = trained / "run" / "checkpoints" / "step_000002"
    before = (folder / "manifest.json").read_bytes()
    try:
        with damaged(folder / name, how):
            if sign and name != "manifest.json":
                signed(folder)
            answered(trained, "run", "--model", "model", program="export")
            answered(trained, "run", "--model", "model2", "--step", "2", program="export")
    finally:
        (folder / "manifest.json").write_bytes(before)
        shutil.rmtree(trained / "model", ignore_errors=True)
        shutil.rmtree(trained / "model2", ignore_errors=True)


@pytest.fixture(scope="module")
def learner():
    """A learner of the torch backend, for the model of the tiny graph."""
    (model,) = {stage.model for stage in tiny_graph.graph().stages if stage.name == "train"}
    network = load_network(model, load_tokenizer(model), dtype=torch.float32, device=torch.device("cpu"))
    return TorchLearner(network, Optimization(lr=1e-2), pad=0)


@examples(30)
@given(st.sampled_from(("learner.json", "weights.safetensors", "optimizer.safetensors")), damages())
def test_the_state_of_a_learner(trained: Path, learner: TorchLearner, name: str, how: tuple[str, int]) -> None:
    folder = trained / "run" / "checkpoints" / "step_000002" / "train"
    with damaged(folder / name, how), bounded():
        try:
            learner.restore(folder)
            assert learner.updates >= 0
        except (CheckpointError, StageError) as error:
            assert error.problems


@pytest.fixture(scope="module")
def model(trained: Path) -> Path:
    """The folder of a model, and of the same one in two files with an index; a graph names each."""
    assert command(trained, "run", "--model", "exported", program="export")[0] == 0
    indexed = trained / "indexed"
    shutil.copytree(trained / "exported", indexed)
    in_two_files(indexed)
    for name in ("exported", "indexed"):
        (trained / f"{name}.py").write_text(graph_text(TOP, DEF, LINES | {"policy": f'Model("{name}")'}))
        assert command(trained, f"{name}.py", "--check")[0] == 0
    return trained


@examples(10)
@given(
    st.sampled_from(("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json",
                     "model-1.safetensors", "generation_config.json")),
    damages(),
)  # fmt: skip
def test_the_folder_of_a_model(model: Path, name: str, how: tuple[str, int]) -> None:
    declared = Model(str(model / "indexed"))
    with damaged(model / "indexed" / name, how):
        answered(model, "indexed.py", "--check")
        for load in (lambda: load_network(declared, load_tokenizer(declared), **ON_CPU), lambda: all_boxes(model)):
            try:
                with bounded():
                    load()
            except StageError as error:
                assert error.problems


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_a_pipe_in_the_folder_of_a_model_is_not_waited_for(model: Path, name: str) -> None:
    with damaged(model / "indexed" / name, ("pipe", 0)):
        assert answered(model, "indexed.py", "--check")[0] == 2


ON_CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


def all_boxes(folder: Path) -> None:
    shards = Shards(folder / "indexed")
    for name in shards.files:
        shards.box(name, (1,), (slice(0, 1),))


ROWS = [{"prompt": f"r{n}>", "answer": str(n + 1), "level": {"is": n}} for n in range(30)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same rows in every form, and a graph for each."""
    datasets = need("data", "datasets")

    folder = tmp_path_factory.mktemp("data")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(folder / "rows.parquet")
    datasets.DatasetDict({"train": made}).save_to_disk(folder / "saved")
    for name in ("rows.jsonl", "rows.parquet", "saved"):
        source = f'Prompts("{name}", batch=batch, extra=("level.is",), as_text=("level.is",))'
        (folder / f"{name}.py").write_text(graph_text(TOP, DEF, LINES | {"source": source, "task": TASK}))
        assert command(folder, f"{name}.py", "--check")[::2] == (0, "")
    return folder


TASK = 'Generated("reverse", digits=2, held_out=20)'
DATA_FILES = {
    "rows.jsonl": "rows.jsonl",
    "rows.parquet": "rows.parquet",
    "saved/dataset_dict.json": "saved",
    "saved/train/dataset_info.json": "saved",
    "saved/train/state.json": "saved",
    "saved/train/data-00000-of-00001.arrow": "saved",
}


@examples(24)
@given(st.sampled_from([*DATA_FILES]), damages())
def test_a_data_set(data: Path, name: str, how: tuple[str, int]) -> None:
    source = DATA_FILES[name]
    with damaged(data / name, how):
        answered(data, f"{source}.py", "--check")
        try:
            with bounded():
                rows = open_rows(Dataset(str(data / source)), Schema())
                assert all(isinstance(value, str) for i in (0, len(rows) - 1) for value in rows[i])
        except StageError as error:
            assert error.problems


@examples(20)
@given(damages())
def test_a_graph_file(counted: Path, how: tuple[str, int]) -> None:
    with damaged(counted / "graph.py", how):
        answered(counted, "graph.py", "--check")


SPELLED = """
--steps --batch --seed --check --plan --gpus --executor --run-dir --resume --replay --list --deadline-s -- - -1 local
--restarts --storage-units --address nan inf -inf 1e999 1e-999 0x10 1_0 \u0663 run 3 last --steps= --no-steps --steps=2
--batch=4 graph.py fails.py .. --help= ++steps steps=3 +a.b=c a.b.c=[1,2] {}
"""
WORDS = st.one_of(
    st.sampled_from(SPELLED.split()),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
    st.integers(1, 5000).map(lambda n: "9" * n),
)


@examples(50)
@given(st.lists(WORDS, max_size=5), st.sampled_from(("run", "simulate")))
def test_the_command_line(counted: Path, words: list[str], program: str) -> None:
    last = "--check" if program == "run" else "--steps=2"
    answered(counted, "graph.py", *(word for word in words if "\0" not in word), last, program=program)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with data_plane.json."""
    score, text = Field("score", dtype="float32"), Field("text", dtype="str")
    ports = {"request_handle_socket": 1, "put_get_socket": 2}
    settings = Settings(("c", "127.0.0.1", ports), (("s", "127.0.0.1", ports),), 5.0, 1000, bytes(KEY_BYTES))
    made = Address(
        partition="p", group_size=2, fields=(text, score), readers=("train",), parts={"p": ("text", "score")},
        outside={"labels": ("score",)}, reads={"labels": ("text",)}, settings=settings,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("address")
    (folder / "data_plane.json").write_bytes(msgspec.json.encode(made))
    return folder


@examples(40)
@given(damages())
def test_where_the_data_plane_is(address: Path, how: tuple[str, int]) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        damaged(address / "data_plane.json", how),
        bounded(),
    ):
        patch.setattr(TransferQueuePlane, "attach", lambda settings: MemoryPlane())
        try:
            OutsideProcess(address).close()
        except DataPlaneError as error:
            assert error.problems


def test_a_checkpoint_of_another_step_is_refused(trained: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    shutil.copytree(trained / "run" / "checkpoints" / "step_000001", run.checkpoint(7))
    with pytest.raises(CheckpointError, match="it is of step 1; a checkpoint's folder has the name of its step"):
        checkpoint.read(run)
