"""What is chosen for GPUs that are named: the fastest choice that fits, never a flag that is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.gpu.shapes import SHAPES
from pipeline import GraphError, run, simulate
from pipeline.cli import choice
from pipeline.cli.choice import Chosen, choose, print_choice
from pipeline.cli.load import load
from pipeline.declare.interpreter import elsewhere
from pipeline.foretell import bounds
from pipeline.foretell.forecast import forecast
from pipeline.foretell.gpu import asked
from pipeline.foretell.loads import Assumed
from pipeline.plan.planner import plan
from stages.backends import is_installed
from tests.optional import required

REPOSITORY = Path(__file__).resolve().parents[2]
OWN = """
from benchmarks.gpu.shapes import SHAPES
from tests.unit.test_foretold import described

def choices(gpus: int):
    {choices}

def graph(row: int = 8192, trainers: int = 1):
    return described(row=row, gpus=trainers, batch=128, colocated=True)
"""

EVALUATED = """
from dataclasses import replace
from stages import Evaluate, Generated
from tests.unit.test_foretold import described

def graph():
    made = described(batch=128, colocated=True)
    policy, sampler = made.stages[0].model, made.stages[0].on
    evaluate = Evaluate(policy, Generated(), on=sampler, every=10, max_tokens=1024)
    return replace(made, stages=(*made.stages, evaluate))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the configs of three models, and a data set."""
    monkeypatch.chdir(tmp_path)
    for name in ("0.6B", "4B", "8B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPES[name]))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def chosen(path: Path, gpus: str = "h200:1", **given: object) -> Chosen:
    file = load(path)
    values = {flag.name: flag.default for flag in file.flags} | given
    with elsewhere():
        return choose(file, values, given, asked(gpus), Assumed())


def grpo(gpus: str = "h200:1", **given: object) -> Chosen:
    return chosen(REPOSITORY / "graphs" / "grpo.py", gpus, **given)


def own(folder: Path, choices: str) -> Path:
    path = folder / "own.py"
    path.write_text(OWN.format(choices=choices))
    return path


def test_one_gpu_is_shared_and_rows_are_as_long_as_pays(folder):
    small, large = grpo(model="0.6B"), grpo(model="4B")
    for found in (small, large):
        assert found.values["colocated"] and found.values["sampler_gpus"] == found.values["learner_gpus"] == 1
        assert (found.values["generator"], found.values["trainer"]) == ("vllm", "megatron")
    assert large.values["microbatch"] == 12288
    longer = [one for one in large.tried[6:] if one.values["recompute"] == "none"]
    assert longer and all(one.why.startswith("worker group 'learner' needs") for one in longer)
    assert large.values["recompute"] == "none", "nothing is computed again where that fits"
    assert large.values["sampler_memory"] == 0.5, "with more, the trainer's moments would move to the host and back"
    assert small.values["microbatch"] > large.values["microbatch"]


def test_the_choice_is_the_fastest_that_was_tried(folder):
    found = grpo("h200:2", model="0.6B")
    assert len(found.tried) == 4 * (11 + 2 * 6)
    fits = [one for one in found.tried if not one.why]
    assert found.best is not None and found.best.step_s <= 1.01 * min(one.step_s for one in fits)
    assert found.best.values.items() <= found.values.items()


def test_what_needs_too_much_memory_is_computed_again(folder):
    """Rows hold the longest samples, whose activations fit only then."""
    (folder / "0.6B" / "config.json").write_text(json.dumps(SHAPES["0.6B"] | {"max_position_embeddings": 131072}))
    found = grpo(model="0.6B", max_tokens=65536, prompts_per_step=4, samples_per_prompt=2)
    assert found.values["recompute"] == "mlp" and found.values["microbatch"] == 69632
    larger = grpo(model="4B", max_tokens=16384, prompts_per_step=4, samples_per_prompt=2)
    assert larger.values["recompute"] == "mlp" and larger.values["microbatch"] == 20480


def test_a_change_that_applies_to_no_choice_says_so(folder, capsys):
    """Not that the first choice is too large."""
    flags = [str(REPOSITORY / "graphs" / "grpo.py"), "--model", "4B", "--on", "h200:1"]
    for stage, says in (("nosuch=3", "nosuch"), ("reward=nan", "reward=nan")):
        assert simulate.main([*flags, "--stage", stage]) == 2
        assert says in capsys.readouterr().err


def test_a_batch_of_nothing_is_not_the_recipes_fault(folder, capsys):
    flags = [str(REPOSITORY / "graphs" / "grpo.py"), "--model", "0.6B", "--on", "h200:1"]
    assert simulate.main([*flags, "--prompts-per-step", "0"]) == 2
    err = capsys.readouterr().err
    assert "batch=0" in err and "choices()" not in err


def test_any_number_of_prompts_has_a_choice(folder):
    found = grpo("h200:7", model="0.6B", prompts_per_step=31, minibatches=1, microbatch=8192, recompute="none")
    assert (found.values["sampler_gpus"], found.values["learner_gpus"]) == (1, 1)


@pytest.mark.parametrize(
    "given", [{}, {"max_staleness": 1, "colocated": False}, {"minibatches": 1, "colocated": False}]
)
def test_no_step_is_faster_than_the_least_seconds(folder, monkeypatch, given):
    """Choices that cannot be faster are left out by them. Here none is, and all are simulated too."""
    least: list[float] = []

    def kept(*arguments):
        least.append(bounds.least_s(*arguments))
        return 0.0

    monkeypatch.setattr(choice, "least_s", kept)
    found = grpo("h200:2", model="0.6B", microbatch=8192, recompute="none", **given)
    steps = [one.step_s for one in found.tried if not one.why]
    assert len(steps) == len(least) and all(0 < low <= step_s for low, step_s in zip(least, steps))


def test_a_stage_that_runs_now_and_then_does_not_count_as_a_part_of_each_step(folder):
    """An evaluation on the sampler's GPU, every 10 steps."""
    path = folder / "evaluated.py"
    path.write_text(EVALUATED)
    graph = load(path).build({})
    with elsewhere():
        planned = plan(graph, gpus=1)[0]
        made = forecast(graph, planned, asked("h200:1").gpu, Assumed())
        without = replace(planned, stages=tuple(stage for stage in planned.stages if stage.name != "evaluate"))
    durations = made.recording.durations
    assert "evaluate" in durations.stages
    assert 0 < bounds.least_s(planned, durations) <= bounds.least_s(without, durations)


def test_many_gpus_are_divided_in_a_few_ways():
    choices = load(REPOSITORY / "graphs" / "grpo.py").beside("choices")
    assert choices is not None
    made = list(choices(64, prompts_per_step=512))
    assert len(made) == 23 * 13 and {one["sampler_gpus"] + one["learner_gpus"] for one in made} == {2, 40, 48, 64, 128}
    assert max(len(list(choices(gpus, prompts_per_step=512))) for gpus in range(1, 1025)) <= choice.MOST


@pytest.mark.parametrize("gpus", [3, 5, 7, 24, 1024])
def test_gpus_stay_free_where_their_number_does_not_divide_the_batch(folder, gpus):
    found = grpo(f"h200:{gpus}", model="0.6B", microbatch=16384, recompute="none")
    used = found.values["sampler_gpus"] + (0 if found.values["colocated"] else found.values["learner_gpus"])
    assert min(gpus, 64) / 2 <= used <= gpus, "32 prompts keep 64 GPUs busy at most"


def test_an_adapter_needs_room_for_its_own_gradients_only(folder):
    with pytest.raises(GraphError, match="worker group 'learner' needs"):
        grpo(model="8B", microbatch=8192)
    adapter = grpo(model="8B", microbatch=8192, lora_rank=16)
    assert adapter.best is not None and adapter.best.step_s > 0


def test_a_flag_that_is_given_stays(folder):
    found = grpo("h200:2", model="0.6B", colocated=False, microbatch=10000)
    assert found.values["microbatch"] == 10000 and not found.values["colocated"]
    assert all("microbatch" not in one.values and "colocated" not in one.values for one in found.tried)


def test_a_step_ahead_is_never_chosen_in_turns(folder):
    found = grpo("h200:2", model="0.6B", max_staleness=1, microbatch=8192)
    assert not found.values["colocated"]
    assert any("has colocated=" in one.why for one in found.tried)


def test_without_times_the_first_that_fits_is_taken(folder):
    found = grpo(model="0.6B", generator="torch")
    assert found.best == found.tried[0] and found.best.tokens_per_s == 0


def test_a_partial_graph_has_the_choices_of_its_own_module(folder):
    path = REPOSITORY / "graphs" / "grpo_async.py"
    assert chosen(path, "h200:2", model="0.6B", microbatch=8192).values["sampler_gpus"] == 1


def test_a_file_that_imports_its_graph_may_have_choices_of_its_own(folder):
    path = folder / "own.py"
    path.write_text("from graphs.grpo import graph\n\n\ndef choices(gpus):\n    yield {'microbatch': 9000}\n")
    found = chosen(path, "h200:2", model="0.6B", generator="vllm", trainer="megatron", sampler_gpus=1, learner_gpus=1)
    assert [one.values for one in found.tried] == [{"microbatch": 9000}]


def test_word_problems_share_one_gpu_too(folder):
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"question": "1+1?", "answer": "1+1 #### 2"}\n')
    found = chosen(REPOSITORY / "graphs" / "gsm8k.py", model="0.6B", data=str(folder), microbatch=16384)
    assert found.values["colocated"] and found.values["sampler_gpus"] == 1 and not found.best.why
    graph = load(REPOSITORY / "graphs" / "gsm8k.py").build(found.values)
    assert "prev_logprobs" not in [stage.name for stage in graph.stages], "nothing is scored in advance"


def test_a_graph_without_choices_keeps_its_defaults(folder):
    path = folder / "bare.py"
    path.write_text(OWN.format(choices="pass").replace("def choices", "def _choices"))
    assert chosen(path, "h200:2") == Chosen(values={"row": 8192, "trainers": 1})


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ("yield {'rows': 1}", "choices() yielded {'rows': 1}"),
        ("yield 3", "choices() yielded 3"),
        ("raise KeyError('gpu')", "choices() raised KeyError"),
        ("return None", "choices() returned None"),
        ("yield from ({'row': 8192 + n} for n in range(501))", "choices() yielded more than 500 choices"),
    ],
)
def test_choices_that_are_none_get_one_clear_error(folder, choices, says):
    with pytest.raises(GraphError) as raised:
        chosen(own(folder, choices))
    assert len(raised.value.problems) == 1 and says in raised.value.problems[0].what


def test_values_that_cannot_be_compared_are_not(folder):
    several = "import numpy\n    yield {'row': numpy.array([1, 2])}\n    yield {'row': numpy.array([1, 2])}"
    with pytest.raises(GraphError):
        chosen(own(folder, several))


def test_if_no_choice_can_be_the_first_one_says_why(folder):
    with pytest.raises(GraphError, match="4 GPUs; that group has 1"):
        chosen(own(folder, "yield {'trainers': 4}\n    yield {'trainers': 5}"))


def test_if_no_choice_can_be_the_one_with_the_least_wrong_says_why(folder):
    """The first choice of a graph that runs ahead takes turns, which is wrong too."""
    with pytest.raises(GraphError) as raised:
        grpo("h200:2", model="0.6B", max_staleness=1, microbatch=8192, data="missing.jsonl")
    (problem,) = raised.value.problems
    assert "missing.jsonl" in problem.what


def test_if_every_choice_is_too_large_it_says_so(folder):
    with pytest.raises(GraphError, match="'learner' needs"):
        grpo("h100:1", model="4B", max_tokens=16000)  # the first choice has rows that are too short for a sample


def test_a_graph_without_gpus_is_not_foretold(folder):
    with pytest.raises(GraphError, match="no worker group of 'grpo' has GPUs"):
        grpo("h100:1", model="0.6B", sampler_gpus=0, learner_gpus=0, colocated=False)


def test_the_commands_print_what_they_choose(folder, capsys):
    flags = [str(REPOSITORY / "graphs" / "grpo.py"), "--on", "h200:2", "--model", "0.6B", "--microbatch", "8192"]
    assert run.main([*flags, "--plan", "--no-colocated"]) == 0
    planned = capsys.readouterr().out
    line = next(line for line in planned.splitlines() if line.startswith("chosen for h200:2"))
    assert "--generator vllm --trainer megatron" in line and "tried" not in planned
    assert simulate.main([*flags, "--steps", "3"]) == 0
    simulated = capsys.readouterr().out
    assert "chosen for h200:2" in simulated and "s/step" in simulated
    assert simulate.main([*flags, "--steps", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["trainer"] == "megatron"


def test_a_run_that_does_not_fit_is_refused_before_it_starts(folder, capsys):
    for part, package in (("vllm", "vllm"), ("megatron", "megatron.core")):
        if not is_installed(package):
            required(part, package)
    path = own(folder, "yield {}")
    assert run.main([str(path), "--on", "h200:1", "--row", "400000"]) == 2
    assert "Fix: microbatch=Packed(tokens=" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_the_table_has_every_flag_in_which_choices_differ(folder, capsys):
    found = chosen(own(folder, "yield {'row': 8192}\n    yield {'row': 8192, 'trainers': 4}"))
    print_choice(found, asked("h200:1"), whole=True)
    rows = [line for line in capsys.readouterr().out.splitlines() if "GPUs" in line or "GiB" in line]
    assert len(rows) == 2 and "--trainers 4" in rows[1] and "--row" not in rows[1]


def test_a_long_search_says_what_it_does(folder, capsys, monkeypatch):
    monkeypatch.setattr(choice, "SLOW_S", 0.0)
    chosen(own(folder, "yield {'row': 8192}\n    yield {'row': 16384}"))
    assert capsys.readouterr().err == "comparing 2 choices for h200:1; 0 took 0 s\n"


def test_nothing_is_printed_if_nothing_was_open(capsys):
    print_choice(Chosen(values={}), asked("h200:1"), whole=True)
    assert capsys.readouterr().out == ""
