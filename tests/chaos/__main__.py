"""Runs ordeals one after the other for some minutes, and prints a table of their faults.

python -m tests.chaos [--minutes 30] [--seed 1] [--executor ray] [--faults 6] [--steps 24] [--out FILE]

Ends with exit code 1 at the first run that does not survive, and says which seed shows it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    ends_s, seed = time.monotonic() + 60 * options.minutes, options.seed
    blows: list[Blow] = []
    with tempfile.TemporaryDirectory(prefix="chaos") as place, small_disk(Path(place)) as disk:
        weights = undisturbed(Path(place, "undisturbed"), options.steps)
        while time.monotonic() < ends_s and (options.runs is None or seed < options.seed + options.runs):
            print(f"seed {seed}", flush=True)
            folder = Path(place, f"seed-{seed}")
            ordeal = Ordeal(seed, options.executor, folder, weights, disk, options.faults, options.steps, told=True)
            try:
                blows += ordeal.run()
            except OrdealError as failed:
                again = f"--runs 1 --seed {seed} --executor {options.executor}"
                again += f" --faults {options.faults} --steps {options.steps}"
                print(f"seed {seed} failed: {failed}\nagain: python -m tests.chaos {again}", file=sys.stderr)
                shutil.copytree(folder, Path(tempfile.gettempdir(), f"chaos-{seed}"), dirs_exist_ok=True)
                return 1
            shutil.rmtree(folder)
            seed += 1
    notes = f"{seed - options.seed} runs from seed {options.seed} on, {len(blows)} faults; every record is sound."
    report("chaos", table(blows), ["fault", "times", "went on", "median s", "most s"], notes, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
