"""Images as a model of the Qwen-VL families sees them: files to patches, and marks in prompts to runs of tokens.

    vision = load_vision(model, tokenizer)
    pictures = vision.pictures(framed([png]))                    # patches and grids
    ids = vision.expanded(tokenizer(vision.placed("<image>What is it?", 1)).input_ids, pictures)

Sampler and trainer decode the same files with this module, so they compute with the same numbers. Resizing, normalizing
and cutting into patches is transformers' `Qwen2VLImageProcessorPil`, which needs Pillow and no torchvision.

Legend: Q patches of all images of a prompt, D numbers of a patch, I images, L tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from pipeline import Model, StageError
from pipeline.errors import Problem, counted, message_of
from stages.backends.model.build import built_config, not_loaded
from stages.images import FAMILIES, MARK, files_of, image_problems

PROCESSORS = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
KEPT = 16  # prompts whose patches are kept: the samples of a group follow each other


@dataclass(frozen=True, eq=False)
class Pictures:
    """The images of a prompt: patches [Q, D], float32; grids [I, 3], patches in time, height and width; the tokens of
    each image; and a name of its content."""

    patches_QD: torch.Tensor
    grids_I3: torch.Tensor
    tokens: tuple[int, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)


class Vision:
    """How a model sees images. `image_token` is the id that stands for a part of an image."""

    def __init__(self, processor: Any, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        self.processor, self.image_token = processor, int(config.image_token_id)
        ids = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        self._placeholder = "".join(tokenizer.convert_ids_to_tokens(ids))
        self._kept: OrderedDict[bytes, Pictures] = OrderedDict()

    def pictures(self, frame: bytes) -> Pictures:
        """The images of a prompt, from its framed files. Raises StageError for a file that is no image."""
        if frame in self._kept:
            self._kept.move_to_end(frame)
            return self._kept[frame]
        made = self._made(files_of(frame))
        self._kept[frame] = made
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return made

    def blank(self) -> Pictures:
        """One black image of one token."""
        processor = self.processor
        side = processor.merge_size
        size = 3 * processor.temporal_patch_size * processor.patch_size**2
        return Pictures(torch.zeros(side**2, size), torch.tensor([[1, side, side]]), (1,), ("",))

    def placed(self, text: str, images: int) -> str:
        """A prompt with the model's placeholder for each image: in the place of marks, or else before the text."""
        if MARK in text:
            return text.replace(MARK, self._placeholder)
        return self._placeholder * images + text

    def placed_messages(self, messages: str, images: int) -> str:
        """The same for messages as JSON; without marks, images precede the last message's text."""
        found = json.loads(messages)
        if not any(MARK in message["content"] for message in found):
            found[-1]["content"] = MARK * images + found[-1]["content"]
        for message in found:
            message["content"] = message["content"].replace(MARK, self._placeholder)
        return json.dumps(found, ensure_ascii=False)

    def expanded(self, ids: Sequence[int], pictures: Pictures) -> list[int]:
        """Token ids in which each placeholder has the tokens of its image. Raises ValueError unless there is one
        placeholder for each image."""
        if (places := ids.count(self.image_token)) != len(pictures):
            raise ValueError(f"has {counted(places, 'place')} for images and {counted(len(pictures), 'image')}")
        sizes = iter(pictures.tokens)
        return [each for token in ids for each in ([token] * next(sizes) if token == self.image_token else [token])]

    def runs(self, ids: Sequence[int], pictures: Pictures) -> Iterator[tuple[int, int]]:
        """First token and number of tokens of each image in a prompt. Raises ValueError if they are others than those
        that the images have."""
        tokens = [at for at, token in enumerate(ids) if token == self.image_token]
        if len(tokens) != sum(pictures.tokens):
            raise ValueError(f"a prompt has {len(tokens)} tokens of images, and its images have {sum(pictures.tokens)}")
        edges = [0]
        for size in pictures.tokens:
            edges.append(edges[-1] + size)
        for start, stop in pairwise(edges):
            run = tokens[start:stop]
            if len(list(groupby(enumerate(run), key=lambda pair: pair[1] - pair[0]))) != 1:
                raise ValueError("the tokens of an image in a prompt are not consecutive")
            yield run[0], stop - start

    def _made(self, files: Sequence[bytes]) -> Pictures:
        from PIL import Image, UnidentifiedImageError

        if not files:
            blank = self.blank()
            return Pictures(blank.patches_QD[:0], blank.grids_I3[:0], (), ())
        images = []
        for number, file in enumerate(files):
            try:
                images.append(Image.open(io.BytesIO(file)).convert("RGB"))
            except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise StageError(_undecodable(number, file, error)) from error
        try:
            made = self.processor(images=images, return_tensors="pt")
        except ValueError as error:  # a side 200 times as long as the other
            raise StageError(_undecodable(0, files[0], error)) from error
        grids_I3 = made["image_grid_thw"]
        tokens = tuple(int(grid.prod()) // self.processor.merge_size**2 for grid in grids_I3)
        names = tuple(hashlib.sha256(file).hexdigest() for file in files)
        return Pictures(made["pixel_values"].float(), grids_I3, tokens, names)


def load_vision(model: Model, tokenizer: PreTrainedTokenizerBase, config: Any = None) -> Vision:
    """How the model sees images; `config` is that of its network, if that is loaded. Raises StageError if its family is
    not known here, or its folder does not say."""
    if config is None and model.config is None:
        try:
            config = AutoConfig.from_pretrained(model.source, trust_remote_code=False)
        except Exception as error:  # whatever is in the folder
            raise StageError(not_loaded(model, error)) from error
    if config is None:
        config = built_config(model, tokenizer)
    if problems := list(image_problems(model, config.to_dict())):
        raise StageError(*problems)
    if model.config is not None:
        return Vision(built_processor(config), tokenizer, config)
    try:
        processor = processor_class().from_pretrained(model.source, trust_remote_code=False)
    except Exception as error:  # whatever is in the folder
        raise StageError(not_loaded(model, error, "model with a preprocessor_config.json")) from error
    return Vision(processor, tokenizer, config)


def processor_class() -> Any:
    """The class of transformers that turns images into patches, with Pillow."""
    return importlib.import_module(PROCESSORS).Qwen2VLImageProcessorPil


def built_processor(config: Any) -> Any:
    """The processor of a model that is built from a config: images keep their size, in whole tokens."""
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    return processor_class()(
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        size={"shortest_edge": side**2, "longest_edge": 1280 * side**2},
    )


def write_processor(config: Any, source: str, folder: Path) -> None:
    """Write what makes a saved model see images as its source does; nothing for a model without vision."""
    if config.model_type not in FAMILIES:
        return
    try:
        processor = processor_class().from_pretrained(source)
    except OSError:  # it was built
        processor = built_processor(config)
    processor.save_pretrained(folder)


def _undecodable(number: int, file: bytes, error: Exception) -> Problem:
    return Problem(
        where=f"image {number} of a prompt, of {len(file)} bytes",
        what=f"it cannot be read: {message_of(error)}",
        why="images are files that Pillow reads, such as PNG and JPEG, with sides of similar length",
        fix="save the image again, or remove its row from the data",
    )
