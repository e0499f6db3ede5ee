"""The GSM8K recipe as a user runs it: on files of the same shape, and on the real ones if SLUICE_GSM8K is set."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest
import torch

from graphs.gsm8k import TINY_QWEN3, ArithmeticTool
from pipeline import Model, run
from stages import Call, End, Messages, Reply
from stages.backends.model.build import load_network, load_tokenizer, save
from tests.optional import need

torch.set_num_threads(1)
RECIPE = Path(__file__).resolve().parents[2] / "graphs" / "gsm8k.py"


def write(folder: Path, name: str, count: int) -> None:
    """Write a file in the shape of GSM8K's."""
    rows = [
        {
            "question": f"Ana\u2019s {name} box holds {i} pens at \u00a3{i % 7} each. How much is it?",
            "answer": f"It is {i}*{i % 7} = <<{i}*{i % 7}={i * (i % 7)}>>{i * (i % 7)} pounds.\n#### {i * (i % 7):,}",
        }
        for i in range(1, count + 1)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics_of(tmp_path: Path, folder: str, *flags: str) -> list[dict[str, float]]:
    need("math", "math_verify")
    argv = [str(RECIPE), "--data", folder, "--executor", "local", "--steps", "2", "--run-dir", str(tmp_path / "run")]
    argv += ["--prompts-per-step", "4", "--samples-per-prompt", "2", "--max-tokens", "8", "--evaluate-prompts", "6"]
    assert run.main([*argv, *flags]) == 0
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def check(lines: list[dict[str, float]], samples: Path) -> None:
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in (lines[0], lines[2]):
        assert line["eval/count"] == 6
        assert 0 <= line["eval/math_verify"] <= 1
        assert line["eval/math_verify_timeouts"] == 0
        assert "eval/exact_match" not in line
    for line in lines[1:]:
        assert line["train/updates"] + line["train/skipped"] == 4
        assert line["reward/math_verify_timeouts"] == line["reward/math_verify_errors"] == 0
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert all("\\boxed{}" in row["prompt"] and "####" in row["answer"] for row in rows)
    assert len({row["prompt"] for row in rows}) == len(rows) / 2


def test_two_steps_on_files_of_its_shape(tmp_path: Path) -> None:
    write(tmp_path, "train", 20)
    write(tmp_path, "test", 10)
    check(metrics_of(tmp_path, str(tmp_path), "--lr", "1e-3"), tmp_path / "run" / "samples" / "step_000001.jsonl")


TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_two_steps_with_a_calculator(tmp_path: Path) -> None:
    """On a folder with a chat template. The model is random and calls nothing."""
    write(tmp_path, "train", 20)
    write(tmp_path, "test", 10)
    model = Model("tiny", config=TINY_QWEN3, alphabet="bytes")
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TEMPLATE
    save(load_network(model, tokenizer, dtype=torch.float32, device=torch.device("cpu")), tokenizer, tmp_path / "model")
    check(
        metrics_of(tmp_path, str(tmp_path), "--lr", "1e-3", "--tool", "--model", str(tmp_path / "model")),
        tmp_path / "run" / "samples" / "step_000001.jsonl",
    )
    row = json.loads((tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert json.loads(row["conversation"])[0] == {"role": "user", "content": row["prompt"]} and row["end"] == "answered"


def test_the_calculator_answers_each_call() -> None:
    tool = ArithmeticTool()
    state, first = tool.open({"prompt": "48/2?"}, Random(0))
    assert first == [{"role": "user", "content": "48/2?"}] and tool.turn(state, Reply("24")) == End("answered")
    calls = (Call("calculate", {"expression": text}) for text in (" 48/2", "-(1,000 - 2.5) * 3", "10/4", "1e9 * 1e9"))
    answer = tool.turn(state, Reply("", tuple(calls)))
    assert answer == Messages([{"role": "tool", "content": text} for text in ("24", "-2992.5", "2.5", "1e+18")])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (Call("search", {"expression": "1"}), "only calculate"),
        (Call("calculate", None), "only calculate"),
        (Call("calculate", {"expression": 3}), "only calculate"),
        *((Call("calculate", {"expression": text}), says) for text, says in (
            ("1/0", "division by zero"), ("2**9", "numbers, "), ("print(1)", "numbers, "), ("1+", ": invalid syntax"),
            ("'a'*3", "numbers, "), ("1<2", "numbers, "), ("1+" * 150 + "1", "more than 200"), ("1e999", "too large"),
            ("9" * 150 + "*1e190", "too large"), ("0*1e999", "too large"),
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_calculated_is_said(call: Call, says: str) -> None:
    (said,) = ArithmeticTool().turn(None, Reply("", (call,))).said
    assert said["content"].startswith("error: ") and says in said["content"]


def test_two_steps_on_the_real_files(tmp_path: Path) -> None:
    folder = os.environ.get("SLUICE_GSM8K")
    if not folder:
        pytest.skip("SLUICE_GSM8K names no folder with GSM8K's train.jsonl and test.jsonl")
    check(metrics_of(tmp_path, folder), tmp_path / "run" / "samples" / "step_000001.jsonl")


def test_the_reward_reads_what_the_real_files_say() -> None:
    """Every answer of the real files is correct for itself, and wrong with one added."""
    need("math", "math_verify")
    folder = os.environ.get("SLUICE_GSM8K")
    if not folder:
        pytest.skip("SLUICE_GSM8K names no folder with GSM8K's train.jsonl and test.jsonl")
    from ops.rewards import MathVerify, final_number, gsm8k_match

    answers = [json.loads(line)["answer"] for line in (Path(folder) / "test.jsonl").read_text().splitlines()]
    numbers = [final_number(answer.rpartition("####")[2]) for answer in answers]
    right = [rf"So it is \boxed{{{number}}}." for number in numbers]
    wrong = [rf"So it is \boxed{{{number + 1}}}." for number in numbers]
    math = MathVerify(answer_after="####", timeout_s=30.0)
    assert math(right, answers) == [gsm8k_match(*pair) for pair in zip(right, answers)] == [1.0] * len(answers)
    assert math(wrong, answers) == [gsm8k_match(*pair) for pair in zip(wrong, answers)] == [0.0] * len(answers)


def test_a_folder_without_the_files_is_one_problem_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([str(RECIPE), "--data", str(tmp_path), "--check"]) == 2
    text = capsys.readouterr().err
    assert "train.jsonl" in text
    assert "test.jsonl" in text
