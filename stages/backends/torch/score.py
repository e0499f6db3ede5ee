"""Computes logits and logprobs of given responses. Knows a network and token ids, not what they are for.

A pass computes one microbatch, padded to a rectangle or packed into one row; both give the same values per token.

Legend: N samples, P and T prompt and response widths of a microbatch, W = P + T, S = W - 1, V vocabulary, R response
tokens in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ops.logprobs import selected_logprobs
from ops.packing import pack, rectangle
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Microbatch, Shard
from stages.backends.interface import part
from stages.backends.model.padding import pad_around
from stages.backends.torch.cache_names import cache_name
from stages.backends.torch.images import Seen, SeenSample, Sight, seen_by
from stages.backends.torch.routers import Routers, along
from stages.backends.torch.rows import apart


@dataclass(frozen=True, eq=False)
class Predicted:
    """A pass's output for the response tokens: logits / temperature and ids, both [N, T] or both [1, R].

    `rectangle` maps values shaped like `ids` to [N, T] with responses at the left; there, `mask_NT` is True for tokens.
    In `ids` [N, T], the response of sample n starts at column `starts[n]`: its prompt may be longer than P.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    mask_NT: torch.Tensor
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    width: int
    packed: bool

    def rectangle(self, values: torch.Tensor) -> torch.Tensor:
        """Reshape one value per token, shaped like `ids`, to [N, T]. Entries that are no tokens are arbitrary."""
        if self.packed:
            return rectangle(values[0], self.lengths, self.width)
        if not any(self.starts):
            return values
        starts_N1 = torch.tensor(self.starts, device=values.device)[:, None]
        columns_NT = torch.arange(self.width, device=values.device) + starts_N1
        return values.gather(1, columns_NT.clamp(max=self.width - 1))


def predict(
    network: PreTrainedModel,
    prompt_ids: Ragged,
    response_ids: Ragged,
    microbatch: Microbatch,
    *,
    temperature: float,
    pad: int,
    packed: bool = False,
    seen: Seen | None = None,
) -> Predicted:
    """Run one pass over a microbatch. Computes logits of response positions only. Models whose samples would mix in a
    row get a rectangle."""
    lengths, width = response_ids.lengths, microbatch.response
    device, packed = network.device, packed and apart(network)
    if packed:
        logits, ids = _packed(network, prompt_ids, response_ids, seen)
    else:
        logits, ids = _padded(network, prompt_ids, response_ids, microbatch, pad, seen)
    if temperature != 1.0:
        logits = logits.float() / temperature
    mask_NT = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    starts = tuple(max(length - microbatch.prompt, 0) for length in prompt_ids.lengths)
    return Predicted(logits, ids, mask_NT, lengths, starts, width, packed)


def _packed(
    network: PreTrainedModel, prompt_ids: Ragged, response_ids: Ragged, seen: Seen | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one after the other in one row."""
    device = network.device
    row = pack(prompt_ids.rows(), response_ids.rows())
    ids_1S, positions_1S = row.ids_1S.to(device), row.positions_1S.to(device)
    given = {"input_ids": ids_1S, "use_cache": False, "logits_to_keep": row.keep_R.to(device)}
    if seen is None:
        masks = _masks(network, ids_1S, positions_1S)
        return network(attention_mask=masks, position_ids=positions_1S, **given).logits, row.targets_1R.to(device)
    vision, pictures = seen
    samples, start = [], 0
    for prompt, response, own in zip(prompt_ids.lengths, response_ids.lengths, pictures):
        length = prompt + response - 1  # the last token is no input
        samples.append(SeenSample(row=0, start=start, length=length, prompt=prompt, pictures=own))
        start += length
    sight = Sight.of(network, vision, ids_1S, samples)
    with sight.shown(network) as arguments:
        logits_1RV = network(position_ids=sight.positions_4NS, **given, **arguments).logits
    return logits_1RV, row.targets_1R.to(device)


def _masks(network: PreTrainedModel, ids_1S: torch.Tensor, positions_1S: torch.Tensor) -> dict[str, Any] | None:
    """The masks of a packed row by the kind of layer; None if the network finds the row's samples in the positions.

    Transformers 5.19 does not give gpt-oss the positions (models/gpt_oss/modeling_gpt_oss.py): its samples would attend
    to each other.
    """
    if network.config.model_type != "gpt_oss":
        return None
    given = {
        "config": network.config,
        "inputs_embeds": network.get_input_embeddings()(ids_1S),
        "attention_mask": None,
        cache_name(create_causal_mask): None,
        "position_ids": positions_1S,
    }
    return {
        "full_attention": create_causal_mask(**given),
        "sliding_attention": create_sliding_window_causal_mask(**given),
    }


def _padded(
    network: PreTrainedModel, prompt_ids: Ragged, response_ids: Ragged, microbatch: Microbatch, pad: int,
    seen: Seen | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Padding before prompts is masked; padding after responses needs no mask, as attention is causal."""
    device, P, T = network.device, microbatch.prompt, microbatch.response
    rows_NW = pad_around(prompt_ids, response_ids, pad, P, T).to(device)
    inputs_NS, ids_NT = rows_NW[:, :-1], rows_NW[:, P:]
    mask_NS = positions_NS = None
    if min(prompt_ids.lengths) < P:
        left_N1 = torch.tensor([max(P - length, 0) for length in prompt_ids.lengths], device=device)[:, None]
        mask_NS = (torch.arange(P + T - 1, device=device) >= left_N1).long()
        positions_NS = (mask_NS.cumsum(-1) - 1).clamp(min=0)
    given = {"input_ids": inputs_NS, "attention_mask": mask_NS, "use_cache": False, "logits_to_keep": T}
    if seen is None:
        return network(position_ids=positions_NS, **given).logits, ids_NT
    vision, pictures = seen
    sight = Sight.of(
        network,
        vision,
        inputs_NS,
        [
            SeenSample(row=n, start=max(P - prompt, 0), length=prompt + response - 1, prompt=prompt, pictures=own)
            for n, (prompt, response, own) in enumerate(zip(prompt_ids.lengths, response_ids.lengths, pictures))
        ],
    )
    with sight.shown(network) as arguments:
        return network(position_ids=sight.positions_4NS[1:], **given, **arguments).logits, ids_NT


@torch.no_grad()
def score(
    network: PreTrainedModel, prompt_ids: Ragged, response_ids: Ragged, shard: Shard, *, temperature: float, pad: int,
    routers: Routers | None = None, routes: Ragged | None = None, seen: Seen | None = None,
) -> Ragged:  # fmt: skip
    """Logprobs of the response tokens: float32, at most 0, on the CPU, in sample order; with `routes`, those with these
    experts."""
    rows: dict[int, torch.Tensor] = {}
    for update in shard.updates:
        for microbatch in update.microbatches:
            prompts, responses = (part(column, microbatch.samples) for column in (prompt_ids, response_ids))
            given: Any = {"temperature": temperature, "pad": pad, "packed": shard.packed}
            with along(routers, routes, prompts, responses, microbatch, packed=shard.packed):
                made = predict(network, prompts, responses, microbatch, seen=seen_by(seen, microbatch.samples), **given)
            logprobs = selected_logprobs(made.logits, made.ids).float().clamp_(max=0.0)
            flat = (logprobs[0] if made.packed else made.rectangle(logprobs)[made.mask_NT]).cpu()
            rows |= zip(microbatch.samples, flat.split(list(responses.lengths)))
    return Ragged(torch.cat([rows[i] for i in range(len(response_ids))]), response_ids.lengths)
