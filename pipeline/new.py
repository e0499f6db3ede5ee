"""`python -m pipeline.new NAME [--from RECIPE]`: copy a recipe into the working directory, to edit.

NAME is the new graph file; .py is added if it is missing. Its graph has that name too, so its runs are in
runs/NAME-..., and its docstring says how to run it. An existing file is never written over. Exit codes: 0 done; 2 NAME
or a flag is wrong.

    python -m pipeline.new mine --from grpo
    python -m pipeline.run mine.py --model Qwen/Qwen3-0.6B --data train.jsonl
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.cli.command import Parser, end, exit_code
from pipeline.cli.recipes import RECIPES, names
from pipeline.errors import GraphError, Problem
from pipeline.plan.names import is_name
from pipeline.precedence import PACKAGES, typed
from pipeline.writing import way_out

DEFAULT = "grpo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    parser = Parser(prog=" ".join(typed("pipeline.new")), usage="%(prog)s NAME [--from RECIPE]")
    parser.add_argument("name", nargs="?", help="the new file, such as mine or experiments/mine.py")
    parser.add_argument("--from", dest="recipe", default=DEFAULT, metavar="RECIPE", help="the recipe to copy")
    options = parser.parse_args(argv)
    recipe, path = _known(options.recipe), _new(options.name)
    text = copied((RECIPES / f"{recipe}.py").read_text(), recipe, path)
    try:
        _write(path, text)
    except OSError as error:
        what, fix = f"it cannot be written: {error.strerror}", way_out(error, "choose another folder")
        if isinstance(error, FileExistsError):
            what, fix = "there is such a file already", f"choose another name, such as {_free(path)}"
        elif not path.parent.exists():
            what, fix = "its folder does not exist", f"mkdir -p {shlex.quote(str(path.parent))}"
        why = "a recipe is copied into a new file"
        raise GraphError(Problem(where=str(path), what=what, why=why, fix=fix)) from error
    print(f"{path}: a copy of the recipe {recipe}; its first lines say how to run it")
    return 0


def _write(path: Path, text: str) -> None:
    """Write a new file, all of it or nothing."""
    file = path.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _free(path: Path) -> Path:
    """Return a path like this one at which there is nothing."""
    numbered = (path.with_stem(f"{path.stem}_{number}") for number in itertools.count(2))
    return next(each for each in numbered if not os.path.lexists(each))


def copied(text: str, recipe: str, path: Path) -> str:
    """Return a recipe's text as that of a new file: its commands run that file, and its graph has the file's name."""
    text = text.replace(f"graphs/{recipe}.py", str(path))
    return re.sub(rf'\bname="{recipe}"', f'name="{path.stem}"', text)


def _known(recipe: str) -> str:
    """Return a recipe's name, also of its path. Raises GraphError if there is none of that name."""
    name, known = Path(recipe).name.removesuffix(".py"), names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise GraphError(
            Problem(
                where=f"--from {recipe}",
                what="there is no such recipe",
                why=f"the recipes are {', '.join(known)}",
                fix=f"--from {near[0] if near else DEFAULT}",
            )
        )
    return name


def _new(name: str | None) -> Path:
    """Return the path of the new file. Raises GraphError if it cannot be a graph file."""
    if name is None:
        why, fix = "a recipe is copied into a new file", f"{' '.join(typed('pipeline.new'))} mine --from {DEFAULT}"
        raise GraphError(Problem(where="command line", what="the new file has no name", why=why, fix=fix))
    path = Path(name if name.endswith(".py") else f"{name}.py")
    why = ""
    if not is_name(path.stem):
        why = "the folders of its runs are named like the file, with letters, digits, _ and -"
    elif path.stem in sys.stdlib_module_names or path.stem in PACKAGES:
        why = "a module of Python or a package of Sluice has that name"
    if why:
        what = f"a graph file cannot be named {path.name!r}"
        raise GraphError(Problem(where=str(path), what=what, why=why, fix="choose another name, such as mine.py"))
    return path


if __name__ == "__main__":
    end(main())
