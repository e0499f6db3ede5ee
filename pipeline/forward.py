"""`python -m pipeline.forward RUN --tensorboard FOLDER | --wandb PROJECT | --mlflow URI [--follow]`: forward
the metrics of a run to other services.

Reads metrics.jsonl, so it can follow a live run or forward a finished one; `pipeline.run` with the same flags starts it
beside the run. Each step is forwarded once, with the time at which it ended: a step that a resumed run repeats keeps
its first values. Needs the service's package (pip install 'sluice-rl[tensorboard]', 'sluice-rl[wandb]',
'sluice-rl[mlflow]') and takes keys from the environment only. Exit codes: 0 done; 2 RUN, a flag or a service is wrong.

    python -m pipeline.forward runs/quickstart-... --tensorboard tb --follow
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from pipeline.cli.command import Parser, exit_code
from pipeline.cli.ended import ended_input
from pipeline.cli.listing import example
from pipeline.errors import GraphError, Problem, counted, refusals
from pipeline.forwarders import SERVICES, Described, Sink, check, errors, failure, opened
from pipeline.forwarders.step_times import StepTimes
from pipeline.precedence import typed
from pipeline.record.runs import UNFINISHED, Metrics, described_run, of_a_run, state_on_disk, tail_metrics
from pipeline.rundir import RunDir

EVERY_S = 1.0
HELP = {
    "tensorboard": ("FOLDER", "write event files to FOLDER/RUN"),
    "wandb": ("PROJECT", "log to a run of [ENTITY/]PROJECT of Weights & Biases"),
    "mlflow": ("URI", "log to the MLflow tracking server or store there"),
}


class Tail:
    """The lines of metrics.jsonl as they arrive; from the start again if a resume has truncated the file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self) -> Iterator[Metrics]:
        """Yield the lines that have arrived since the last call. Raises GraphError if one cannot be read."""
        size = self._path.stat().st_size if self._path.is_file() else 0
        if size < self._offset:
            self._offset = 0
        try:
            yield from self._read()
        except (msgspec.DecodeError, OSError):  # truncated and grown again: the offset is inside a line
            self._offset = 0
            with of_a_run(self._path):
                yield from self._read()

    def _read(self) -> Iterator[Metrics]:
        for offset, line in tail_metrics(self._path, self._offset):
            self._offset = offset
            yield line


def forward(run: Path, wanted: Mapping[str, str], *, wait: Callable[[str], bool] = lambda state: False) -> int:
    """Forward the metrics of a run to services, each with its destination; see `SERVICES`. Returns the number of steps
    that were new to one of them.

    When everything is forwarded, `wait` is called with the state of the run; it waits and returns whether to read
    again. A service that fails is skipped from then on; at the end, GraphError names each one and the reason.
    """
    sinks = {service: opened(service, where, describe(run), run) for service, where in wanted.items()}
    forwarder = _Forwarder(sinks, wanted, run)
    tail, events = Tail(RunDir(run).metrics), RunDir(run).events
    times = StepTimes(events)
    more = True
    while more:
        more = wait(state_on_disk(events)) and bool(forwarder.sinks)
        for at_s, line in times.of(tail.lines(), last=not more):  # after the last wait too
            forwarder.put(line, at_s)
    forwarder.close(state_on_disk(events))
    return sum(step > 0 for step in forwarder.new)


class _Forwarder:
    """Forwards lines to the sinks that have not failed."""

    def __init__(self, sinks: dict[str, Sink], wanted: Mapping[str, str], run: Path) -> None:
        self.sinks, self._wanted, self._run = sinks, wanted, run
        self._done = {service: sink.done for service, sink in sinks.items()}
        self._failed: list[Problem] = []
        self.new: set[int] = set()  # steps

    def put(self, line: Metrics, at_s: float) -> None:
        step = int(line["step"])
        values = {
            name: float(value) for name, value in line.items() if name != "step" and isinstance(value, int | float)
        }
        for service, sink in list(self.sinks.items()):
            if step > self._done[service]:
                self._done[service] = step
                try:
                    sink.put(step, at_s, values)
                    self.new.add(step)
                except errors(service) as error:
                    self._fail(service, error)

    def close(self, state: str) -> None:
        """Close the sinks. Raises GraphError if a service has failed."""
        for service, sink in list(self.sinks.items()):
            try:
                sink.close(state)
            except errors(service) as error:
                self._fail(service, error)
        if self._failed:
            raise GraphError(*self._failed)

    def _fail(self, service: str, error: Exception) -> None:
        del self.sinks[service]
        self._failed += failure(service, self._wanted[service], error, self._run).problems


def describe(run: Path) -> Described:
    """Return a run's description for services. Raises GraphError if it is not a run directory."""
    message = described_run(run)
    name, started = run.resolve().name, str(message.get("started", ""))
    known = hashlib.sha256(f"{name} {started}".encode()).hexdigest()[:8]
    flags = message.get("args")
    return Described(
        name=name,
        key=re.sub(r"[^\w-]", "-", name)[:48] + f"-{known}",
        graph=str(message.get("graph", "")) or name,
        flags=flags if isinstance(flags, dict) else {},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    wanted = wanted_of(options)
    if options.run is None or not wanted:
        raise GraphError(
            Problem(
                where="command line",
                what="no run is named" if options.run is None else "no service is named",
                why="the metrics of a run are forwarded to a service",
                fix=" ".join([*typed("pipeline.forward"), example(options.run), "--tensorboard tb"]),
            )
        )
    wait = _until_eof() if options.until_eof else _until_ended if options.follow else lambda state: False
    steps = forward(Path(options.run), wanted, wait=wait)
    print(f"{options.run}: {counted(steps, 'step')} forwarded to {' and '.join(wanted)}")
    return 0


def _until_ended(state: str) -> bool:
    if state != UNFINISHED:
        return False
    time.sleep(EVERY_S)
    return True


def _until_eof() -> Callable[[str], bool]:
    """Return a `wait` that ends with standard input."""
    ended = ended_input()
    return lambda state: not ended.wait(EVERY_S)


def add_services(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every service."""
    for service in SERVICES:
        metavar, says = HELP[service]
        parser.add_argument(f"--{service}", metavar=metavar, help=says)


def wanted_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the services that flags name, with their destinations. Raises GraphError with each that cannot be used."""
    wanted = {service: where for service in SERVICES if (where := getattr(options, service))}
    if problems := [each for named in wanted.items() for each in refusals(partial(check, *named))]:
        raise GraphError(*problems)
    return wanted


def _parser() -> Parser:
    parser = Parser(prog=" ".join(typed("pipeline.forward")), usage="%(prog)s RUN [flags]")
    parser.graph_file = "RUN"
    parser.epilog = "exit codes: 0 done; 2 RUN, a flag or a service is wrong"
    parser.add_argument("run", nargs="?", help="a run directory")
    add_services(parser)
    parser.add_argument("--follow", action="store_true", help="continue until the run has ended")
    parser.add_argument("--until-eof", action="store_true", help="continue until standard input ends")
    return parser


if __name__ == "__main__":
    sys.exit(main())
