"""Values of typed columns: numbers, nested lists of numbers, and encoded images. Knows fields; loads numpy on demand.

A field of dims "N" takes one number or boolean per row; more dims take a list, nested as deep as the dims. A uint8
field of dims "N B" (any letter) also takes the bytes of a file: as bytes, as its path, or as {"bytes", "path"}, the
form of images in Arrow data. The bytes stay encoded (PNG, JPEG); the model's processor decodes them.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import Field
from pipeline.declare.columns import Column, Ragged
from pipeline.errors import counted, message_of

if TYPE_CHECKING:
    import numpy as np

SHOWN = 60  # characters of a value in a message
_BITS = {"uint8": (0, 2**8), "int8": (-(2**7), 2**7), "int16": (-(2**15), 2**15), "int32": (-(2**31), 2**31)}
_FLOATS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028235e38, "float64": sys.float_info.max}


def array_wanted(made: Field) -> bool:
    """Whether a row of the field holds more than one value."""
    return bool(made.ragged or made.inner)


def takes_files(made: Field) -> bool:
    """Whether a row of the field may be the bytes of a file."""
    return made.dtype == "uint8" and bool(made.ragged) and not made.inner


def is_plain(value: object) -> bool:
    """Whether the value can be written as JSON: no bytes, no array."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def shown_value(value: object) -> str:
    """The value for a message, as the data has it, or the name of its type if JSON has no such value."""
    if not is_plain(value):
        return type(value).__name__
    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def scalar_reason(made: Field, value: object) -> str | None:
    """Why the value is invalid for a field of dims "N"; None if it is valid."""
    if isinstance(value, bool) != (made.dtype == "bool") or not isinstance(value, int | float):
        return f"is {shown_value(value)}"
    if made.dtype in _FLOATS:
        fits = abs(value) <= _FLOATS[made.dtype]  # False for NaN
    elif isinstance(value, float):
        return f"is {shown_value(value)}, not a whole number"
    else:
        low, end = _BITS.get(made.dtype, (-(2**63), 2**63))
        fits = low <= value < end
    return None if fits and _within(made, value) else f"is {shown_value(value)}, which is out of range"


def array_value(made: Field, value: object, folder: Path) -> tuple[Any, str | None]:
    """Return the row as a numpy array of the field's shape, and None; or None, and why the row is invalid.

    bfloat16 is held as float32 until it becomes a tensor.
    """
    import numpy as np

    if takes_files(made):
        encoded, reason = _encoded(value, folder)
        if encoded is not None or reason:
            return (None if encoded is None else np.frombuffer(encoded, dtype=np.uint8)), reason
    try:
        array = np.asarray(value)
    except ValueError:  # numpy rejects lists of different lengths
        return None, "is a nested list whose parts differ in length"
    if reason := _kind_reason(made, array, value) or _shape_reason(made, array) or _range_reason(made, array):
        return None, reason
    target = "float32" if made.dtype == "bfloat16" else made.dtype
    return array.astype(target).reshape((-1, *made.inner) if made.ragged else made.inner), None


def column_of(made: Field, values: Sequence[Any], repeat: int) -> Column:
    """The column of a field, with each value repeated `repeat` times."""
    if made.dtype == "str":
        return [value for value in values for _ in range(repeat)]
    import torch

    dtype = getattr(torch, made.dtype)
    if not array_wanted(made):
        return torch.tensor(list(values), dtype=dtype).repeat_interleave(repeat)
    rows = [torch.tensor(value).to(dtype) for value in values]
    if made.ragged:
        return Ragged.of([row for row in rows for _ in range(repeat)])
    return torch.stack(rows).repeat_interleave(repeat, dim=0)


def image_files(value: object, folder: Path, *, read: bool = True) -> tuple[list[bytes], str | None]:
    """The files of a row's images, and None; or why they cannot be read. A row has one image, a list of them, or none
    (null). Unless they are to be `read`, only looks whether they exist."""
    files: list[bytes] = []
    listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for entry in listed:
        if not read and isinstance(path := entry.get("path") if isinstance(entry, Mapping) else entry, str):
            if not (folder / path).is_file() and not (isinstance(entry, Mapping) and entry.get("bytes")):
                return [], f"names the missing file {path!r}"
            continue
        encoded, reason = _encoded(entry, folder)
        if encoded is None or reason:
            return [], reason or f"has {shown_value(entry)}, which is no image"
        files.append(encoded)
    return (files if read else [b""] * len(listed)), None


def junk_reason(value: object, files: Sequence[bytes]) -> str | None:
    """Which of a row's images cannot be read, and why; None if all can, or if Pillow is not here. Reads
    headers and checksums, and decodes nothing."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:  # the workers have it
        return None
    listed = value if isinstance(value, list | tuple) else [value]
    for number, (entry, file) in enumerate(zip(listed, files)):
        path = entry.get("path") if isinstance(entry, Mapping) else entry
        name = repr(path) if isinstance(path, str) else f"image {number}"
        try:
            Image.open(io.BytesIO(file)).verify()
        except UnidentifiedImageError:
            return f"has {name}, whose {counted(len(file), 'byte')} are no image"
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            return f"has {name}, which is damaged: {message_of(error)}"
    return None


def _encoded(value: object, folder: Path) -> tuple[bytes | None, str | None]:
    """The bytes of a file, or why they cannot be read; (None, None) if the value is not a file."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping | str | bytes):
        value = value[0]
    if isinstance(value, Mapping) and value.keys() <= {"bytes", "path"}:
        value = value.get("bytes") or value.get("path")
        if value is None:
            return None, "is an image without bytes and without a path"
    if isinstance(value, bytes):
        return value, None
    if isinstance(value, str):
        path = folder / value
        return (path.read_bytes(), None) if path.is_file() else (None, f"names the missing file {value!r}")
    if isinstance(value, list) and value and isinstance(value[0], Mapping | str | bytes):
        return None, f"holds {len(value)} images, and a row has one"
    return None, None


def _kind_reason(made: Field, array: np.ndarray, value: object) -> str | None:
    kinds = {"bool": "b"}.get(made.dtype, "iuf" if made.dtype in _FLOATS else "iu")
    if array.size == 0 or array.dtype.kind in kinds:
        return None if array.ndim else f"is {shown_value(value)}"
    if not array.ndim:
        return f"is {shown_value(value)}"
    return f"holds {array.dtype if array.dtype.kind in 'iufb' else 'values that are not numbers'}"


def _shape_reason(made: Field, array: np.ndarray) -> str | None:
    shape = array.shape[1:] if made.ragged else array.shape
    if shape == made.inner or (made.ragged and array.shape == (0,)):
        return None
    return f"has the shape {list(array.shape)}"


def _range_reason(made: Field, array: np.ndarray) -> str | None:
    if not array.size or array.dtype.kind == "b":
        return None
    smallest, largest = array.min().item(), array.max().item()
    return next((reason for value in (smallest, largest) if (reason := scalar_reason(made, value))), None)


def _within(made: Field, value: float) -> bool:
    return (made.low is None or value >= made.low) and (made.high is None or value <= made.high)
