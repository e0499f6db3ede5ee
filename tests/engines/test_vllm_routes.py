"""The experts that vLLM returns with a sample: kept where outputs are merged, and turned into the field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.optional import need

need("vllm", "vllm")


def output(tokens: list[int], experts: np.ndarray | None = None) -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    made = CompletionOutput(
        index=0, text="", token_ids=tokens, cumulative_logprob=None, logprobs=None, routed_experts=experts
    )
    return RequestOutput("a", None, None, None, [made], finished=experts is not None)


def dropping(self: Any, next_output: Any, aggregate: bool) -> None:
    """What vLLM 0.26 merges of two outputs."""
    self.finished |= next_output.finished
    self.outputs[0].token_ids.extend(next_output.outputs[0].token_ids)


@pytest.mark.parametrize("merges", ["0.26", "installed"])
def test_the_experts_are_kept_where_nobody_has_read_the_output_before(merges: str) -> None:
    from vllm.outputs import RequestOutput

    from stages.backends.vllm.api import with_experts

    experts = np.ones((3, 2, 2), np.uint8)
    merged, last = output([5, 6]), output([7], experts)
    with_experts(dropping if merges == "0.26" else RequestOutput.add)(merged, last, True)
    assert merged.finished and list(merged.outputs[0].token_ids) == [5, 6, 7]
    assert merged.outputs[0].routed_experts is experts
    unfinished = output([5])
    with_experts(dropping)(unfinished, output([6]), True)
    assert unfinished.outputs[0].routed_experts is None


def request(prompt: int, tokens: int, experts: np.ndarray | None) -> Any:
    from stages.backends.vllm.requests import Request

    made = Request(position=0, name="0", prompt=[3] * prompt, params=None, routes=experts)
    made.tokens.extend([4] * tokens)
    return made


def test_the_field_has_the_layers_with_experts_of_all_tokens_but_the_last() -> None:
    from stages.backends.vllm.engine import routes_of

    first, second = (np.random.default_rng(0).integers(0, 200, (tokens, 3, 2)).astype(np.uint8) for tokens in (4, 2))
    made = routes_of([request(3, 2, first), request(2, 1, second)], [1, 2])
    assert made.lengths == (16, 8)
    assert torch.equal(made.values.view(-1, 2, 2), torch.from_numpy(np.concatenate([first, second])[:, 1:]).short())
    for wrong, found in ((first[1:], 3), (None, 0)):
        with pytest.raises(RuntimeError, match=f"experts of {found} tokens, of 4"):
            routes_of([request(3, 2, wrong)], [1, 2])


def test_layers_with_experts_are_those_of_the_networks() -> None:
    from transformers import AutoConfig

    from stages.model_shape import sparse_layers

    for family, settings, wanted in (
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}, [1, 3]),
        ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}, [0, 2]),
        ("glm4_moe", {"num_hidden_layers": 3, "first_k_dense_replace": 1}, [1, 2]),
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 3}, [3]),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "moe"]}, [1, 3]),
    ):
        assert sparse_layers(AutoConfig.for_model(family, **settings).to_dict()) == wanted


def test_vllm_has_the_flag() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert AsyncEngineArgs.enable_return_routed_experts is False
