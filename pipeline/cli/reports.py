"""Prints the reports of simulated runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.analysis.report import Report
from pipeline.cli import console


def print_reports(name: str, reports: Mapping[str, Report], notes: Sequence[str], *, tokens: int = 0) -> None:
    """Print the reports side by side, then the notes. `tokens` are those of the responses of a foretold step."""
    from rich.table import Table

    table = Table(name, *reports, box=None, padding=(0, 2, 0, 0))
    rows = [_rows(report, tokens) for report in reports.values()]
    for label in dict.fromkeys(label for row in rows for label in row):
        table.add_row(label, *(row.get(label, "-") for row in rows))
    out = console.console()
    out.print(table)
    for column, report in reports.items():
        out.print(f"{column}: {report.critical_path.sentence}", markup=False)
    for note in notes:
        out.print(f"note: {note}", markup=False)


def _rows(report: Report, tokens: int) -> dict[str, str]:
    rows = {
        "step, mean": f"{report.steps.mean:.3f} s",
        "step, median": f"{report.steps.median:.3f} s",
        "first steps": " ".join(f"{seconds:.2f}" for seconds in report.steps.warm_up) + " s",
    }
    rows |= {f"{name} busy": f"{100 * share:.0f} %" for name, share in report.utilisation.items()}
    if tokens:
        rows["response tokens/s"] = f"{tokens / report.steps.mean:,.0f}" if report.steps.mean else "-"
    else:
        rows["cores busy"] = f"{report.cores:.2f}"
    total = sum(report.staleness.samples.values())
    for age, count in report.staleness.samples.items():
        rows[f"samples {age} versions old"] = f"{100 * count / total:.1f} %"
    rows["dropped"] = f"{report.dropped.groups} groups, {100 * report.dropped.share:.1f} %"
    rows |= {f"dropped: {reason}": str(count) for reason, count in report.dropped.by_reason.items()}
    for bucket in report.dropped.by_length if report.dropped.groups else ():
        rows[f"dropped of {bucket.low} to {bucket.high} tokens"] = f"{bucket.dropped} of {bucket.admitted}"
    for stage, seconds in report.critical_path.by_stage.items():
        rows[f"on the path: {stage}"] = f"{seconds:.3f} s"
    return rows
