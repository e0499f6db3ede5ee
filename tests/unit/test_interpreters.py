"""Interpreters of worker groups: what they are asked, what is refused, and whose modules they import."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pipeline
from pipeline import Backend, GraphError, StageError, Task, WorkerGroup
from pipeline.cli.console import print_plan
from pipeline.declare.interpreter import Answer, ask
from pipeline.executors import interpreters, replay
from pipeline.executors.interpreters import SAME, SAME_MAJOR, WORKER, check_interpreters, differences
from pipeline.executors.placement import PlacementGroups
from pipeline.plan.planner import plan
from pipeline.precedence import for_another_python
from stages.backends import backend_problems
from tests.other_python import other_python
from tests.unit import toy

VERSIONS: dict[str, str | None] = {name: metadata.version(name) for name in (*SAME, *SAME_MAJOR)}
NUMPY = VERSIONS["numpy"]
OURS = ".".join(map(str, sys.version_info[:2]))


def answer(**changes) -> Answer:
    """Return the answer of an interpreter that goes together with this one, with changes."""
    good = {"python": sys.version_info[:2], "versions": VERSIONS, "home": pipeline.__file__}
    return Answer(**{**good, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"versions": VERSIONS | {"numpy": f"{NUMPY.split('.')[0]}.99"}}, None),
        ({"silent": "gives no answer within 60 s"}, "gives no answer within 60 s; its workers run with it"),
        ({"python": (3, 9)}, f"is Python 3.9, and the driver is Python {OURS}; functions are sent between them"),
        (
            {"versions": VERSIONS | {"ray": "2.9.0", "msgspec": None}},
            f"has ray 2.9.0, no msgspec, and the driver has ray {VERSIONS['ray']}, msgspec {VERSIONS['msgspec']}; "
            "driver and workers exchange objects of these packages. "
            f"venv/bin/python -m pip install ray=={VERSIONS['ray']} msgspec=={VERSIONS['msgspec']}",
        ),
        ({"versions": VERSIONS | {"numpy": "1.26.4"}}, f"has numpy 1.26.4, and the driver has numpy {NUMPY};"),
        ({"missing": ("torch", "vllm")}, "finds no torch, vllm; the workers of the group import it"),
        ({"failed": "ModuleNotFoundError: No module named 'zmq'"}, "cannot import Sluice's worker: Module"),
        ({"home": "/opt/sluice/pipeline/__init__.py"}, "imports Sluice from /opt/sluice/pipeline/__init__.py; workers"),
    ],
)
def test_what_does_not_go_together_is_said(changes, text):
    said = [f"{what}; {why}. {fix}" for what, why, fix in differences(answer(**changes), "venv/bin/python")]
    assert len(said) == (text is not None)
    assert not said or text in said[0]


def test_each_interpreter_is_asked_once_for_the_packages_of_its_backends(monkeypatch):
    asked = []

    def note(python, *, distributions, packages, module):
        asked.append((python, packages, module))
        return answer(python=(3, 9))

    monkeypatch.setattr(interpreters, "ask", note)
    mine = Backend(name="mine", packages=("mine",))
    groups = (
        WorkerGroup("a", python="one", backend=mine),
        WorkerGroup("b", python=Path("one")),
        WorkerGroup("c"),
        WorkerGroup("d", python="two words"),
    )
    with pytest.raises(GraphError) as caught:
        check_interpreters(groups)
    needed = ("torch", "transfer_queue", "omegaconf")
    assert asked == [
        (os.path.abspath("one"), (*needed, "mine"), WORKER),
        (os.path.abspath("two words"), needed, WORKER),
    ]
    assert [problem.what.partition(",")[0] for problem in caught.value.problems] == [
        "worker group 'a' has python='one'",
        "worker group 'd' has python='two words'",
    ]
    assert {problem.where for problem in caught.value.problems} == {str(groups[0].location), str(groups[3].location)}


def test_an_interpreter_is_asked_what_it_has(tmp_path):
    """Sluice is not installed there, and is imported from this installation."""
    python = other_python(tmp_path / "venv", {"only_there": ""})
    said = ask(str(python), distributions=("ray", "nothing"), packages=("only_there", "no.such"), module=WORKER)
    assert said == Answer(
        python=sys.version_info[:2],
        versions={"ray": VERSIONS["ray"], "nothing": None},
        missing=("no.such",),
        home=pipeline.__file__,
    )
    assert ask(str(python), module="no_such").failed == "ModuleNotFoundError: No module named 'no_such'"


def test_an_interpreter_that_does_not_answer_is_not_waited_for(tmp_path):
    script = tmp_path / "python"
    for body, said in (
        ("exec sleep 60", "gives no answer within 0.3 s"),
        ("echo '{}' 1", "does not behave like Python: {} 1"),
        ("echo first >&2; echo last >&2; exit 3", "does not behave like Python: last"),
        ("exit 3", "does not behave like Python: it ended with exit code 3"),
    ):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        assert ask(str(script), deadline_s=0.3 if "sleep" in body else 60.0).silent == said
    script.write_bytes(b"\x7fELF")
    assert ask(str(script)).silent == "cannot be started: Exec format error"


def test_another_sitecustomize_still_runs(tmp_path, monkeypatch):
    python = other_python(tmp_path / "venv", {}, sees_ours=False)
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # some systems have one among Python's own modules
    code = "import importlib.util; print(importlib.util.find_spec('pipeline').origin)"
    environment = os.environ | for_another_python()
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["theirs", pipeline.__file__] and not done.stderr


def test_the_variables_keep_the_drivers_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    ours = str(Path(pipeline.__file__).with_name("startup"))
    assert for_another_python() == {"PYTHONPATH": f"{ours}{os.pathsep}/mine"}
    monkeypatch.delenv("PYTHONPATH")
    assert for_another_python() == {"PYTHONPATH": ours}


def test_packages_of_a_backend_are_looked_for_where_its_workers_run(tmp_path):
    """The one of the environment has `only_there` and no `msgspec`; this one is the other way round."""
    python = other_python(tmp_path / "venv", {"only_there": ""}, sees_ours=False)
    backend = Backend(name="mine", packages=("only_there", "msgspec"), install="pip install mine", can=("sample",),
                      opener="mine:open_mine")  # fmt: skip
    (there,) = backend_problems(WorkerGroup("there", backend=backend, python=python))
    assert there.what.endswith("needs the package 'msgspec'") and there.fix == "in its environment, pip install mine"
    assert there.why == f"the group's python={str(python)!r} does not find it"
    (here,) = backend_problems(WorkerGroup("here", backend=backend))
    assert here.what.endswith("needs the package 'only_there'") and here.why == "it is not installed"


def test_a_replay_needs_the_interpreter_of_the_group(tmp_path):
    def graph(python: str):
        sampler = WorkerGroup("sampler", backend="torch", python=python)
        return toy.graph(rollout={"on": sampler}, refit={"to": sampler}, evaluate={"on": sampler})

    task = Task(stage="rollout", step=0, groups=(0,))
    with pytest.raises(GraphError) as caught:
        replay.run_again(graph("venv/bin/python"), tmp_path, task, {})
    (problem,) = caught.value.problems
    startup = for_another_python()["PYTHONPATH"]
    with_it = f"PYTHONPATH={startup} {Path.cwd()}/venv/bin/python -m pipeline.run ..."
    assert problem.fix == f"run this command with it: {with_it}"
    with pytest.raises(
        StageError, match="the output of stage 'rollout' lacks response"
    ):  # it runs: a toy returns nothing
        replay.run_again(graph(sys.executable), tmp_path, task, {})


def test_the_plan_names_the_interpreter(tmp_path, capsys):
    learner = WorkerGroup("learner", backend="torch", python=sys.executable)
    made = plan(toy.graph(logprobs={"on": learner}, train={"on": learner}, refit={"on": learner}))[0]
    assert {group.name: group.python for group in made.groups} == {
        "sampler": None, "learner": sys.executable, "host": None
    }  # fmt: skip
    print_plan(made)
    assert f"\nThe actors of learner run with {sys.executable}\n" in capsys.readouterr().out


def test_actors_of_other_groups_keep_the_interpreter_of_the_cluster(monkeypatch):
    """The host group needs no placement: its options are seen without a cluster."""
    made = []

    class Remote:
        def options(self, **options):
            made.append(options["runtime_env"])
            return self

        def remote(self, *arguments):
            return None

    from pipeline.executors import placement

    context = type("Context", (), {"get_node_id": lambda self: "ab" * 28})
    monkeypatch.setattr(placement.ray, "get_runtime_context", context)
    monkeypatch.setattr(placement.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    for python in (None, "two words/python"):
        PlacementGroups().place(WorkerGroup("host", python=python), Remote(), b"", b"", None, ())(0)  # type: ignore[arg-type]
    plain, own = made
    assert "py_executable" not in plain and "PYTHONPATH" not in plain["env_vars"]
    assert own["py_executable"] == f"'{Path.cwd()}/two words/python'"
    assert own["env_vars"]["PYTHONPATH"] == for_another_python()["PYTHONPATH"]


@pytest.mark.parametrize("lacking", [(), ("one",), ("two",)])
def test_nccl_is_looked_for_where_both_sides_run(monkeypatch, lacking):
    """This interpreter lacks it, and runs neither side."""
    from stages import Refit, refit

    def asked(packages, group):
        return Answer(missing=tuple(packages) if str(group.python) in lacking else ())

    monkeypatch.setattr(refit, "asked", asked)
    monkeypatch.setattr(refit, "is_installed", lambda package: False)
    groups = [WorkerGroup(name, backend="torch", gpus=1, python=name) for name in ("one", "two")]
    stage = Refit(toy.POLICY, source=groups[0], target=groups[1], transport="p2p")
    assert any("needs" in why for why, _ in stage._objections()) == bool(lacking)
    here = Refit(toy.POLICY, source=groups[0], target=WorkerGroup("here", backend="torch", gpus=1), transport="p2p")
    assert any("needs" in why for why, _ in here._objections())
