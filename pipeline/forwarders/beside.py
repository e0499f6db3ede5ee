"""Forwards the metrics of a live run from a separate process, which ends with the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline import precedence
from pipeline.forks import closed_in_copies
from pipeline.rundir import RunDir

LAST_S = 60.0  # time to send the remaining metrics


@contextmanager
def beside(run_dir: RunDir, wanted: Mapping[str, str]) -> Iterator[None]:
    """Start `pipeline.forward` for these services, if any, and wait for it at the end. Its output goes to
    RUN/logs/forward.log; a failure is reported and does not affect the run."""
    if not wanted:
        yield
        return
    flags = [part for service, where in wanted.items() for part in (f"--{service}", where)]
    log = run_dir.logs / "forward.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            precedence.command("pipeline.forward", str(run_dir.path), *flags, "--until-eof"),
            stdin=subprocess.PIPE, stdout=file, stderr=file,
            start_new_session=True,  # so that Ctrl-C reaches only the run
        )  # fmt: skip
    assert process.stdin is not None
    closed_in_copies(process.stdin)
    try:
        yield
    finally:
        process.stdin.close()
        try:
            failed = process.wait(LAST_S) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            failed = True
        if failed:
            print(f"forwarding failed, the run did not: {_last_line(log)}", file=sys.stderr, flush=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "no output"
