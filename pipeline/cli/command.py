"""What the commands share: a parser whose complaints are `GraphError`s like every other mistake of the user, and the
exit code."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.cli import console
from pipeline.errors import GraphError, Problem, SluiceError


def exit_code(command: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command on `argv`, or what the process was given; its exit code, what is wrong printed."""
    try:
        return command(list(sys.argv[1:] if argv is None else argv))
    except SluiceError as error:
        console.print_problems(error.problems)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class Parser(argparse.ArgumentParser):
    """`graph_file` is what the command is told to look at, for the command line that prints its flags."""

    graph_file = "GRAPH"

    def error(self, message: str) -> Any:
        """Raise what argparse would print."""
        flag, _, expected = message.removeprefix("argument ").partition(": ")
        unknown = expected.partition(" ")[0].partition("=")[0] if flag == "unrecognized arguments" else ""
        near = difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.75)
        raise GraphError(
            Problem(
                where=flag if flag.startswith("-") else "command line",
                what=expected if flag.startswith("-") else message,
                why="the flags are those of --help",
                fix=f"did you mean {near[0]}?" if near else f"see {self.prog} {self.graph_file} --help",
            )
        )
