"""GSM8K with a calculator on one GPU: `graphs/gsm8k.py --tool` as it comes, with a small model that calls its tool.

python -m benchmarks.gpu.calculator --data FOLDER [--taught-s 90] [--steps 30] [--prompts 32] [--samples 8]
                                    [--lr 1e-5] [--taught FOLDER] [--only teach] [--cpu] [--out FILE]

No trained weights are needed: a model of 89 M parameters begins at random and learns the solutions of train.jsonl for
`--taught-s` seconds, next token by next token. The notes `<<48/2=24>>` that they have for a calculator become calls of
the tool, and what follows them its answers, in the same chat that the recipe writes. It remembers more than it
calculates, so its held-out score stays low. Then the recipe trains it: vLLM and Megatron-core in turns on the GPU. The
table has the mean reward of the first and the last five steps, turns and calls per episode, and the held-out score
before and after. `--taught` keeps the model in a folder, or takes the one that is there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.report import report
from graphs.gsm8k import TEMPLATE, ArithmeticTool, calculated
from pipeline.rundir import RunDir

NOTE = re.compile(r"<<(.+?)=.+?>>")
CLOSE, OPEN, IGNORED = "<|im_end|>", "<|im_start|>", -100
CHAT = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY, SMALL_VOCABULARY = 8192, 512
LARGE = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
LONGEST, LR, WARM, TOKENS = 1024, 1e-3, 50, 65536  # of an example; peak learning rate, its steps; tokens per update
LAST = 5  # steps whose mean reward is shown


def chat_of(row: Mapping[str, str]) -> list[dict[str, str]]:
    """A solution as a chat: each note of a calculator is a call, and its value the tool's answer."""
    steps, _, answer = row["answer"].partition("####")
    chat, at = [{"role": "user", "content": TEMPLATE.format(question=row["question"])}], 0
    for note in NOTE.finditer(steps):
        try:
            value = f"{calculated(note[1]):.10g}"
        except (ValueError, SyntaxError, ArithmeticError):
            continue
        call = json.dumps({"name": "calculate", "arguments": {"expression": note[1]}})
        chat.append({"role": "assistant", "content": f"{steps[at : note.start()]}<tool_call>{call}</tool_call>"})
        chat.append({"role": "tool", "content": value})
        at = note.end()
    return [*chat, {"role": "assistant", "content": f"{steps[at:].strip()}\n\\boxed{{{answer.strip()}}}"}]


def tokenizer_of(rows: Sequence[Mapping[str, str]], size: int) -> Any:
    """A byte-level tokenizer of these texts, with the chat's template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[CLOSE, OPEN], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = (message["content"] for row in rows for message in chat_of(row))
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=CLOSE, pad_token=CLOSE, chat_template=CHAT, clean_up_tokenization_spaces=False
    )


def example_of(tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> tuple[list[int], list[int]]:
    """The tokens of a chat as an episode has them, and its labels: what the policy says, with the token that closes."""

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    tools = [tool.schema for tool in ArithmeticTool.tools]
    ids, labels, so_far = [], [], ""
    for at in range(1, len(chat), 2):
        whole = tokenizer.apply_chat_template(chat[:at], tools=tools, add_generation_prompt=True, tokenize=False)
        before, said = tokens(whole[len(so_far) :]), tokens(chat[at]["content"] + CLOSE)
        ids += [*before, *said]
        labels += [*[IGNORED] * len(before), *said]
        so_far = whole + chat[at]["content"] + CLOSE
    return ids[:LONGEST], labels[:LONGEST]


def batches(examples: Sequence[tuple[list[int], list[int]]], tokens: int, seed: int) -> Iterator[Any]:
    """Batches of about that many tokens, padding included, of examples of like length."""
    shuffled = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    order = sorted(shuffled, key=lambda i: len(examples[i][0]) // 32)
    at, found = 0, []
    while at < len(order):
        size = max(1, tokens // (32 * (len(examples[order[at]][0]) // 32 + 1)))
        found.append(order[at : at + size])
        at += size
    for number in torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist():
        chosen = [examples[i] for i in found[number]]
        width = max(len(ids) for ids, _ in chosen)
        yield (
            torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in chosen]),
            torch.tensor([[*labels, *[IGNORED] * (width - len(labels))] for _, labels in chosen]),
        )


def teach(options: argparse.Namespace, folder: Path) -> None:
    """Write a model that was taught the solutions to a folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rows = [json.loads(line) for line in (Path(options.data) / "train.jsonl").read_text().splitlines()]
    rows = rows[:64] if options.cpu else rows
    shape: dict[str, Any] = SMALL if options.cpu else LARGE
    tokenizer = tokenizer_of(rows, SMALL_VOCABULARY if options.cpu else VOCABULARY)
    heads = shape["num_attention_heads"]
    config = Qwen3Config(
        **shape,
        vocab_size=len(tokenizer),
        num_key_value_heads=max(1, heads // 3),
        head_dim=64 if not options.cpu else 32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    device = "cpu" if options.cpu else "cuda"
    model: Any = Qwen3ForCausalLM(config).to(device)
    examples = [example_of(tokenizer, chat_of(row)) for row in rows]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    begun_s, updates, epoch, spent = time.monotonic(), 0, 0, 0.0
    while spent < 1:
        for ids, labels in batches(examples, TOKENS // (64 if options.cpu else 1), epoch):
            spent = (time.monotonic() - begun_s) / options.taught_s
            rate = LR * min((updates + 1) / WARM, 0.5 + 0.5 * math.cos(math.pi * min(spent, 1.0)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=ids.to(device), labels=labels.to(device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if updates % 50 == 0:
                print(f"{updates} updates, epoch {epoch + 1}, loss {loss.item():.3f}", flush=True)
            if spent >= 1:
                break
        epoch += 1
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trained(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    """Run the recipe. Returns what its record says."""
    given = {
        "--model": model, "--data": options.data, "--generator": "vllm", "--trainer": "megatron",
        "--prompts-per-step": options.prompts, "--samples-per-prompt": options.samples, "--max-tokens": 512,
        "--turns": 10, "--steps": options.steps, "--lr": options.lr, "--kl": 0.001, "--evaluate-every": options.steps,
        "--evaluate-prompts": 8 if options.cpu else 1000, "--executor": "local", "--run-dir": folder,
    }  # fmt: skip
    if not options.cpu:
        given |= {"--sampler-gpus": 1, "--learner-gpus": 1, "--sampler-memory": 0.5}
    flags = [str(each) for pair in given.items() for each in pair] + (["--colocated"] if not options.cpu else [])
    command = [sys.executable, "-m", "pipeline.run", "graphs/gsm8k.py", "--tool", *flags, "--plain"]
    try:
        subprocess.run(command, check=True, timeout=options.timeout_s)
    except subprocess.TimeoutExpired:
        print(f"the recipe was ended after {options.timeout_s:g} s; the table has its steps so far", flush=True)
    steps = [json.loads(line) for line in RunDir(folder).metrics.read_text().splitlines()]
    scores = [step["eval/math_verify"] for step in steps if "eval/math_verify" in step]
    steps = [step for step in steps if "reward/math_verify" in step]
    kept = [json.loads(line) for path in (folder / "samples").glob("step_*") for line in path.read_text().splitlines()]
    said = [json.loads(sample["conversation"]) for sample in kept if "conversation" in sample]
    answers = [message["content"] for chat in said for message in chat if message["role"] == "tool"]
    refused = sum(answer.startswith("error") for answer in answers)
    first, last = steps[:LAST], steps[-LAST:]
    return {
        "steps": len(steps),
        "s/step": round(fmean(step["time/step_s"] for step in steps[1:]), 2),
        "right, first 5": round(fmean(step["reward/math_verify"] for step in first), 3),
        "right, last 5": round(fmean(step["reward/math_verify"] for step in last), 3),
        "turns, first 5": round(fmean(step["episode/turns"] for step in first), 2),
        "turns, last 5": round(fmean(step["episode/turns"] for step in last), 2),
        "calls": round(len(answers) / len(said), 2),
        "of them refused": round(refused / max(1, len(answers)), 4),
        "held out before": scores[0],
        "held out after": scores[-1],
        "curve": [round(step["reward/math_verify"], 4) for step in steps],
        "mismatch_kl": [step["train/mismatch_kl"] for step in last][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--taught-s", type=float, default=90.0, help="seconds in which the model is taught")
    parser.add_argument("--taught", help="a folder for the taught model; one that has it is taken as it is")
    parser.add_argument("--only", choices=("teach",), help="teach the model, and end")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate of the recipe")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=580.0, help="seconds for the recipe")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to try the script")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.cpu:
        options.taught_s, options.steps, options.prompts, options.samples = 5.0, 2, 4, 2
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(options.taught or Path(scratch) / "taught")
        if not (model / "config.json").exists():
            teach(options, model)
        if options.only:
            return
        rows = [trained(options, model, Path(scratch) / "run")]
    notes = (
        f"{options.prompts} x {options.samples} episodes per step; a model of 89 M parameters that was taught the "
        f"solutions of train.jsonl for {options.taught_s:g} s from random weights; 1,000 held-out problems."
    )
    shown = [name for name in rows[0] if name not in ("curve", "mismatch_kl")]
    report("gpu.calculator", rows, shown, notes, options.out)


if __name__ == "__main__":
    main()
