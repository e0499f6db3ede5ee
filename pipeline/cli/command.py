"""A command-line parser that reports mistakes as `GraphError`, flag types, and exit codes.

`--help` prints one line per flag: its name and value type, its default in a separate column, and its purpose.
"""

from __future__ import annotations

import argparse
import difflib
import faulthandler
import io
import multiprocessing
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pipeline.cli import console
from pipeline.cli.output import discard, open_standard_files
from pipeline.cli.recipes import graph_path
from pipeline.engine.termination import SIGNALS
from pipeline.errors import GraphError, Problem, SluiceError, mistaken_import, shown, user_line
from pipeline.forks import exit_now, keep
from pipeline.precedence import SCRIPT, replaced
from pipeline.reading import refused
from pipeline.starting import INTERRUPTED, INTERRUPTED_CODE, started

TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_EMPTY = "\0"  # a help text that argparse does not omit
_EMPTY_VALUE = "its value is empty"
_LONG = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")  # dashes that editors put in the place of hyphens
_DASHES = ("-", *_LONG)
LEFT_S = 30.0  # for what user code leaves running at the end
LARGEST = 10**18  # whole numbers are recorded in 64 bits
DEFAULT_WIDTH = 18  # a longer default gets its own line


def exit_code(command: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command on `argv`, or on sys.argv if None; print its problems, if any, and return the exit code."""
    with console.started_here():
        return _exit_code(command, argv)


def _exit_code(command: Callable[[list[str]], int], argv: Sequence[str] | None) -> int:
    open_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that has no letter for a name is no error
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError):  # stderr is no file
            faulthandler.enable()  # a crash in C, as of a reward's library, prints the line that it came from
    try:
        started()
        if theirs := replaced():
            raise GraphError(_hidden(theirs))
        code = command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except SluiceError as error:
        console.print_problems(error.problems)
        return error.exit_code
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return INTERRUPTED_CODE
    except BrokenPipeError:  # the reader of stdout has left, as `head` does
        discard(sys.stdout)  # so that the flush at exit does not fail too
        return 141
    except Exception as error:
        problem = mistaken_import(error)
        if problem is None and isinstance(error, OSError) and not user_line(error):
            problem = refused(error)
        if problem is None:
            raise
        console.print_problems([problem])
        return 2


def end(code: int) -> NoReturn:
    """End this process, after `LEFT_S` even if threads or child processes of user code are left, or an exit handler
    does not return; at a signal, at once."""

    def leave() -> None:
        main = threading.main_thread()
        threads = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
        left = ", ".join([*threads, *(child.name for child in multiprocessing.active_children())])
        try:
            print(f"still running after {LEFT_S:g} s, and not waited for: {left or 'an exit handler'}", file=sys.stderr)
        finally:
            exit_now(code)

    keep(os.getpid())  # an exit handler of user code does not change how the run ended
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: exit_now(code))  # the run is over: its code says how
    timer = threading.Timer(LEFT_S, leave)
    timer.daemon = True
    timer.start()
    sys.exit(code)


def _hidden(theirs: Path) -> Problem:
    return Problem(
        where=str(theirs),
        what="it takes the place of Sluice's package 'pipeline'",
        why="python -m searches the working directory and PYTHONPATH first",
        fix=f"rename it, or use the command {SCRIPT}, as in {SCRIPT} run graph.py",
    )


def whole(text: str) -> int:
    """Parse the value of a flag that takes a whole number."""
    try:
        value = int(text)
    except ValueError:  # also for thousands of digits
        raise argparse.ArgumentTypeError(f"expected a whole number, got {shown(text)}") from None
    if abs(value) >= LARGEST:
        raise argparse.ArgumentTypeError(f"expected a whole number of at most 18 digits, got {shown(text)}")
    return value


def natural(text: str) -> int:
    """Parse the value of a flag that takes a whole number, 0 or more."""
    if (value := whole(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {text!r}")
    return value


def number(text: str) -> float:
    """Parse the value of a flag that takes a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def above_0(text: str) -> float:
    """Parse the value of a flag that takes a number above 0."""
    if not 0 < (value := number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def filled(text: str) -> str:
    """Parse the value of a flag that takes a text."""
    if not text.strip():
        raise argparse.ArgumentTypeError(_EMPTY_VALUE)
    return text


def truth(text: str) -> bool:
    """Parse the value of a flag that is on or off."""
    if text.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return TRUTHS[text.lower()]


def chosen(value: Any, choices: Iterable[Any]) -> Any:
    """Return `value`. Raises ArgumentTypeError if it is not one of the choices."""
    words = [str(choice) for choice in choices]
    if str(value) not in words:
        near = difflib.get_close_matches(str(value), words, n=1)
        did_you = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(words)}, got {str(value)!r}{did_you}")
    return value


def one_of(*words: str) -> dict[str, Any]:
    """Return the argparse settings of a flag that takes one of these words."""
    return {"type": lambda text: chosen(text, words), "metavar": braces(words)}


def braces(words: Iterable[Any]) -> str:
    """Format a choice for a usage line."""
    return "{" + ",".join(map(str, words)) + "}"


def add_switch(group: Any, option: str, parse: Callable[[str], Any], **settings: Any) -> Any:
    """Add an on/off flag: `--name`, `--no-name`, or with a value, `--name true` or `--name=false`."""
    switch = group.add_argument(option, nargs="?", const=True, type=parse, metavar="BOOL", **settings)
    switch.negated = f"--no-{option.removeprefix('--')}"
    group.add_argument(switch.negated, action="store_const", const=False, **settings | {"help": argparse.SUPPRESS})
    return switch


class Help(argparse.HelpFormatter):
    """Formats one line per flag, with the defaults of each flag group in one column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)
        self._widths: dict[int, int] = {}  # id of the action -> width of its defaults column

    def add_arguments(self, actions: Iterable[argparse.Action]) -> None:
        actions = list(actions)
        width = min(max(len(default_of(action)) for action in actions), DEFAULT_WIDTH) if actions else 0
        self._widths |= {id(action): width for action in actions}
        super().add_arguments(actions)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        negated = getattr(action, "negated", None)
        return f"{action.option_strings[0]}, {negated}" if negated else super()._format_action_invocation(action)

    def _format_action(self, action: argparse.Action) -> str:
        width = self._widths.get(id(action), 0)
        if action.help is argparse.SUPPRESS or not width:
            return super()._format_action(action)
        self._default = f"{default_of(action):<{width}}  "
        action.help = action.help or _EMPTY
        formatted = super()._format_action(action)
        del self._default
        return formatted

    def _split_lines(self, text: str, width: int) -> list[str]:
        default = getattr(self, "_default", "")
        taken = min(len(default), DEFAULT_WIDTH + 2)
        lines = super()._split_lines(text.replace(_EMPTY, ""), max(width - taken, 20)) or [""]
        if len(default) > DEFAULT_WIDTH + 2:
            return [default.rstrip(), *(" " * (DEFAULT_WIDTH + 2) + line for line in lines)]
        return [(default + lines[0]).rstrip(), *(" " * len(default) + line for line in lines[1:])]


def default_of(action: argparse.Action) -> str:
    """Return a flag's default as the help shows it; empty if there is none to show."""
    default = getattr(action, "shown", action.default)
    if action.nargs == 0 or default in (None, argparse.SUPPRESS, []):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def _value_of(action: argparse.Action) -> str:
    """Return a value that a flag takes, as typed: its default, or the first of its choices; empty if it has neither."""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    first = metavar.strip("{}").partition(",")[0] if metavar.startswith("{") else ""
    return shlex.quote(value) if (value := default_of(action) or first) else ""


class Parser(argparse.ArgumentParser):
    """A parser that raises GraphError. `graph_file` names the command's argument in "see ... --help" messages."""

    graph_file = "GRAPH"

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=Help, **settings)
        self._ends = False  # whether "--" ends the flags
        self.register("type", None, filled)  # the type of every argument that names no other

    @property
    def options(self) -> set[str]:
        """The flags that the parser has, as typed."""
        return set(self._option_string_actions)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments. A switch takes no value if the graph file or another flag follows it."""
        own = {option.lower() for option in self._option_string_actions}
        if dashed := [word for word in args if word.startswith(_LONG) and _spelled(word) in own]:
            raise GraphError(*map(self._unknown, dashed))
        self._ends = "--" in args
        words: list[str] = []
        for word, following in zip(args, [*args[1:], "--"]):
            is_switch = hasattr(self._option_string_actions.get(word), "negated")
            alone = following.startswith("-") or following == self.graph_file
            words.append(f"{word}=true" if is_switch and alone else word)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> Any:
        """Raise GraphError with the message that argparse would print."""
        flag, _, said = message.removeprefix("argument ").partition(": ")
        if flag == "unrecognized arguments":
            raise GraphError(*self._unrecognized(said))
        if not flag.startswith("-"):
            raise GraphError(Problem(where="command line", what=message, why="--help lists the flags", fix=self._see))
        if said in ("expected one argument", _EMPTY_VALUE):
            what = "its value is missing" if said != _EMPTY_VALUE else said
            example = f"{flag} {self._option_string_actions[flag].metavar or 'VALUE'}"
            raise GraphError(Problem(where=flag, what=what, why="this flag needs one", fix=example))
        if said.startswith("ignored explicit argument"):
            fix = f"{flag}, or --{flag.removeprefix('--no-')}=false" if flag.startswith("--no-") else flag
            raise GraphError(Problem(where=flag, what="it was given a value", why="this flag takes none", fix=fix))
        if said.startswith("not allowed with argument "):
            other = said.removeprefix("not allowed with argument ")
            what, why = f"it cannot be combined with {other}", "a command does one of the two"
            raise GraphError(Problem(where=flag, what=what, why=why, fix=f"leave out {flag} or {other}"))
        what, _, near = said.partition("; did you mean ")
        value = near.removesuffix("?") or _value_of(self._option_string_actions[flag])
        fix = f"{flag} {value}" if value else self._see
        raise GraphError(Problem(where=flag, what=what, why="--help lists the flags", fix=fix))

    @property
    def _see(self) -> str:
        named = "" if self.graph_file.isupper() else f" {self.graph_file}"  # a word that stands for a file is left out
        return f"see {self.prog}{named} --help"

    def _unrecognized(self, said: str) -> list[Problem]:
        if self._ends:
            what, why = "it ends the flags", "no word after it is read as a flag"
            return [Problem(where="--", what=what, why=why, fix="leave out --")]
        return [self._unknown(word) for word in said.split() if word.startswith(_DASHES)] or [self._unknown(said)]

    def _unknown(self, word: str) -> Problem:
        """Return the problem of an unknown argument, with the flags that it may stand for."""
        is_flag, near = word.startswith(_DASHES), self._near(_spelled(word))
        return Problem(
            where=word if is_flag else "command line",
            what="there is no such flag" if is_flag else f"unexpected argument {word!r}",
            why=f"a flag begins with --, not with {word[0]}" if word.startswith(_LONG) else "--help lists the flags",
            fix=f"did you mean {near}?" if near else self._see,
        )

    def _near(self, flag: str) -> str:
        """Return the flags that a mistyped one may stand for: its spelling, what it begins, the most similar, or what
        it ends."""
        known = {option.lower(): option for option in sorted(self._option_string_actions)}
        if flag == "--version":
            return f"{SCRIPT} --version"
        near = [option for option in known if option == flag] or [
            option for option in known if option.startswith(flag) and flag != "--"
        ]
        near = near or difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
        near = near or [option for option in known if len(flag) > 4 and option.endswith(flag.lstrip("-"))]
        *others, last = [known[option] for option in near[:3]] or [""]
        return f"{', '.join(others)} or {last}" if others else last


def _spelled(word: str) -> str:
    """Return the flag that a word would be with two hyphens, in lower case."""
    return "--" + word.partition("=")[0].lstrip("".join(_DASHES)).lower().replace("_", "-")


def graph_named(argv: Sequence[str], positional: str | None) -> str | None:
    """Return the graph of a command line: the first argument, or the first Python file or recipe if flags come before
    it."""
    if positional is None or graph_path(positional).exists():
        return positional
    words = (word for word in argv if not word.startswith("-"))
    return next((word for word in words if word.endswith(".py") or graph_path(word).is_file()), positional)
