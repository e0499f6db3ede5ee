"""Counts the bytes of samples in the data plane, by partition: what each put added until its groups are cleared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class Stored:
    """The bytes of one run. A put's bytes are divided evenly over its groups."""

    def __init__(self, partition_of: Mapping[str, str]) -> None:
        self._partition_of = partition_of  # by field
        self._puts: dict[str, dict[int, list[list[int]]]] = {}  # partition -> group -> its puts: [bytes, groups left]
        self._now: Counter[str] = Counter()
        self._peak: Counter[str] = Counter()
        self._total, self._total_peak = 0, 0

    def add(self, groups: Sequence[int], sizes: Mapping[str, int]) -> None:
        """Count a put of these bytes by field."""
        by_partition: Counter[str] = Counter()
        for field, size in sizes.items():
            by_partition[self._partition_of.get(field, "")] += size
        for partition, size in by_partition.items():
            put, of = [size, len(groups)], self._puts.setdefault(partition, {})
            for group in groups:
                of.setdefault(group, []).append(put)
            self._change(partition, size)

    def clear(self, groups: Iterable[int], partitions: Iterable[str]) -> None:
        """Count these partitions of groups out."""
        groups = tuple(groups)
        for partition in partitions:
            of, freed = self._puts.get(partition, {}), 0
            for group in groups:
                for put in of.pop(group, ()):
                    share = put[0] // put[1]
                    put[0] -= share
                    put[1] -= 1
                    freed += share
            self._change(partition, -freed)

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
