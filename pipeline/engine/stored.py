"""Counts the bytes of samples in the data plane: what each put adds until its groups are cleared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class Stored:
    """The bytes of one run, by field and group. `fields` are those of each partition."""

    def __init__(self, fields: Mapping[str, Sequence[str]]) -> None:
        self._fields = fields
        self._partition_of = {field: partition for partition, own in fields.items() for field in own}
        self._of: dict[str, dict[int, int]] = {}  # field -> group -> bytes
        self._now: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._total, self._total_peak = 0, 0

    def add(self, groups: Sequence[int], sizes: Mapping[str, Sequence[int]]) -> None:
        """Count a put: by field, the bytes of each group."""
        for field, of_groups in sizes.items():
            of = self._of.setdefault(field, {})
            for group, size in zip(groups, of_groups, strict=True):
                of[group] = of.get(group, 0) + size
            self._change(self._partition_of.get(field, ""), sum(of_groups))

    def largest(self, field: str, groups: Iterable[int]) -> int:
        """Return the bytes that the largest of these groups has of a field."""
        of = self._of.get(field, {})
        return max((of.get(group, 0) for group in groups), default=0)

    def clear(self, groups: Iterable[int], partitions: Iterable[str]) -> None:
        """Count these partitions of groups out."""
        groups = tuple(groups)
        for partition in partitions:
            ofs = [self._of.get(field, {}) for field in self._fields.get(partition, ())]
            self._change(partition, -sum(of.pop(group, 0) for of in ofs for group in groups))

    def peaks(self) -> dict[str, float]:
        """Return the most bytes since the last call, in all partitions together and in each, as metrics of a step."""
        found = {"stored/peak_bytes": float(self._total_peak)}
        found |= {f"stored/peak_bytes_{name.partition('.')[2]}": float(peak) for name, peak in self._peak.items()}
        self._peak, self._total_peak = Counter(self._now), self._total
        return found

    @property
    def now_bytes(self) -> int:
        """The bytes in all partitions."""
        return self._total

    def _change(self, partition: str, size: int) -> None:
        self._now[partition] += size
        self._total += size
        self._peak[partition] = max(self._peak[partition], self._now[partition])
        self._total_peak = max(self._total_peak, self._total)
