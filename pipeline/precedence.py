"""Decides which of several modules of one name is imported: Sluice's, then Python's or installed, then the user's.

`python -m` searches the working directory first, so a folder `stages/` or a file `random.py` there would replace ours
or Python's, here and in every worker. Importing `pipeline` gives the four packages of this installation precedence. The
commands and all processes of a run search the user's folders last, the graph's before the working directory. A graph
that imports a module hidden by this is rejected (`hidden`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SCRIPT = "sluice"  # the installed command
DISTRIBUTION = "sluice-rl"  # what pip calls all of it
PACKAGES = ("pipeline", "stages", "ops", "graphs")
HOME = Path(__file__).resolve().parents[1]
STARTUP = Path(__file__).resolve().with_name("startup")


class Ours:
    """Finds the four packages in this installation, whatever comes first on `sys.path`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(HOME)]) if name in PACKAGES else None


def search_last(folders: Iterable[str | Path]) -> None:
    """Move these folders to the end of `sys.path`, after everything that is installed."""
    for folder in map(str, folders):
        sys.path[:] = [entry for entry in sys.path if (entry or os.getcwd()) != folder] + [folder]


def worker_hook(folders: Iterable[str | Path]) -> Callable[[], None]:
    """Return the setup hook of Ray's workers: it makes a process search these folders after everything installed.

    It works by a finder because Ray puts the driver's folders first on `sys.path` only afterwards. Being local, it is
    pickled by value, so a worker needs no package of ours to run it.
    """
    last, home, packages = frozenset(map(str, folders)), str(HOME), PACKAGES

    class Installed:
        @staticmethod
        def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
            if path is not None:  # inside a package
                return None
            searched = [entry for entry in sys.path if entry not in last]
            found = PathFinder.find_spec(name, [home, *searched] if name in packages else searched)
            return found if found and found.loader else None  # a folder without __init__.py hides no module

    def hook() -> None:
        sys.meta_path.insert(sys.meta_path.index(PathFinder), Installed)

    return hook


def hidden(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the user's file or folder for a module of this dotted name, if one of `folders` has it and another module
    of its first name was imported, or will be. None if nothing is hidden."""
    first, *rest = name.split(".")
    loaded = getattr(sys.modules.get(first), "__file__", None) or ""
    for folder in folders if first in PACKAGES or first in sys.modules else ():
        module = folder.joinpath(first, *rest)
        theirs = folder / first if (folder / first).is_dir() else folder / f"{first}.py"
        if (module.is_dir() or module.with_name(f"{module.name}.py").is_file()) and folder.resolve() != HOME:
            return None if Path(loaded).is_relative_to(theirs) else theirs
    return None


def hides_installed(folders: Iterable[Path]) -> Path | None:
    """Return a module or package in these folders that replaces an installed package without `__init__.py`, such as
    `google`, wherever the folders are on `sys.path`; None if there is none."""
    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    installed |= {Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")}
    for folder in folders:
        theirs = {path.parent.name: path.parent for path in folder.glob("*/__init__.py")}
        theirs |= {path.stem: path for path in folder.glob("*.py")}
        for name, path in theirs.items():
            places = [site / name for site in installed if (site / name).is_dir() and site != folder.resolve()]
            if any(not (place / "__init__.py").exists() and any(place.glob("*/__init__.py")) for place in places):
                return path
    return None


def hides_pipeline(folder: Path) -> bool:
    """Return whether a process that searches this folder first imports another package or module `pipeline`."""
    found = PathFinder.find_spec("pipeline", [str(folder), *sys.path])
    return found is not None and Path(found.origin or ".").resolve().parent != Path(__file__).resolve().parent


def replaced() -> Path | None:
    """Return the package or module that this process has imported as `pipeline`, if it is not ours: with an editable
    install Python finds our modules inside it all the same. None if it is ours."""
    loaded = Path(getattr(sys.modules.get("pipeline"), "__file__", None) or __file__).resolve()
    if loaded.parent == Path(__file__).resolve().parent:
        return None
    return loaded.parent if loaded.name == "__init__.py" else loaded


def for_another_python() -> dict[str, str]:
    """Return the environment variables with which another interpreter imports our packages from this installation, and
    the modules on this process's PYTHONPATH."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))}


def command(module: str, *words: str) -> list[str]:
    """Return the command line that runs a module of ours in a new process, which finds it where this one did."""
    safe = sys.flags.safe_path or hides_pipeline(Path.cwd())
    return [sys.executable, *(["-P"] if safe else []), "-m", module, *words]


def working_directory() -> str:
    """Return the working directory. Ends the process with exit code 1 if it does not exist any more."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        what, why = "it does not exist any more", "the paths of a command line start there"
        sys.exit(f"working directory: {what}; {why}. Fix: cd to a folder that exists")


def typed(module: str) -> list[str]:
    """Return the words that a person types to run a command of ours the way this one was run."""
    if Path(sys.argv[0]).name == SCRIPT:
        return [SCRIPT, module.removeprefix("pipeline.")]
    return ["python", *(["-P"] if sys.flags.safe_path else []), "-m", module]


sys.meta_path.insert(0, Ours)
BY_MODULE = sys.argv[:1] == ["-m"] and any(word.startswith("pipeline.") for word in sys.orig_argv)  # our command
if BY_MODULE:
    search_last(sys.path[:1] if sys.path[0] == working_directory() else [])
