"""Rows of a JSONL file, one JSON object per line. Knows the format; a `Schema` selects the columns.

Opening a file reads it once, checks every line and records where it starts; a row is parsed again when it is drawn.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import StageError
from pipeline.errors import Problem
from pipeline.reading import readable
from stages.sources.schema import Schema

EXAMPLE = 'write lines such as {"prompt": "1+1=", "answer": "2"}'


class JsonlTable:
    """The rows of one file, by number. Raises StageError with file and line if a line is invalid."""

    def __init__(self, path: Path, layout: Schema) -> None:
        self.path, self.folder = path, path.parent
        self._starts = array("Q")
        start = 0
        with readable(path, StageError, why="its rows are read before the first step", fix="make it readable"):
            self._file = path.open("rb")
            for number, line in enumerate(self._file, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    layout.read(parse(line, where), where, folder=self.folder, arrays=False)
                    self._starts.append(start)
                start += len(line)
        self._end = start

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int, where: str) -> dict[str, Any]:
        """Row `index`, counted from 0, read from the file."""
        start = self._starts[index]
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        line = os.pread(self._file.fileno(), stop - start, start)
        return parse(line, where)

    def where(self, index: int) -> str:
        """File and line of a row; counts the lines before it."""
        with self.path.open("rb") as lines:
            before, left = 0, self._starts[index]
            while left and (part := lines.read(min(left, 2**20))):
                before, left = before + part.count(b"\n"), left - len(part)
        return f"{self.path}:{before + 1}"


def first_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (file and line, the line) for each line that is not blank."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", line


def parse(line: bytes, where: str) -> dict[str, Any]:
    """Parse the object of a line. Raises StageError with one problem at `where`."""
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip())
    except (ValueError, RecursionError) as error:
        reason, fix = str(error), EXAMPLE
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        elif isinstance(error, UnicodeDecodeError):
            column = len(error.object[: error.start].decode()) + 1  # without the mark at the start of a file
            wrong = f"0x{error.object[error.start]:02x}"
            reason, fix = f"the byte {wrong} at column {column} is not UTF-8", "save the file as UTF-8"
        if line.startswith(b"\x1f\x8b"):
            reason, fix = "it is compressed", "decompress the file"
        elif where.endswith(":1") and line.lstrip().startswith(b"["):
            fix = "write the objects of a JSON list one per line: jq -c '.[]' list.json > train.jsonl"
        raise StageError(
            Problem(
                where=where,
                what=f"this line is not JSON ({reason})",
                why="every line of a JSONL file is one JSON object in UTF-8",
                fix=fix,
            )
        ) from error
    if not isinstance(row, dict):
        raise StageError(
            Problem(
                where=where,
                what=f"this line holds a JSON {'null' if row is None else type(row).__name__}, not an object",
                why="the columns are found by name",
                fix=EXAMPLE,
            )
        )
    return row
