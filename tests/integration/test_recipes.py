"""The recipes as a user runs them: by the command, on a Hugging Face folder and a JSONL file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graphs import quickstart
from graphs.tool import Calculator
from ops.sandbox import Sandbox, SandboxError
from pipeline import Model, run
from stages import End, Messages, Reply
from stages.backends.model.build import load_network, load_tokenizer, save
from tests.optional import need

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model_folder(tmp_path):
    """A tiny random Qwen3 with its tokenizer, saved as by transformers."""
    said = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    alphabet = "0123456789 +=?abcdefghijklmnopqrstuvwxyz"
    model = Model("tiny", config=quickstart.TINY_QWEN3, alphabet=alphabet, chat_template=said)
    tokenizer = load_tokenizer(model)
    network = load_network(model, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    save(network, tokenizer, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(("trainer", "chat"), [("torch", True), ("megatron", False)])
def test_grpo_trains_a_folder_on_a_file(tmp_path, model_folder, capfd, trainer, chat):
    if trainer == "megatron":
        need("megatron", "megatron.core")
    data = tmp_path / "train.jsonl"
    rows = [{"prompt": f"what is {i} + {i} ?", "answer": str(2 * i), "source": "made"} for i in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [str(ROOT / "graphs" / "grpo.py"), "--model", str(model_folder), "--data", str(data)]
    argv += ["--executor", "local", "--steps", "2", "--prompts-per-step", "4", "--samples-per-prompt", "4"]
    argv += ["--max-tokens", "6", "--lr", "1e-3", "--run-dir", str(tmp_path / "run"), "--trainer", trainer]
    argv += ["--microbatch", "64", *(["--chat"] if chat else [])]
    try:
        code = run.main(argv)
    finally:
        if trainer == "megatron":  # its groups are global to the process, which other tests share
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    told = capfd.readouterr()
    assert code == 0 and "Loading weights" not in told.out + told.err, told.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["train/updates"] + line["train/skipped"] == 4 for line in lines[1:])
    assert lines[1]["train/kl"] >= 0
    assert lines[2]["train/staleness_max"] == 0
    for stage in ("prev_logprobs", "ref_logprobs", "train"):
        assert 0 <= lines[1][f"{stage}/padding"] < 0.2
        assert lines[1][f"{stage}/imbalance"] == 1.0
    samples = [
        json.loads(line) for line in (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 16
    edges = json.loads((tmp_path / "run" / "plan.json").read_text())["edges"]
    (read,) = [edge["field"] for edge in edges if edge["reader"] == "rollout" and edge["writer"] == "prompts"]
    assert read == ("messages" if chat else "prompt")
    assert {(row["prompt"], row["answer"]) for row in samples} <= {(row["prompt"], row["answer"]) for row in rows}


def lines_of(tmp_path: Path, recipe: str, *flags: str) -> list[dict[str, float]]:
    folder = tmp_path / recipe
    argv = [str(ROOT / "graphs" / f"{recipe}.py"), "--executor", "local", "--run-dir", str(folder)]
    assert run.main([*argv, *flags]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_calculator_takes_calls_only():
    calculator = Calculator()
    state, first = calculator.open({"prompt": "m37*48>"}, None)
    assert first == "m37*48>" and calculator.turn(state, Reply("m37*48=")) == Messages("1776>")
    for text in ("1776", "37*48=", "m37*4=", "m37*48>", "m37*48=1", ""):
        assert calculator.turn(state, Reply(text)) == End("answered"), text


def test_a_tiny_model_learns_to_call_the_calculator(tmp_path):
    """Before, it calls it in few episodes, and in none with its most probable tokens."""
    flags = [
        "--steps",
        "14",
        "--evaluate-every",
        "14",
        "--prompts-per-step",
        "16",
        "--lr",
        "2e-3",
        "--warm-start-steps",
        "100",
    ]
    first, *_, last = lines_of(tmp_path, "tool", *flags)
    assert first["eval/exact_match"] < 0.2 and last["eval/exact_match"] > 0.7


def test_programs_are_written_and_tested(tmp_path):
    try:
        Sandbox()
    except SandboxError as error:
        pytest.skip(str(error))
    flags = ["--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "4", "--evaluate-prompts", "3"]
    lines = lines_of(tmp_path, "code", *flags, "--warm-start-steps", "60", "--warm-start-right", "0.5", "--lr", "0")
    assert [line["step"] for line in lines] == [0, 1]
    text = (tmp_path / "code" / "samples" / "step_000001.jsonl").read_text()
    rewards = {True: set(), False: set()}
    for row in map(json.loads, text.splitlines()):
        a, b, c = row["prompt"][1:-1]
        rewards[row["response"] == f"({a}*x+{b})*x+{c}"].add(row["reward"])
    assert rewards[True] == {1.0} and min(rewards[False]) == 0.0
    assert lines[1]["reward/passes_tests_deadlines"] == 0.0 <= lines[1]["reward/passes_tests_failures"] < 1.0
    assert 0.0 <= lines[1]["eval/passes_tests"] <= 1.0


def test_an_agent_trains_the_model_that_it_talks_to(tmp_path):
    flags = ["--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2"]
    lines = lines_of(tmp_path, "harness", *flags)
    assert [line["step"] for line in lines] == [0, 1] and lines[1]["endpoint/turns"] == 2
    rows = (tmp_path / "harness" / "samples" / "step_000001.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        asked, said, back, last = [message["content"] for message in json.loads(row["conversation"])]
        assert asked == row["prompt"] == f"r{row['answer'][::-1]}>" and back == f"r{row['answer']}>"
        replies = [text.replace("<eos>", "").replace("<pad>", "") for text in (said, last)]
        right = sum(sum(map(str.__eq__, *pair)) for pair in zip(replies, (row["answer"], row["answer"][::-1])))
        assert row["reward"] == pytest.approx(right / 6)
