"""Whether interpreters of worker groups go together with the driver's. Asked before any worker starts; knows no Ray.

Handles, stages and results travel as pickles and as TransferQueue's messages, so some versions must be the same on both
sides. Ray itself does not compare them: with another version it fails later, and without Ray a worker never starts.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from pipeline.declare.group import WorkerGroup
from pipeline.declare.interpreter import Answer, ask
from pipeline.errors import GraphError, Problem
from pipeline.precedence import HOME

SAME = ("ray", "TransferQueue", "tensordict", "msgspec", "cloudpickle")  # of exactly the driver's version
SAME_MAJOR = ("numpy",)
NEEDED = ("torch", "transfer_queue", "omegaconf")  # by every worker, whatever its backend
WORKER = "pipeline.executors.actors"  # what a worker imports first


def check_interpreters(groups: Iterable[WorkerGroup]) -> None:
    """Ask each interpreter once. Raises GraphError with every reason why a group's workers could not work there."""
    by_python: dict[str, list[WorkerGroup]] = {}
    for group in groups:
        if group.interpreter is not None:
            by_python.setdefault(group.interpreter, []).append(group)
    problems = [problem for python, sharing in by_python.items() for problem in _problems(python, sharing)]
    if problems:
        raise GraphError(*problems)


def _problems(python: str, groups: list[WorkerGroup]) -> Iterator[Problem]:
    backends = [group.description for group in groups if group.description is not None]
    packages = dict.fromkeys([*NEEDED, *(name for backend in backends for name in backend.packages)])
    answer = ask(python, distributions=(*SAME, *SAME_MAJOR), packages=tuple(packages), module=WORKER)
    has = f"worker group {groups[0].name!r} has python={str(groups[0].python)!r}, which"
    for what, why, fix in differences(answer, shlex.quote(python)):
        yield Problem(where=str(groups[0].location), what=f"{has} {what}", why=why, fix=fix)


def differences(answer: Answer, python: str) -> Iterator[tuple[str, str, str]]:
    """Yield what an interpreter has, why a worker of this driver could not work with it, and a fix: at most one."""
    if answer.silent:
        yield answer.silent, "its workers run with it", "name the interpreter of a virtual environment"
    elif answer.python != sys.version_info[:2]:
        theirs, ours = (".".join(map(str, version)) for version in (answer.python, sys.version_info[:2]))
        why = "functions are sent between them as bytecode, which another minor version cannot run"
        yield f"is Python {theirs}, and the driver is Python {ours}", why, f"create the environment with Python {ours}"
    elif wanted := _other_versions(answer):
        yield _other_packages(answer, wanted, python)
    elif answer.missing:
        what, why = f"finds no {', '.join(answer.missing)}", "the workers of the group import it"
        yield what, why, "install it in that environment"
    elif answer.failed:
        what, why = f"cannot import Sluice's worker: {answer.failed}", "every worker does so first"
        yield what, why, "install what is missing in that environment"
    elif Path(str(answer.home)).resolve().parents[1] != HOME:
        what, why = f"imports Sluice from {answer.home}", f"workers must run the driver's Sluice, {HOME}"
        yield what, why, "use an interpreter that reads PYTHONPATH"


def _other_packages(answer: Answer, wanted: Mapping[str, str], python: str) -> tuple[str, str, str]:
    """Return the difference in these distributions, which have the driver's versions."""
    found = {name: answer.versions.get(name) for name in wanted}
    theirs = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in found.items())
    ours = ", ".join(f"{name} {version}" for name, version in wanted.items())
    install = " ".join(f"{name}=={version}" for name, version in wanted.items())
    why = "driver and workers exchange objects of these packages"
    return f"has {theirs}, and the driver has {ours}", why, f"{python} -m pip install {install}"


def _other_versions(answer: Answer) -> dict[str, str]:
    """Return the driver's versions of the distributions of which the interpreter has another one, or none."""
    ours = {name: metadata.version(name) for name in (*SAME, *SAME_MAJOR)}
    return {name: version for name, version in ours.items() if not _agree(name, version, answer.versions.get(name))}


def _agree(name: str, ours: str, theirs: str | None) -> bool:
    if theirs is None or name not in SAME_MAJOR:
        return theirs == ours
    return theirs.partition(".")[0] == ours.partition(".")[0]
