"""The images of prompts: how the files of a prompt travel in one field, and which models and backends see them.

    column = framed([png, jpeg])          # bytes; a prompt without images has framed([])
    files_of(column) == [png, jpeg]

Files stay encoded (PNG, JPEG ...). The worker that samples and those that train decode the same bytes. Loads neither
torch nor an image library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline import Field, Graph, Model, WorkerGroup
from pipeline.declare.columns import Columns
from pipeline.errors import Problem, counted
from stages.model_shape import known_config
from stages.vocabulary import IMAGES

MARK = "<image>"  # where an image stands in a prompt
FAMILIES = ("qwen2_5_vl", "qwen3_vl")  # whose images are computed


def framed(files: Sequence[bytes]) -> bytes:
    """Join files: their number, their lengths in bytes (uint32, little-endian), and the files."""
    return struct.pack(f"<{len(files) + 1}I", len(files), *map(len, files)) + b"".join(files)


def files_of(frame: bytes) -> list[bytes]:
    """Return the files that `framed` joined. Raises ValueError for anything else."""
    try:
        (count,) = struct.unpack_from("<I", frame)
        lengths = struct.unpack_from(f"<{count}I", frame, 4)
    except struct.error as error:
        raise ValueError(f"{len(frame)} bytes are no frame of files") from error
    files, start = [], 4 * (count + 1)
    for length in lengths:
        files.append(frame[start : start + length])
        start += length
    if start != len(frame):
        raise ValueError(f"the frame has {len(frame)} bytes, and its files end at {start}")
    return files


def mark_reason(texts: Sequence[str], images: int) -> str | None:
    """Why texts with marks do not fit this many images; None if they do. Without a mark, images come first."""
    marks = sum(text.count(MARK) for text in texts)
    return f"{counted(images, 'image')} and {counted(marks, 'mark')} {MARK}" if marks not in (0, images) else None


def fields_of(model: object) -> tuple[Field, ...]:
    """The field that stages of this model read in addition: images, if its prompts have some."""
    return (IMAGES,) if isinstance(model, Model) and model.images is True else ()


def given(columns: Columns | Mapping[str, Any]) -> dict[str, Any]:
    """The argument `images` of an engine's methods, if the columns have images; else no argument."""
    return {"images": columns[IMAGES.name]} if columns.get(IMAGES.name) is not None else {}


def is_seeing(config: Mapping[str, Any]) -> bool:
    """Whether a Hugging Face config is that of a model whose images are computed."""
    return config.get("model_type") in FAMILIES and bool(config.get("vision_config"))


def image_problems(model: Model, config: Mapping[str, Any] | None = None) -> Iterator[Problem]:
    """Reasons why a model cannot see images: from its config, or as far as that is known before it is loaded."""
    config = known_config(model) if config is None else config
    if model.images is True and config and not is_seeing(config):
        has = "no vision_config" if not config.get("vision_config") else f"model_type={config.get('model_type')!r}"
        yield Problem(
            where=str(model.location),
            what=f"the model {model.source!r} has images=True, and its config has {has}",
            why=f"images are computed for {' and '.join(FAMILIES)}",
            fix="a model of these families, or leave out images=",
        )
    elif model.images is True and model.lora is not None:
        yield Problem(
            where=str(model.location),
            what=f"the model {model.source!r} has images=True and lora=",
            why="adapters have not been tested in layers that follow images",
            fix="leave out lora=, which trains the whole model",
        )


def unseen_problems(model: Model, graph: Graph) -> Iterator[Problem]:
    """Whether prompts have images that the model, which samples responses to them, would not see."""
    if IMAGES in graph.source.writes and model.images is False:
        yield Problem(
            where=str(model.location),
            what=f"prompts have images, and the model {model.source!r} has images={model.images!r}",
            why="it would respond to the text alone",
            fix="Model(..., images=True), or leave out images= in Prompts",
        )


def blind_problems(model: Model, group: WorkerGroup) -> Iterator[Problem]:
    """Reasons why a worker group cannot compute the model's images."""
    backend = group.description
    if backend is None or model.images is not True:
        return
    where, what = str(model.location), f"the model {model.source!r} has images=True, and worker group {group.name!r}"
    if not backend.sees:
        why, fix = "that backend computes no images", "backend='torch', or 'vllm' to sample"
        yield Problem(where=where, what=f"{what} has the backend {backend.name!r}", why=why, fix=fix)
    elif group.weights != "auto":
        why, fix = "layers that compute images have no 8-bit form here", "weights='auto'"
        yield Problem(where=where, what=f"{what} has weights={group.weights!r}", why=why, fix=fix)
    elif group.speculate:
        why, fix = "drafts are not verified with images", "speculate=0"
        yield Problem(where=where, what=f"{what} has speculate={group.speculate}", why=why, fix=fix)
