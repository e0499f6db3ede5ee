"""`python -m pipeline.view [RUN_OR_FOLDER]`: the web view of a run, or of a folder of runs.

Prints its address, which includes the access token, and serves until it is stopped. Live, finished and crashed runs are
shown alike. It writes nothing and sends no request off this machine. Exit codes: 0 stopped; 2 the folder or a flag is
wrong.

    python -m pipeline.view                     # runs/
    python -m pipeline.view runs/quickstart-20260101-120000 --port 8123 --no-open
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline import precedence
from pipeline.cli.command import Parser, exit_code, whole
from pipeline.cli.listing import example
from pipeline.errors import GraphError, Problem
from pipeline.forks import closed_in_copies
from pipeline.precedence import typed
from pipeline.rundir import RUNS, RunDir
from pipeline.web.guard import is_run_name

END_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    parser = Parser(prog=" ".join(typed("pipeline.view")), usage="%(prog)s [RUN_OR_FOLDER] [flags]")
    parser.graph_file = "RUN_OR_FOLDER"
    parser.add_argument("runs", nargs="?", default=RUNS, help="a run directory, or a folder of them")
    parser.add_argument("--port", type=whole, default=0, metavar="N", help="port to listen on; 0 picks a free one")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--while-stdin", action="store_true", help="stop when standard input ends")
    options = parser.parse_args(argv)
    folder, name = _folder(Path(options.runs))
    if not 0 <= options.port < 1 << 16:
        raise GraphError(
            Problem(
                where=f"--port {options.port}",
                what="it is not a port",
                why="ports are numbers from 0 to 65535",
                fix="use --port 0, which picks a free port",
            )
        )
    token = secrets.token_urlsafe(24)

    def ready(port: int) -> None:
        address = f"http://127.0.0.1:{port}/?token={token}" + (f"#/{name}/graph" if name else "")
        print(address, flush=True)
        if not options.no_open:
            webbrowser.open(address)

    with suppress(asyncio.CancelledError):
        asyncio.run(_serve(folder, token, options.port, ready, while_stdin=options.while_stdin))
    return 0


@contextmanager
def beside(run: Path) -> Iterator[None]:
    """Serve a run in a separate process, which prints its address and ends with the block or this process."""
    process = subprocess.Popen(precedence.command("pipeline.view", str(run), "--while-stdin"), stdin=subprocess.PIPE)
    assert process.stdin is not None
    closed_in_copies(process.stdin)
    try:
        yield
    finally:
        process.terminate()
        process.wait(END_S)


def _folder(path: Path) -> tuple[Path, str]:
    """Return the folder of runs as a command may name it, and the run to show first, if any. Raises GraphError if there
    is no folder."""
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if RunDir(path).run_json.is_file() or RunDir(path).plan.is_file():
        given, path = path, path.resolve()
        if not is_run_name(path.name):
            raise GraphError(
                Problem(
                    where=str(path),
                    what="its name has a character that cannot be shown",
                    why="a run is addressed by the name of its folder",
                    fix="rename the folder",
                )
            )
        is_its_place = given.name == path.name and given.parent.resolve() == path.parent  # else a link, or `.`
        return (given if is_its_place else path).parent, path.name
    if not path.is_dir():
        raise GraphError(
            Problem(
                where=str(path),
                what="there is no such folder",
                why="the view shows a run directory, or a folder of them",
                fix=" ".join([*typed("pipeline.view"), example()]),
            )
        )
    next(path.iterdir(), None)  # raises if it cannot be read
    return path, ""


async def _serve(folder: Path, token: str, port: int, ready: Callable[[int], None], *, while_stdin: bool) -> None:
    from pipeline.web.server import serve

    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    if while_stdin:
        loop.add_reader(sys.stdin, task.cancel)
    try:
        await serve(folder, token, port, ready)
    except OSError as error:
        raise GraphError(
            Problem(
                where=f"--port {port}",
                what=f"the server cannot listen on it: {error.strerror}",
                why="the view is served on this machine's loopback address",
                fix="use --port 0, which picks a free port",
            )
        ) from error


if __name__ == "__main__":
    sys.exit(main())
