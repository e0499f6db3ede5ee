"""What a pass gives a network for the images of its prompts: patches, positions, and which tokens are images.

Qwen-VL's rotary embedding has three positions for a token: time, height and width (arXiv 2409.12191); a text continues
after the largest position of the image before it. Transformers computes them for one sample (`get_rope_index`); here
they are put where the samples of a pass lie, padded or packed.

Legend: N samples or rows, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from stages.backends.model.vision import Pictures, Vision

Seen: TypeAlias = tuple[Vision, Sequence[Pictures]]  # how a model sees images, and those of each sample


def seen_by(seen: Seen | None, samples: Sequence[int]) -> Seen | None:
    """The images of these samples."""
    return None if seen is None else (seen[0], [seen[1][sample] for sample in samples])


@dataclass(frozen=True, kw_only=True)
class SeenSample:
    """Where a sample lies in a pass: its row, its first token there, its tokens, and how many of them are a prompt."""

    row: int
    start: int
    length: int
    prompt: int
    pictures: Pictures


@dataclass(frozen=True, eq=False)
class Sight:
    """Arguments of a pass. `positions_4NS` are those of the text, then time, height and width; 0 in padding. A token
    that was sampled is never an image, whatever its id."""

    positions_4NS: torch.Tensor
    is_image_NS: torch.Tensor
    patches_QD: torch.Tensor
    grids_I3: torch.Tensor

    @staticmethod
    def of(network: PreTrainedModel, vision: Vision, ids_NS: torch.Tensor, samples: Sequence[SeenSample]) -> Sight:
        """Find the images of samples, which are in the order of the pass. A pass without images gets a black one that
        no token shows, so that all ranks compute the same layers, with gradients of 0."""
        device = ids_NS.device
        positions_4NS = torch.zeros(4, *ids_NS.shape, dtype=torch.long, device=device)
        is_image_NS = torch.zeros_like(ids_NS, dtype=torch.bool)
        for each in samples:
            span = slice(each.start, each.start + each.length)
            ids_S = ids_NS[each.row, span]
            is_image_S = ids_S == vision.image_token
            is_image_S[each.prompt :] = False
            if int(is_image_S.sum()) != sum(each.pictures.tokens):
                raise ValueError(
                    f"a prompt has {int(is_image_S.sum())} tokens of images, and its images have "
                    f"{sum(each.pictures.tokens)}"
                )
            is_image_NS[each.row, span] = is_image_S
            positions_4NS[0, each.row, span] = torch.arange(len(ids_S), device=device)
            positions_4NS[1:, each.row, span] = _positions(network, ids_S, is_image_S, each.pictures)
        seen = [each.pictures for each in samples if len(each.pictures)] or [vision.blank()]
        return Sight(
            positions_4NS,
            is_image_NS,
            torch.cat([pictures.patches_QD for pictures in seen]).to(device),
            torch.cat([pictures.grids_I3 for pictures in seen]).to(device),
        )

    @property
    def ends(self) -> torch.Tensor:
        """The position after the last one of each row."""
        return self.positions_4NS[1:].amax(dim=(0, 2)) + 1

    @contextmanager
    def shown(self, network: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Arguments for a forward pass inside this context, in which the network puts images where they are: without
        it, it looks for their token, which a sample may have too."""
        own = network.model.get_placeholder_mask
        network.model.get_placeholder_mask = self._mask
        try:
            yield {"pixel_values": self.patches_QD, "image_grid_thw": self.grids_I3}
        finally:
            network.model.get_placeholder_mask = own

    def _mask(
        self, input_ids: Any, inputs_embeds: torch.Tensor, image_features: Any = None, video_features: Any = None
    ) -> tuple[torch.Tensor, None]:
        return self.is_image_NS[..., None].expand_as(inputs_embeds), None


def _positions(network: Any, ids_S: torch.Tensor, is_image_S: torch.Tensor, pictures: Pictures) -> torch.Tensor:
    """The positions [3, S] of one sample."""
    found, _ = network.model.get_rope_index(
        ids_S[None], mm_token_type_ids=is_image_S[None].int(), image_grid_thw=pictures.grids_I3.to(ids_S.device)
    )
    return found[:, 0]
