"""Runs ordeals for some minutes, and prints a table of their faults.

python -m tests.chaos [--minutes 30] [--seed 1] [--executor ray] [--faults 6] [--steps 24] [--at-once 1]
                      [--out FILE]

Ends with exit code 1 after the first run that does not survive, and says which seed shows it again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import report
from tests.chaos.ordeal import Blow, Ordeal, OrdealError, table, undisturbed

DISK_MIB = 64


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a small disk in memory at `folder`; None without the right to."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "chaos", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


class Hunt:
    """The runs of one command: threads take the next seed until the time is over or a run has failed."""

    def __init__(self, options: argparse.Namespace, ends_s: float) -> None:
        self.blows: list[Blow] = []
        self.survived, self.failed = 0, False
        self._options, self._ends_s = options, ends_s
        self._seeds = itertools.islice(itertools.count(options.seed), options.runs)

    def run_ordeals(self, _number: int) -> None:
        """Run ordeals one after the other on a disk of their own."""
        options = self._options
        with tempfile.TemporaryDirectory(prefix="chaos") as place, small_disk(Path(place)) as disk:
            weights = undisturbed(Path(place, "undisturbed"), options.steps)
            while time.monotonic() < self._ends_s and not self.failed and (seed := next(self._seeds, None)) is not None:
                print(f"seed {seed}", flush=True)
                folder = Path(place, f"seed-{seed}")
                ordeal = Ordeal(seed, options.executor, folder, weights, disk, options.faults, options.steps, told=True)
                try:
                    self.blows += ordeal.run()
                except OrdealError as failed:
                    self._report(seed, failed, folder)
                    return
                self.survived += 1
                shutil.rmtree(folder)

    def _report(self, seed: int, failed: OrdealError, folder: Path) -> None:
        """Say which run failed and how to see it again, and keep its folder."""
        options, self.failed = self._options, True
        again = f"--runs 1 --seed {seed} --executor {options.executor}"
        again += f" --faults {options.faults} --steps {options.steps}"
        print(f"seed {seed} failed: {failed}\nagain: python -m tests.chaos {again}", file=sys.stderr, flush=True)
        shutil.copytree(folder, Path(tempfile.gettempdir(), f"chaos-{seed}"), dirs_exist_ok=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no further run begins")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count up")
    parser.add_argument("--runs", type=int, help="how many at most")
    parser.add_argument("--executor", choices=("ray", "local"), default="ray")
    parser.add_argument("--faults", type=int, default=6, help="of a run, at most")
    parser.add_argument("--steps", type=int, default=24, help="of a run")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, each with a disk of its own")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    hunt = Hunt(options, time.monotonic() + 60 * options.minutes)
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(hunt.run_ordeals, range(options.at_once)))
    if hunt.failed:
        return 1
    blows = hunt.blows
    notes = f"{hunt.survived} runs from seed {options.seed} on, {len(blows)} faults; every record is sound."
    report("chaos", table(blows), ["fault", "times", "went on", "median s", "most s"], notes, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
