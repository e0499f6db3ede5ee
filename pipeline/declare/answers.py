"""Asks stages what they need. Their code may be the user's: what it raises or returns by mistake is one clear error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from pipeline.declare.parameters import is_number
from pipeline.declare.stage import Stage
from pipeline.declare.work import Decoding, Foretells, GpuPart, GpuWork, Load
from pipeline.errors import (
    CALLED,
    GraphError,
    Problem,
    SluiceError,
    is_users,
    line_of_code,
    message_of,
    shown,
    user_line,
)


def work_of(stage: Stage, load: Load) -> Sequence[GpuWork] | Decoding | None:
    """Return the work of a stage, in parts; None if it does not know it."""
    found = _answer(stage, "work", load)
    parts = found if isinstance(found, list | tuple) else () if found is None else (found,)
    alike = (len(parts) == 1 and isinstance(parts[0], Decoding)) or all(isinstance(part, GpuWork) for part in parts)
    _check(stage, "work", found, alike, "a GpuWork, a list of them, or a Decoding")
    sizes = [value for part in parts for name, value in asdict(part).items() if name not in ("kind", "responses")]
    _check(stage, "work", found, all(is_number(size) and size >= 0 for size in sizes), "amounts of 0 or more")
    return found if isinstance(found, Decoding) else None if found is None else parts


def memory_of(stage: Stage, load: Load) -> Sequence[GpuPart] | None:
    """Return the memory of a stage on each GPU of `load.group`; None if it does not know it."""
    found = _answer(stage, "memory", load)
    alike = isinstance(found, list | tuple) and all(isinstance(part, GpuPart) for part in found)
    _check(stage, "memory", found, found is None or alike, "a list of GpuPart")
    sizes = [part.size_bytes for part in found or ()]
    _check(stage, "memory", sizes, all(is_number(size) and size >= 0 for size in sizes), "bytes of 0 or more")
    return found


def fitting_of(stage: Stage, load: Load, room_bytes: float) -> str:
    """Return what to write so that a stage's tasks fit into `room_bytes`; "" if nothing helps."""
    found = _answer(stage, "fitting", load, room_bytes)
    _check(stage, "fitting", found, found is None or isinstance(found, str), "a text")
    return found or ""


def _answer(stage: Stage, name: str, *given: object) -> Any:
    """Return the answer of a method of `Foretells`; None if the stage is not one."""
    if not isinstance(stage, Foretells):
        return None
    try:
        return getattr(stage, name)(*given)
    except SluiceError:
        raise
    except CALLED as error:
        if not is_users(error):
            raise
        raise _wrong(stage, name, f"raised {message_of(error)}", user_line(error)) from error


def _check(stage: Stage, name: str, found: object, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise _wrong(stage, name, f"returned {shown(found)}; it returns {wanted}")


def _wrong(stage: Stage, name: str, did: str, where: str = "") -> GraphError:
    return GraphError(
        Problem(
            where=where or line_of_code(getattr(stage, name)) or str(stage.location),
            what=f"{name}() of stage {stage.name!r} {did}",
            why="it says what the stage needs of a GPU (pipeline/declare/work.py)",
            fix="correct it, or return None if that is not known",
        )
    )
