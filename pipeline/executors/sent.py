"""What travels from the driver to the workers of a run on Ray: the graph's stages and the user's modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from pipeline.declare.graph import Graph
from pipeline.declare.group import WorkerGroup
from pipeline.declare.stage import Stage
from pipeline.errors import Problem, message_of
from pipeline.plan.planner import with_samples, worker_groups
from pipeline.precedence import HOME, PACKAGES


def user_modules(graph_module: ModuleType) -> list[ModuleType]:
    """Return the graph's module, and those loaded from below its folder or from the working directory, unless they are
    part of an installed package."""
    folder = Path(graph_module.__file__ or ".").resolve().parent
    found = [graph_module]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if module is graph_module or not path or name.partition(".")[0] in PACKAGES or name == "__main__":
            continue
        resolved = Path(path).resolve()
        above = resolved.parents[name.count(".") + (resolved.name == "__init__.py") :]
        beside = Path.cwd() != HOME and above[:1] == (Path.cwd(),)
        if (resolved.is_relative_to(folder) or beside) and "site-packages" not in resolved.parts:
            found.append(module)
    return found


def user_folders(modules: Sequence[ModuleType]) -> list[Path]:
    """Return the folders in which the driver finds the user's modules: the graph's, then the working directory."""
    graph = Path(modules[0].__file__ or ".").resolve().parent if modules else Path.cwd()
    return list(dict.fromkeys((graph, Path.cwd())))


def sent_problems(graph: Graph, modules: Sequence[ModuleType]) -> list[Problem]:
    """Return the backends of the user's that cannot be sent to workers; if there are none, the stages."""
    import cloudpickle

    stages = with_samples(graph)
    groups = [group for group in worker_groups(stages, graph.host) if group.own]
    known = cloudpickle.list_registry_pickle_by_value()
    registered = [module for module in modules if module.__name__ not in known]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        backends = [_stays(f"the backend of worker group {group.name!r}", group, group.own) for group in groups]
        found = list(filter(None, backends))
        return found or list(filter(None, (_stays(f"stage {stage.name!r}", stage, stage) for stage in stages)))
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _stays(says: str, declared: Stage | WorkerGroup, part: object) -> Problem | None:
    """Return the problem of a part of the graph that cannot be pickled."""
    import cloudpickle

    try:
        cloudpickle.dumps(part)
    except Exception as error:  # noqa: BLE001 - user code
        return Problem(
            where=str(declared.location),
            what=f"{says} cannot be sent to its workers: {message_of(error)}",
            why="they are other processes, and get what its code uses, also globals of the user's modules",
            fix="create that object in setup() or at the first call",
        )
    return None
