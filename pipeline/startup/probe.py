"""Answers in another interpreter: which Python it is, and what it can import. Needs no package and Python 3.8 or newer.

    python probe.py '{"distributions": ["ray"], "packages": ["vllm"], "module": "pipeline.executors.actors"}'

Prints one line of JSON. A package is found without importing it; `module` is imported.
"""

import importlib
import json
import sys
from importlib import metadata, util
from typing import Optional


def version(distribution: str) -> Optional[str]:  # noqa: UP045 - an older Python must be able to say that it is older
    """Return the version of an installed distribution; None if it is absent."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def absent(package: str) -> bool:
    """Return whether a package cannot be found."""
    try:
        return util.find_spec(package) is None
    except ModuleNotFoundError:  # the package around it is missing
        return True


def broken(module: str) -> str:
    """Import a module; return the error, empty if there is none."""
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - whatever it is, a worker would end with it
        return f"{type(error).__name__}: {error}"
    return ""


def answer(asked: dict) -> dict:
    """Return the reply to one question."""
    return {
        "python": sys.version_info[:2],
        "versions": {name: version(name) for name in asked["distributions"]},
        "missing": [name for name in asked["packages"] if absent(name)],
        "failed": broken(asked["module"]) if asked["module"] else "",
        "home": getattr(sys.modules.get("pipeline"), "__file__", None),
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(sys.argv[1]))))
