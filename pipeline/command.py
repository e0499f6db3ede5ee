"""The command lines' parser: an unknown or wrong flag is a `GraphError` like every other mistake of the user."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from pipeline.errors import GraphError, Problem


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
