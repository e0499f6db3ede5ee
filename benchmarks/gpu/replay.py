"""Predicts runs on GPUs from the record of a synchronous one, without GPUs.

python -m benchmarks.gpu.replay [FOLDER] [--out FILE]

FOLDER has the records that `python -m benchmarks.gpu.step --staleness 0 2 --record FOLDER` keeps; without one, those of
benchmarks/results/gpu.step.recorded.tar.xz are taken. The synchronous run is simulated as it was, and with the
staleness of each other run there, by the scheduler of real runs in virtual time. Each other run is also simulated as
it was, from its own record. Seconds per step are the means that `python -m pipeline.simulate` prints: those of steady
steps, without the last one if the record lacks it.

Aim: predicted seconds per step within 15 % of the measured ones.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import report
from pipeline.analysis.report import Report, analyse
from pipeline.simulation.recording import recorded, simulated
from pipeline.simulation.whatif import Changes

AIM = 15.0  # %
KEPT = Path(__file__).parents[1] / "results" / "gpu.step.recorded.tar.xz"


@contextmanager
def records(folder: Path | None) -> Iterator[Path]:
    """Yield the folder, or one that has the kept records."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made, tarfile.open(KEPT) as kept:
        kept.extractall(made, filter="data")
        yield Path(made)


def predicted(folder: Path) -> list[dict[str, Any]]:
    """A row per record in `folder`."""
    source, rows = recorded(folder / "0"), []
    for path in sorted(path for path in folder.iterdir() if path.name.isdecimal()):
        staleness, real = int(path.name), recorded(path)
        change = Changes(steps=real.plan.steps, max_staleness=staleness, refit="in_flight") if staleness else Changes()
        _, found = simulated(source, change)
        measured = analyse(real.events, real.plan)
        as_it_was = simulated(real, Changes())[1]
        error = _error(found, measured)
        rows.append(
            {
                "max_staleness": staleness,
                "predicted s": round(found.steps.mean, 3),
                "measured s": round(measured.steps.mean, 3),
                "error %": round(error, 1),
                "within 15 %": "its record" if not staleness else "yes" if abs(error) <= AIM else "NO",
                "as it was s": round(as_it_was.steps.mean, 3),
                "as it was, error %": round(_error(as_it_was, measured), 1),
                "steps": f"{found.steps.averaged}; measured {measured.steps.averaged}",
                "busy, predicted": _busy(found.utilisation),
                "busy, measured": _busy(measured.utilisation),
            }
        )
    return rows


def _error(simulated: Report, measured: Report) -> float:
    """How far seconds per step are off, in percent."""
    return 100 * (simulated.steps.mean / measured.steps.mean - 1)


def _busy(shares: dict[str, float]) -> str:
    return " ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of records; without one, the kept ones")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    with records(options.folder) as folder:
        rows = predicted(folder)
    notes = "Predicted from the record of the synchronous run. Aim: within 15 %."
    report("gpu.replay", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
