"""Images and tiny models that see them, for the tests."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch

from pipeline import Model
from pipeline.declare.columns import Ragged
from stages.images import framed
from tests.optional import need

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
}  # fmt: skip
VISION = {
    "depth": 2, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 64,
}  # fmt: skip
INTERLEAVED = TEXT | {"rope_parameters": TEXT["rope_parameters"] | {"mrope_interleaved": True}}  # type: ignore[operator]
CONFIGS = {
    "qwen3_vl": {
        "text_config": INTERLEAVED,
        "vision_config": VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"num_attention_heads": 2},
        "vision_config": VISION | {"fullatt_block_indexes": [1], "window_size": 32},
    },
}
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +=?"
TEXTS = ("what is 7?", "a<image>b<image>c", "plain")
SIZES = (((48, 32),), ((16, 40), (33, 30)), ())  # width and height of the images of these texts


def tiny(family: str = "qwen3_vl", **settings: int) -> Model:
    return Model(family, config={"model_type": family, **CONFIGS[family]}, alphabet=ALPHABET, images=True, **settings)


def png(seed: int, width: int, height: int) -> bytes:
    """Return an image of noise."""
    image = need("vision", "PIL.Image")
    pixels = (np.random.RandomState(seed).rand(height, width, 3) * 255).astype("uint8")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def column(sizes: Sequence[Sequence[tuple[int, int]]] = SIZES) -> Ragged:
    """Return the field `images` of prompts with images of these sizes, each another one."""
    frames = [framed([png(100 * n + i, *size) for i, size in enumerate(own)]) for n, own in enumerate(sizes)]
    return Ragged.of([torch.frombuffer(bytearray(frame), dtype=torch.uint8) for frame in frames])


def sharpen(network: torch.nn.Module) -> None:
    """Make a network's distributions far from flat."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
