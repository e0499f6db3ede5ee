"""python -m tests.journal RUN_DIR [--stall-s SECONDS]: print the violations in a run's record and what was checked."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.journal.checker import audit


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if there are no violations, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.journal", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--stall-s", type=float, metavar="SECONDS", help="the longest time in which nothing may happen")
    options = parser.parse_args(arguments)
    if not (options.run_dir / "events.jsonl").is_file():
        parser.error(f"{options.run_dir}: there is no events.jsonl; name the directory of a run")
    report = audit(options.run_dir, stall_s=options.stall_s)
    for violation in report.violations:
        print(violation)
    counts = ", ".join(f"{number} {name}" for name, number in sorted(report.counts.items()))
    ages = ", ".join(f"{age}: {number}" for age, number in sorted(report.staleness.items()))
    print(f"{sum(report.counts.values())} events ({counts})")
    print(f"trained groups by age in versions, on every rank: {ages or 'none'}")
    print(f"{'ended' if report.clean else 'not ended'}; {len(report.violations)} violations")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
