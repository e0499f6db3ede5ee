"""`python -m pipeline.mirror RUN URL [--follow]`, `python -m pipeline.mirror --fetch URL/RUN FOLDER [--step N]`: keep a
copy of a run's checkpoints and record in other storage, and fetch it from there.

URL is a folder of any storage that fsspec reaches: s3://, gs://, sftp://, a path. The run gets a folder of its name
there. `pipeline.run --mirror URL` copies while the run goes on. Keys come from where the storage's package looks for
them; an address with a password is refused. Exit codes: 0 done; 2 RUN, URL or a flag is wrong; 6 the storage or the
disk fails, or no checkpoint is complete.

    python -m pipeline.mirror runs/quickstart-... s3://bucket/runs --follow
    python -m pipeline.mirror --fetch s3://bucket/runs/quickstart-... runs/fetched
"""

from __future__ import annotations

import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pipeline.cli.command import Parser, exit_code, natural
from pipeline.cli.console import print_problems
from pipeline.cli.ended import ended_input
from pipeline.cli.listing import example
from pipeline.cli.recipes import graph_path
from pipeline.cli.resume import recorded
from pipeline.errors import GraphError, Problem, SluiceError
from pipeline.mirrors.beside import SILENT_S, Said
from pipeline.mirrors.fetched import fetch
from pipeline.mirrors.mirror import Mirror
from pipeline.mirrors.remote import check_apart, opened
from pipeline.precedence import typed
from pipeline.record.runs import UNFINISHED, described_run, state_on_disk
from pipeline.rundir import RunDir

EVERY_S, MOST_S, LAST_TRIES = 1.0, 60.0, 3  # between looks; after a failure at most; tries once the run has ended
TELL_S = 1.0  # between lines about the bytes that have arrived

Tell = Callable[[Said], None]


def follow(mirror: Mirror, ended: Callable[[float], bool], tell: Tell) -> None:
    """Keep a mirror complete until the run has ended. `ended` waits for some seconds and says whether it has.

    If the storage fails, the run does not: it is tried again, after at most a minute. Raises CheckpointError if it
    still fails after the run has ended.
    """
    failing, wait_s, tries = "", 0.0, 0
    while True:
        last = ended(wait_s)
        try:
            mirror.update()
            if last:
                mirror.send_record()
        except SluiceError as error:
            tries += last
            if tries == LAST_TRIES:
                raise
            if failing != str(error):
                tell(Said(problem=_retried(error.problems[0])))
            failing, wait_s = str(error), min(MOST_S, 5.0 if last else 2 * max(wait_s, EVERY_S))
        else:
            if failing:
                tell(Said(text="the storage works again"))
            if last:
                return
            failing, wait_s = "", EVERY_S


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    before = os.umask(0o077)  # what is written is as private as a run
    try:
        return exit_code(_main, argv)
    finally:
        os.umask(before)


def _main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.fetch:
        _fetch(options.fetch, options.run, options.url, options.step)
        return 0
    if options.run is None or options.url is None or options.step is not None:
        raise GraphError(
            Problem(
                where="command line",
                what="--step is given without --fetch" if options.step is not None else "no run or no address is named",
                why="a run is mirrored to an address, or fetched from one",
                fix=" ".join(
                    [*typed("pipeline.mirror"), example(options.run), shlex.quote(options.url or "s3://bucket/runs")]
                ),
            )
        )
    run = RunDir(Path(options.run))
    described_run(run.path)  # raises if it is not a run directory
    tell = _as_json if options.until_eof else _as_text
    try:
        _mirror(run, options.url, tell, until_eof=options.until_eof, follows=options.follow)
    except SluiceError as error:
        for problem in error.problems:
            tell(Said(problem=problem))
        return error.exit_code
    return 0


def _mirror(run: RunDir, url: str, tell: Tell, *, until_eof: bool, follows: bool) -> None:
    progress = _CopyProgress(tell)
    check_apart(url, run.path, flag="--mirror" if until_eof else "URL")
    remote = opened(url, flag="--mirror" if until_eof else "URL").within(run.path.resolve().name)
    mirror = Mirror(run, remote, progress.copied)
    with suppress(ValueError, OSError):  # all files of a checkpoint are open at once
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    mirror.begin()
    tell(Said(text=f"mirrored at {remote.url}"))
    follow(mirror, _ended_driver(progress) if until_eof else _ended_run(run, follows=follows), tell)
    tell(Said(text=f"{remote.url} has every checkpoint of the run"))


def _fetch(url: str, folder: str | None, more: str | None, step: int | None) -> None:
    if folder is None or more is not None:
        raise GraphError(
            Problem(
                where=f"--fetch {url}",
                what="it needs one folder",
                why="the run is fetched into a new run directory",
                fix=f"--fetch {url} runs/fetched",
            )
        )
    run = RunDir(Path(folder))
    arrived = _Arrived()
    done, damaged = fetch(opened(url, flag="--fetch"), run, step, arrived.add)
    print_problems(msgspec.structs.replace(problem, warning=True) for problem in damaged)
    graph = recorded(folder).file
    named = graph if graph_path(graph).is_file() else str(run.graph)
    again = [*typed("pipeline.run"), named, "--run-dir", folder, "--resume"]
    print(f"{folder}: the checkpoint after {done} steps, {arrived.bytes:,} bytes\nresume: {shlex.join(again)}")


class _Arrived:
    """Counts bytes, also of several threads: a lost update makes a progress line wrong, and nothing else."""

    bytes = 0

    def add(self, size_bytes: int) -> None:
        self.bytes += size_bytes


class _CopyProgress:
    """Tells at most once per second how far a checkpoint is."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._last_s, self._deadline = tell, 0.0, False

    def set_deadline(self) -> None:
        """From now on the process ends if no byte arrives for a while."""
        self._deadline = True
        signal.alarm(int(SILENT_S))

    def copied(self, step: int, arrived: int, size_bytes: int) -> None:
        if self._deadline:
            signal.alarm(int(SILENT_S))
        if arrived == size_bytes or time.monotonic() > self._last_s + TELL_S:
            self._last_s = time.monotonic()
            far = f"step {step}: {arrived:,} of {size_bytes:,} bytes"
            self._tell(Said(text=far) if arrived == size_bytes else Said(progress=far))


def _retried(problem: Problem) -> Problem:
    why = f"{problem.why}; the run goes on, and the storage is tried again"
    return msgspec.structs.replace(problem, why=why, warning=True)


def _ended_driver(progress: _CopyProgress) -> Callable[[float], bool]:
    """Wait for the end of standard input; from then on nobody else ends a process whose storage does not answer."""
    over = ended_input(progress.set_deadline)

    def ended(wait_s: float) -> bool:
        if over.is_set():
            time.sleep(wait_s)
        return over.wait(wait_s)

    return ended


def _ended_run(run: RunDir, *, follows: bool) -> Callable[[float], bool]:
    def ended(wait_s: float) -> bool:
        time.sleep(wait_s)
        return not follows or state_on_disk(run.events) != UNFINISHED

    return ended


def _as_text(said: Said) -> None:
    if said.problem:
        print_problems([said.problem])
    else:
        print(said.text or said.progress, flush=True)


def _as_json(said: Said) -> None:
    print(msgspec.json.encode(said).decode(), flush=True)


def _parser() -> Parser:
    parser = Parser(prog=" ".join(typed("pipeline.mirror")), usage="%(prog)s RUN URL [flags]")
    parser.graph_file = "RUN"
    parser.epilog = "exit codes: 0 done; 2 RUN, URL or a flag is wrong; 6 the storage or the disk fails"
    parser.add_argument("run", nargs="?", help="a run directory; with --fetch, the one to make")
    parser.add_argument("url", nargs="?", help="a folder of any storage that fsspec reaches, such as s3://bucket/runs")
    parser.add_argument("--follow", action="store_true", help="continue until the run has ended")
    parser.add_argument("--fetch", metavar="URL", help="make the run directory from the mirrored run at URL")
    parser.add_argument("--step", type=natural, metavar="N", help="fetch the checkpoint after N steps, not the newest")
    parser.add_argument("--until-eof", action="store_true", help="continue until standard input ends; print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
