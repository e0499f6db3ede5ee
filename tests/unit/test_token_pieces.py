"""The text that each token adds, and how the tokens of a response are read back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.plan.samples import keep_vocabulary
from pipeline.rundir import RunDir
from pipeline.web import texts
from stages.backends.model.build import byte_tokenizer, character_tokenizer
from stages.backends.model.text import pieces

SAID = "Gr\u00fc\u00dfe,  \u4e16\u754c! \U0001f389\n\ttab"


def byte_level() -> PreTrainedTokenizerFast:
    """Tokenizer like those of Qwen and Llama 3: byte pairs, several tokens for some characters, one added token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    letters = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(["of words", "and words"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters))
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    made.add_tokens(["<think>"])
    return made


def with_spaces() -> PreTrainedTokenizerFast:
    """Tokenizer like Llama 2's: words with a leading space, and bytes for what has no token."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    some = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core.train_from_iterator(["so much of words"], trainers.BpeTrainer(vocab_size=400, special_tokens=some))
    core.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (byte_level, f"{SAID}<think>of words<eos>"),
        (with_spaces, f"so much, {SAID}"),
        (byte_tokenizer, SAID),
        (lambda: character_tokenizer("ab 1"), "a b1"),
    ],
)
def test_the_tokens_of_a_text_say_the_text(tmp_path: Path, tokenizer, said) -> None:
    made = tokenizer()
    ids = made(said).input_ids
    keep_vocabulary(RunDir(tmp_path).create(), pieces(made))
    row = {"key": "00000007_g000", "response_ids": ids, "rollout_logprobs": [-0.5] * len(ids)}
    RunDir(tmp_path).samples(0).write_bytes(msgspec.json.encode(row))
    (read,) = texts.samples(tmp_path, 0)
    assert "".join(text for text, _ in read["tokens"]).lstrip(" ") == said.replace("<eos>", "")
    assert len(read["tokens"]) == len(ids) and "response_ids" not in read


@pytest.mark.parametrize("vocabulary", [None, b"", b"{}", b"[1]", '["\u4e16"]'.encode()])
def test_without_a_vocabulary_there_are_no_tokens(tmp_path: Path, vocabulary) -> None:
    run_dir = RunDir(tmp_path).create()
    row = {"key": "00000007_g000", "response": "a", "response_ids": [0], "rollout_logprobs": [0.0]}
    run_dir.samples(0).write_bytes(msgspec.json.encode(row))
    if vocabulary is not None:
        run_dir.vocabulary.write_bytes(vocabulary)
    assert texts.samples(tmp_path, 0) == [{"key": "00000007_g000", "response": "a", "group": "00000007"}]


@pytest.mark.parametrize(
    "row", [{"response_ids": [1, "x", -3, 9]}, {"response_ids": 3}, {"rollout_logprobs": [0.0]}, {}]
)
def test_rows_that_nothing_wrote_so_do_not_break_the_page(tmp_path: Path, row) -> None:
    run_dir = RunDir(tmp_path).create()
    keep_vocabulary(run_dir, [b"a", b"b"])
    row = {"rollout_logprobs": [-1.0] * 4, **row}
    run_dir.samples(0).write_bytes(msgspec.json.encode(row))
    (read,) = texts.samples(tmp_path, 0)
    assert "".join(text for text, _ in read.get("tokens", [])) in ("", "b")
