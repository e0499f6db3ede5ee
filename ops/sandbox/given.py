"""What a sandbox may be given, and what, why and fix of what it may not. Pure.

refuse(limits.problems())                       # raises ValueError with all of them
refuse(call_problems("python3 main.py", {}, ""))
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

MOST = 1 << 62  # of a limit of the kernel
MOST_S = 1_000_000.0  # that a system call waits
SHOWN = 60  # characters of a value
Wrong: TypeAlias = tuple[str, str, str]


def refuse(problems: Iterable[Wrong]) -> None:
    """Raise ValueError with these problems, if there are any."""
    if said := [f"{what}; {why}. Fix: {fix}" for what, why, fix in problems]:
        raise ValueError("\n".join(said))


def call_problems(command: Any, files: Any, stdin: Any) -> Iterator[Wrong]:
    """What is wrong with a program's command, files and input."""
    yield from command_problems("a sandbox", command)
    for name, text in files.items() if isinstance(files, Mapping) else [(files, None)]:
        if not (is_text(name) and isinstance(text, str)):
            given = {name: text} if isinstance(files, Mapping) else files
            why = "they are texts by their names in the program's folder"
            yield f"a sandbox has files={given!r:.{SHOWN}}", why, 'files={"main.py": "print(1)"}'
    if not isinstance(stdin, str):
        yield f"a sandbox has stdin={stdin!r:.{SHOWN}}", "it is a text", 'stdin="1 2"'


def command_problems(owner: str, command: Any) -> Iterator[Wrong]:
    """What is wrong with a command that `owner` has."""
    return word_problems(owner, "command", command, fix=["python3", "main.py"])


def word_problems(owner: str, name: str, words: Any, *, fix: Sequence[str], least: int = 1) -> Iterator[Wrong]:
    """What is wrong with words, of which there are `least` or more. The fix of a text is to split it."""
    if isinstance(words, Sequence) and len(words) >= least and not isinstance(words, str) and all(map(is_text, words)):
        return
    why = f"it is a list of {'one word or more' if least else 'words'}, which no shell splits; none has a zero byte"
    yield f"{owner} has {name}={words!r:.{SHOWN}}", why, f"{name}={_split(words) or [*fix]!r}"


def readable_problems(readable: Any) -> Iterator[Wrong]:
    """What is wrong with the paths that programs may read."""
    found = [*word_problems("a sandbox", "readable", readable, fix=["/data"], least=0)]
    yield from found
    for path in [] if found else readable:
        if not path.startswith("/"):
            yield f"a sandbox has readable={path!r:.{SHOWN}}", "a program has the same path to it", 'readable=["/data"]'


def limit_problems(limits: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Wrong]:
    """What is wrong with limits. Those whose default is a fraction are seconds."""
    for name, value in limits.items():
        is_time = isinstance(defaults[name], float)
        number = isinstance(value, (int, float) if is_time else int) and not isinstance(value, bool)
        if number and (0 < value <= MOST_S if is_time else 1 <= value <= MOST):
            continue
        why = f"it is a number above 0 and at most {MOST_S:.0f}" if is_time else "it is a whole number, 1 or more"
        yield f"SandboxLimits has {name}={value!r:.{SHOWN}}", why, f"{name}={defaults[name]!r}"


def is_text(word: Any) -> bool:
    """Return whether a program can have this word."""
    return isinstance(word, str) and "\0" not in word


def _split(words: Any) -> list[str]:
    try:
        return shlex.split(words) if is_text(words) else []
    except ValueError:  # a quotation that does not end
        return []
