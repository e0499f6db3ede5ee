"""Images of requests: what vLLM gets in the place of files, and models that see images without torchvision.

The patches of an image are those that the trainer computes (stages/backends/model/vision.py), in the form in which
vLLM's own processor would hand them on. vLLM imports the models' processors nevertheless, and those of transformers
need torchvision, whose published builds fit CUDA builds of torch only: without it, `install` has them replaced by the
one that computes the patches, which knows no video.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from transformers import BatchFeature

from stages.backends.model.vision import PROCESSORS, Pictures, processor_class
from stages.backends.vllm.api import (
    MULTIMODAL_REGISTRY,
    ModelRegistry,
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)

IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"  # these modules import torchvision
VIDEOS = "transformers.models.qwen3_vl.video_processing_qwen3_vl"
CLASSES = {  # vLLM's modules: architecture, processor, its description, its dummy inputs
    "vllm.model_executor.models.qwen3_vl": (
        "Qwen3VLForConditionalGeneration", "Qwen3VLMultiModalProcessor", "Qwen3VLProcessingInfo",
        "Qwen3VLDummyInputsBuilder",
    ),
    "vllm.model_executor.models.qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLMultiModalProcessor", "Qwen2_5_VLProcessingInfo",
        "Qwen2_5_VLDummyInputsBuilder",
    ),
}  # fmt: skip


def prompt(ids: list[int], pictures: Pictures | None, runs: list[tuple[int, int]]) -> dict[str, Any]:
    """A request's prompt for vLLM. `runs` are first token and number of tokens of each image."""
    if pictures is None or not len(pictures):
        return {"prompt_token_ids": ids}
    fields = {"pixel_values": pictures.patches_QD, "image_grid_thw": pictures.grids_I3}
    items = MultiModalKwargsItems.from_hf_inputs(
        BatchFeature(fields),
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", pictures.grids_I3.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        },
    )
    return {
        "type": "multimodal",
        "prompt_token_ids": ids,
        "mm_kwargs": items,
        "mm_hashes": {"image": list(pictures.names)},
        "mm_placeholders": {"image": [PlaceholderRange(offset=start, length=size) for start, size in runs]},
    }


def install() -> None:
    """Let this process compute these models without torchvision, unless it is installed. They are imported when they
    are first needed."""
    if find_spec("torchvision") is not None:
        return
    for architecture, *_ in CLASSES.values():
        ModelRegistry.register_model(architecture, f"{__name__}:{architecture}")


def register(architecture: str) -> None:
    """Import a model now, if `install` replaced it: vLLM would otherwise import it in a process of its own, which might
    not find this module."""
    if find_spec("torchvision") is None and architecture in [name for name, *_ in CLASSES.values()]:
        ModelRegistry.register_model(architecture, __getattr__(architecture))


def __getattr__(name: str) -> Any:
    """A model that `install` replaced, by its architecture."""
    for module, (architecture, *others) in CLASSES.items():
        if name == architecture:
            return _imported(module, architecture, *others)
    raise AttributeError(name)


@cache
def _imported(module: str, architecture: str, processor: str, description: str, dummy: str) -> Any:
    pil: Any = importlib.import_module(PROCESSORS)
    _replace(IMAGES, Qwen2VLImageProcessor=pil.Qwen2VLImageProcessorPil, smart_resize=pil.smart_resize)
    _replace(VIDEOS, Qwen3VLVideoProcessor=type("NoVideo", (), {}), smart_resize=pil.smart_resize)
    found = importlib.import_module(module)
    described = type("ImagesOnly", (WithoutProcessor, getattr(found, description)), {})
    register = MULTIMODAL_REGISTRY.register_processor(
        getattr(found, processor), info=described, dummy_inputs=getattr(found, dummy)
    )
    return register(type(architecture, (getattr(found, architecture),), {}))


def _replace(name: str, **contents: Any) -> None:
    """Let imports of a module find these."""
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)


class WithoutProcessor:
    """What vLLM asks of a model's processor, answered without it. Base classes come after this one."""

    ctx: Any

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Images, as many as there are."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """The tokens of the largest image."""
        processor = processor_class().from_pretrained(self.ctx.model_config.model)
        side = processor.patch_size * processor.merge_size
        return {"image": max(1, min(seq_len, processor.size["longest_edge"] // side**2))}
