"""Downloads of the view: a run as one HTML file, as a trace, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.analysis.perfetto import perfetto
from pipeline.analysis.tables import metrics_csv, spans_csv


def _offline(path: Path) -> Iterator[str]:
    from pipeline.web.offline import offline

    return offline(path)


EXPORTS: dict[str, tuple[str, str, Callable[[Path], Iterator[str]]]] = {
    "html": (".html", "text/html", _offline),
    "perfetto": (".perfetto.json", "application/json", perfetto),
    "spans": (".spans.csv", "text/csv", spans_csv),
    "metrics": (".metrics.csv", "text/csv", metrics_csv),
}
