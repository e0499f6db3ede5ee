"""The command `sluice`: `sluice run graph.py` is `python -m pipeline.run graph.py`, and so on for every command.

Unlike `python -m`, it does not search the working directory first, so a package `pipeline/` there is no obstacle.
"""

from __future__ import annotations

import difflib
import importlib
import shlex
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from pipeline import precedence
from pipeline.cli.command import end, exit_code
from pipeline.errors import GraphError, Problem

COMMANDS = {
    "run": "check, draw, run, resume or replay a graph",
    "new": "copy a recipe, to edit",
    "view": "show runs in a browser",
    "analyse": "say why a step takes as long as it does, and compare runs",
    "simulate": "predict what a change would do to a run",
    "export": "write a run as a Perfetto trace, as tables, as its samples, or as its model",
    "forward": "send a run's metrics to TensorBoard, W&B or MLflow",
    "mirror": "copy a run's checkpoints and record to other storage, and fetch them",
}
_HELP = ("help", "-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names. Returns its exit code."""
    precedence.search_last([precedence.working_directory()])
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    name, *words = argv or ["help"]
    if name in _HELP:
        if words and words[0] not in _HELP:
            return _main([words[0], "--help"])
        print(f"usage: {precedence.SCRIPT} COMMAND [flags]\n")
        print("\n".join(f"  {known:<10}{says}" for known, says in COMMANDS.items()))
        print("\nsluice COMMAND --help shows the flags of a command; sluice --version, the version.")
        return 0
    if name in ("version", "-V", "--version"):
        print(f"{precedence.SCRIPT} {metadata.version(precedence.DISTRIBUTION)}")
        return 0
    if name not in COMMANDS:
        raise GraphError(
            Problem(
                where="command line",
                what=f"there is no command {name!r}",
                why=f"the commands are {', '.join(COMMANDS)}",
                fix=_fix(name, words),
            )
        )
    return importlib.import_module(f"pipeline.{name}").main(words)


def _fix(name: str, words: list[str]) -> str:
    near = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
    if name.endswith(".py"):
        return f"did you mean {shlex.join([precedence.SCRIPT, 'run', name, *words])}?"
    return f"did you mean sluice {near[0]}?" if near else "sluice run GRAPH, or sluice help"


def script() -> NoReturn:
    """Run the command and end this process."""
    end(main())


if __name__ == "__main__":
    script()
