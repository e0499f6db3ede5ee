"""Run by every Python that starts with this folder on PYTHONPATH: it imports Sluice's packages from this installation.

The workers of a group with its own interpreter start this way, and so do the processes that they start. Nothing else of
this installation becomes importable there. Another `sitecustomize` on the path still runs.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Optional

HERE = Path(__file__).resolve().parent


def execute(spec: Optional[ModuleSpec]) -> None:  # noqa: UP045 - an older Python must be able to say that it is older
    """Execute a module and keep it alive."""
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)


execute(spec_from_file_location("sluice_precedence", HERE.parent / "precedence.py"))
others = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
execute(PathFinder.find_spec("sitecustomize", others))
