"""Every package that the product imports is declared in pyproject.toml, as a dependency or in an extra, and used."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("pipeline", "stages", "ops", "graphs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE_OF = {  # module -> package, where the names differ
    "grpc": "grpcio",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "nccl": "nccl4py",
    "PIL": "pillow",
    "transfer_queue": "TransferQueue",
}
THROUGH = {"jinja2": "torch", "triton": "torch"}  # packages that a declared one brings
ELSEWHERE = {"verifiers": "stages/episode/endpoint/of_verifiers.py"}  # in a file that another Python runs


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *(one for extra in extras.values() for one in extra)]
    return {normal(re.match(r"[\w.-]+", one)[0]) for one in asked}  # type: ignore[index]


def imported() -> dict[str, str]:
    """Return the packages that the product imports, each with a line that does."""
    found: dict[str, str] = {}
    for path in (path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {*PRODUCT}:
                found.setdefault(normal(PACKAGE_OF.get(name, name)), f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_import_is_declared() -> None:
    known = declared()
    lacking = {
        package: line
        for package, line in imported().items()
        if package not in known and THROUGH.get(package) not in known and ELSEWHERE.get(package) != line.split(":")[0]
    }
    assert not lacking, "declare these in pyproject.toml"


def test_every_dependency_is_imported() -> None:
    own = {normal(re.match(r"[\w.-]+", one)[0]) for one in PROJECT["dependencies"]}  # type: ignore[index]
    assert own <= imported().keys()


def test_the_tables_are_needed() -> None:
    assert {*THROUGH, *ELSEWHERE, *map(normal, PACKAGE_OF.values())} <= imported().keys()
