"""Import rules: nothing heavy before a run starts, and packages import each other in one direction only."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from pipeline.cli.load import load

REPOSITORY = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.name for path in (REPOSITORY / "graphs").glob("*.py") if path.stem != "__init__")
HEAVY = (
    "torch",
    "ray",
    "transformers",
    "transfer_queue",
    "tensordict",
    "safetensors",
    "numpy",
    "aiohttp",
    "rich",
    "datasets",
    "pyarrow",
)
LIGHT = ("declare", "plan", "schedule", "record", "analysis", "engine")  # packages that load nothing heavy on import
PUBLIC_TO_STAGES = {"declare", "errors", "reading"}  # besides `pipeline`
DISTRIBUTIONS = {
    "transfer_queue": "TransferQueue",
    "megatron": "megatron-core",
    "grpc": "grpcio",
    "nccl": "nccl4py",
    "mlflow": "mlflow-skinny",
    "PIL": "pillow",
}
COMES_WITH_TORCH = {"jinja2", "triton"}  # the second with its GPU builds
ELSEWHERE = {"verifiers"}  # installed in another Python, which runs the file that imports it
ONLY_IN = {
    "ray": {"pipeline/executors"},
    "transfer_queue": {"pipeline/data_plane"},
    "aiohttp": {"pipeline/web", "stages/episode/endpoint"},
    "verifiers": {"stages/episode/endpoint"},
}


def loaded_after(code):
    """Return the heavy packages that a fresh interpreter has loaded after running `code`."""
    report = f"\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code + report],
        cwd=REPOSITORY,
        env={key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_packages_loads_nothing_heavy():
    assert loaded_after("import pipeline, stages, ops.rewards, stages.backends, pipeline.run") == []


def test_the_data_plane_loads_no_compiler():
    """Loading it would delay every worker. Marks set by other code, during the import or later, still work."""
    said = subprocess.run(
        [sys.executable, "-c", LEAN], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    assert said == ["False", "True", "True", "True"]


LEAN = """
import sys
import torch.compiler
from pipeline.data_plane.transfer_queue import _load
from pipeline.data_plane.uncompiled import MARKS, uncompiled
marks = [getattr(torch.compiler, name) for name in MARKS]
_load(1.0, b"k" * 32)
print("torch._dynamo" in sys.modules)
print(marks == [getattr(torch.compiler, name) for name in MARKS])
with uncompiled():
    mine = torch.compiler.allow_in_graph(len)
print("torch._dynamo" in sys.modules)
print(id(len) in torch._dynamo.trace_rules._allowed_callable_ids.function_ids)
"""


def flags_of(recipe, folder):
    """Return flags that point a recipe at a data file or folder, if it reads one."""
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "question": "1+1="}\n')
    defaults = {flag.name: flag.default for flag in load(REPOSITORY / "graphs" / recipe).flags}
    if not defaults.get("data"):
        return []
    return ["--data", str(folder / "train.jsonl" if defaults["data"].endswith(".jsonl") else folder)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_checking_a_recipe_loads_nothing_heavy(recipe, tmp_path):
    argv = [f"graphs/{recipe}", "--check", *flags_of(recipe, tmp_path)]
    assert loaded_after(f"from pipeline.run import main\nassert main({argv!r}) == 0") == []


@functools.cache
def imports(path, *, top_level):
    """Return the dotted names that a file imports, at top level only or anywhere, except under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typed = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    skipped = {inner for node in typed for inner in ast.walk(node)}
    found = []
    for node in tree.body if top_level else ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def files(*packages):
    """Return the Python files of these packages."""
    return [path for package in packages for path in sorted((REPOSITORY / package).rglob("*.py"))]


def test_a_class_name_stands_for_one_class():
    """Over all modules; a leading underscore makes no difference."""
    found = defaultdict(list)
    for path in files("pipeline", "stages", "ops"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(path.relative_to(REPOSITORY).as_posix())
    clashes = [f"{name}: {', '.join(paths)}" for name, paths in sorted(found.items()) if len(paths) > 1]
    assert not clashes, "names of several classes; rename all but one:\n" + "\n".join(clashes)


@pytest.mark.parametrize("room", LIGHT)
def test_the_core_imports_the_standard_library_networkx_and_msgspec(room):
    for path in files(f"pipeline/{room}"):
        roots = {module.partition(".")[0] for module in imports(path, top_level=True)}
        assert roots <= {*sys.stdlib_module_names, "networkx", "msgspec", "pipeline"}, path


def test_a_plan_is_read_without_networkx():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, pipeline.record.runs\nprint('networkx' in sys.modules)"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_imported_in_one_room(package):
    found = {
        path.parent.relative_to(REPOSITORY).as_posix()
        for path in files("pipeline", "stages", "ops", "graphs")
        if package in {module.partition(".")[0] for module in imports(path, top_level=False)}
    }
    assert found == ONLY_IN[package]


def test_stages_import_public_names_of_the_engine():
    for path in files("stages"):
        for module in imports(path, top_level=False):
            parts = module.split(".")
            if parts[0] == "pipeline":
                assert parts[1] in PUBLIC_TO_STAGES or len(parts) == 2, f"{path} imports {module}"


def test_a_run_never_imports_the_web_view():
    for path in files("pipeline", "stages", "ops", "graphs"):
        if "web" not in path.parts and path.name not in ("view.py", "export.py"):
            assert not any(module.startswith("pipeline.web") for module in imports(path, top_level=False)), path


def test_what_is_imported_is_declared():
    """As a dependency or in an extra."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    declared = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in (*project["dependencies"], *extras)}
    roots = {
        module.partition(".")[0]
        for path in files("pipeline", "stages", "ops", "graphs")
        for module in imports(path, top_level=False)
    }
    ours = {"pipeline", "stages", "ops", "graphs"}
    wanted = {
        DISTRIBUTIONS.get(root, root).replace("-", "_")
        for root in roots - ours - COMES_WITH_TORCH - ELSEWHERE - sys.stdlib_module_names
    }
    assert wanted <= declared, wanted - declared
