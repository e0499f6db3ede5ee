"""Downloads of the view: a run as one HTML file, as a trace, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.analysis.perfetto import perfetto
from pipeline.analysis.tables import metrics_csv, spans_csv
from pipeline.record.runs import consistent


def _offline(path: Path) -> Iterator[str]:
    from pipeline.web.offline import offline

    return offline(path)


def _of(make: Callable[[Path], Iterator[str]]) -> Callable[[Path], Iterator[str]]:
    """Make the download raise GraphError, whatever is wrong with the run."""

    def pieces(path: Path) -> Iterator[str]:
        with consistent(path):
            yield from make(path)

    return pieces


EXPORTS: dict[str, tuple[str, str, Callable[[Path], Iterator[str]]]] = {
    "html": (".html", "text/html", _of(_offline)),
    "perfetto": (".perfetto.json", "application/json", _of(perfetto)),
    "spans": (".spans.csv", "text/csv", _of(spans_csv)),
    "metrics": (".metrics.csv", "text/csv", _of(metrics_csv)),
}
