"""A field is one typed column. Knows names and types, not tensors.

    ADVANTAGE = Field("advantage", dtype="float32", dims="N", unit="1")
    LOGPROBS = Field("rollout_logprobs", dtype="float32", dims="N T", unit="nat", high=0.0)
    PIXELS = Field("pixel_values", dtype="bfloat16", dims="N Q 1176", unit="1")

`dims` is a list of symbols. `N` means one entry per sample. A second symbol that is a name (`T` response tokens, `P`
prompt tokens, or any other) is ragged: its length differs between samples, and fields with the same symbol share the
lengths. Integers after that are fixed sizes. Empty `dims` means one entry per step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.errors import shown

TENSOR_DTYPES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
WEIGHTS = "weights"  # the bytes are in a model, not in the data plane; the handle carries version and hash
ANY = "any"  # of a reader that takes numbers, truths and texts as they are written
DTYPES = (*TENSOR_DTYPES, "str", ANY, WEIGHTS)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_RAGGED = re.compile(r"[A-Z][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Field:
    """One typed column. `low` and `high` are inclusive bounds that every put checks; NaN and infinity never pass.
    `hint` is the fix to suggest if a stage reads the field and none writes it.

    Raises ValueError if name, dtype or dims do not follow the grammar above.
    """

    name: str
    dtype: str
    dims: str = "N"
    unit: str = "1"
    low: float | None = None
    high: float | None = None
    hint: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(
                f"field name {shown(self.name)} is not lower-case letters, digits and underscores (64 at most)"
            )
        if self.dtype not in DTYPES:
            known = ", ".join(dtype for dtype in DTYPES if dtype != ANY)
            raise ValueError(f"field {self.name!r}: dtype {self.dtype!r} is not one of {known}")
        symbols = self.dims.split()
        if (self.dtype == WEIGHTS) != (not symbols):
            raise ValueError(f"field {self.name!r}: dims are empty for dtype 'weights', and for no other")
        if symbols and symbols[0] != "N":
            raise ValueError(f"field {self.name!r}: dims {self.dims!r} do not start with N")
        rest = symbols[2:] if self.ragged else symbols[1:]
        if not all(symbol.isdigit() and int(symbol) > 0 for symbol in rest):
            raise ValueError(
                f"field {self.name!r}: dims {self.dims!r} have more than one ragged dimension, or it is late"
            )
        if self.dtype == "str" and len(symbols) > 1:
            raise ValueError(f"field {self.name!r}: a str field is one text per sample, dims 'N'")

    @cached_property
    def ragged(self) -> str | None:
        """The symbol of the ragged dimension, or None."""
        symbols = self.dims.split()
        return symbols[1] if len(symbols) > 1 and symbols[1] != "N" and _RAGGED.match(symbols[1]) else None

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The fixed trailing dimensions."""
        return tuple(int(symbol) for symbol in self.dims.split() if symbol.isdigit())

    @property
    def per_step(self) -> bool:
        """One entry per step instead of one per sample."""
        return not self.dims

    def agrees_with(self, other: Field) -> bool:
        """Return whether a reader that declares `other` may read the columns of this field's writer."""
        same = (self.name, self.dims, self.unit) == (other.name, other.dims, other.unit)
        return same and other.dtype in (self.dtype, ANY)

    def bounded(self, *, low: float | None = None, high: float | None = None) -> Field:
        """Return the field with tighter bounds, such as a vocabulary size that is known once a model is loaded."""
        return Field(
            self.name,
            self.dtype,
            self.dims,
            self.unit,
            self.low if low is None else low,
            self.high if high is None else high,
            self.hint,
        )


ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "str": 32,
    ANY: 32,
    WEIGHTS: 0,
}  # a str is counted as 32 bytes in estimates
