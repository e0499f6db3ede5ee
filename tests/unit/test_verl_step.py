"""What benchmarks/gpu/verl_step.py prepares for verl: a tokenizer, prompts, keys of its configuration."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from benchmarks.gpu.verl_step import TURN_END, overrides, with_chat
from stages.backends.model.build import byte_tokenizer


def test_the_tokenizer_names_every_token_of_the_model_and_joins_messages(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    plain = byte_tokenizer()
    with_chat(str(tmp_path), 2048)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 2048
    assert tokenizer.convert_tokens_to_ids(TURN_END) == 2047
    messages = [{"role": "user", "content": "r1234>"}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == plain.encode(
        "r1234>"
    )


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_an_update_takes_half_of_the_groups_and_the_last_word_is_the_users(tmp_path: Path, strategy: str) -> None:
    options = Namespace(
        strategy=strategy, groups=64, samples=8, tokens=1024, steps=3, budget=16480, memory=0.7, fused="triton",
        attention="fused", recompute=True, set=["trainer.use_v1=False"],
    )  # fmt: skip
    keys = dict(pair.split("=", 1) for pair in overrides(options, tmp_path, "model"))
    assert keys["actor_rollout_ref.actor.ppo_mini_batch_size"] == "32"
    assert keys["actor_rollout_ref.rollout.ignore_eos"] == "True"
    assert keys["actor_rollout_ref.model.use_remove_padding"] == str(strategy == "megatron")
    assert list(keys)[-1] == "trainer.use_v1"
