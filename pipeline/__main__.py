"""The command `sluice`: `sluice run graph.py` is `python -m pipeline.run graph.py`, and so on for every command.

Unlike `python -m`, it does not search the working directory first, so a package `pipeline/` there is no obstacle.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from pipeline import precedence
from pipeline.cli.command import exit_code
from pipeline.errors import GraphError, Problem

COMMANDS = {
    "run": "check, draw, run, resume or replay a graph",
    "view": "show runs in a browser",
    "analyse": "say why a step takes as long as it does, and compare runs",
    "simulate": "predict what a change would do to a run",
    "export": "write a run as a Perfetto trace or as tables",
    "forward": "send a run's metrics to TensorBoard, W&B or MLflow",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names. Returns its exit code."""
    precedence.search_last([os.getcwd()])
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    name, *words = argv or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: {precedence.SCRIPT} COMMAND [flags]\n")
        print("\n".join(f"  {known:<10}{says}" for known, says in COMMANDS.items()))
        print("\nsluice COMMAND --help shows the flags of a command.")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise GraphError(
            Problem(
                where="command line",
                what=f"there is no command {name!r}",
                why=f"the commands are {', '.join(COMMANDS)}",
                fix=f"did you mean sluice {near[0]}?" if near else "sluice run GRAPH",
            )
        )
    return importlib.import_module(f"pipeline.{name}").main(words)


if __name__ == "__main__":
    sys.exit(main())
