"""A user's own backend in a folder outside the repository: checked, and run. The code is that of the docs page."""

import json
from dataclasses import replace

import pytest

from pipeline import Backend, StageContext, StageError, WorkerGroup
from stages.backends import backend_problems, engine
from tests.doors import QUICKSTART, forgotten, snippet, user_folder
from tests.errors.harness import command

STEPS = ("--executor", "local", "--steps", "2", "--plain")


def published(run_dir):
    """Return the hash of each published version."""
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event["sha256"] for event in events if event["type"] == "published"]


def test_the_pages_backend_samples_what_the_one_that_it_wraps_samples(tmp_path):
    folder = user_folder(tmp_path, {"counting.py": snippet("your-own-backend.md"), "plain.py": QUICKSTART})
    with forgotten(folder):
        code, _, err = command(folder, "counting.py", *STEPS, "--run-dir", "counted")
        assert code == 0, err
        code, _, err = command(folder, "plain.py", *STEPS, "--run-dir", "plain")
        assert code == 0, err
    assert published(folder / "counted") == published(folder / "plain") != []
    assert int((folder / "counted" / "tokens.txt").read_text()) > 2 * 512
    groups = json.loads((folder / "counted" / "plan.json").read_text())["groups"]
    backends = {group["name"]: group["backend"] for group in groups}
    assert backends["sampler"] == "counting" and backends["learner"] == "torch"


async def later(*given, **named): ...


def one_by_one(*given, **named):
    yield


def opened(context):
    """Stand in for the opener of a backend that is only checked."""


def said(group, work="sample"):
    return " ".join(str(problem) for problem in backend_problems(group, None, work))


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("trch", "no backend has that name. Fix: did you mean 'torch'?"),
        (Backend(name="vllm", can=("sample",), opener=opened), "could not tell the two apart"),
        (Backend(name="mine", can=("score",), opener=opened), "'mine' can only score"),
        (Backend(name="mine", can=("sample",), opener=opened, packages=("no_such",)), "the package 'no_such'"),
        (Backend(name="mine"), "runs plain functions only"),
    ],
)
def test_what_cannot_be_is_refused(backend, says):
    assert says in said(WorkerGroup("sampler", backend=backend))


RETURNS = """
import dataclasses
from graphs import quickstart
from counting import COUNTING, Counting, open_counting
from pipeline import WorkerGroup
from stages import Refit, Rollout, Evaluate

class Wrong(Counting):
    def {method}

def opened(context):
    right = open_counting(context)
    return Wrong(right.engine, right.file)

def graph():
    made = quickstart.graph(steps=1, warm_start_steps=0, prompts_per_step=4, samples_per_prompt=4)
    sampler = WorkerGroup("sampler", backend=dataclasses.replace(COUNTING, name="wrong", opener=opened), threads=2)
    where = {{Refit: "target", Rollout: "on", Evaluate: "on"}}
    stages = [dataclasses.replace(s, **{{where[type(s)]: sampler}}) if type(s) in where else s for s in made.stages]
    return dataclasses.replace(made, host=sampler, stages=tuple(stages))
"""


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("serve(self, *args): return None", "serve() returned None; it returns ServedWeights with a hash"),
        ("served_version(self, *args): return None", "served_version() returned None; it returns a number"),
        (
            "stream(self, *args, **named):\n        async def three():\n            yield 3\n        return three()",
            "stream() yielded 3; it yields Decoded with a Generation, or Cancelled",
        ),
        (
            "count(self, made): made.versions.values.fill_(9)",
            "sampled tokens of version 9, and serves version 0",
        ),
    ],
    ids=["serve", "served_version", "stream", "versions"],
)
def test_what_an_engine_returns_is_checked(tmp_path, method, says):
    files = {"counting.py": snippet("your-own-backend.md"), "wrong.py": RETURNS.format(method=method)}
    folder = user_folder(tmp_path, files)
    with forgotten(folder):
        code, _, err = command(folder, "wrong.py", "--executor", "local", "--plain", "--run-dir", "run")
    assert code == 3 and says in err, err


def test_its_own_checks_are_asked():
    from pipeline.errors import Problem

    def checks(group, where):
        if group.gpus:
            yield Problem(where=where, what="it has GPUs", why="mine runs on CPUs", fix="gpus=0")

    mine = Backend(name="mine", can=("sample",), opener=opened, checks=checks)
    assert "mine runs on CPUs" in said(WorkerGroup("sampler", backend=mine, gpus=1))
    assert not said(WorkerGroup("sampler", backend=mine))


def test_an_engine_that_lacks_a_method_is_named_when_it_is_opened():
    class Half:
        def encode(self): ...

    mine = Backend(name="mine", can=("reward",), opener=lambda context: Half())
    group = WorkerGroup("judge", backend=mine)
    context = StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=None, shared={})
    with pytest.raises(StageError, match=r"the engine of backend 'mine' has no reward\(\)"):
        engine(context)
    forgets = replace(group, backend=replace(mine, opener=lambda context: None))
    with pytest.raises(StageError, match="the opener of backend 'mine' returned None"):
        engine(replace(context, group=forgets))


def test_a_copy_with_another_backend_is_that_one():
    mine = WorkerGroup("sampler", backend=Backend(name="mine", leads=True), workers=4, tensor_parallel=2)
    assert mine.processes == 2 and replace(mine, gpus=4).own == mine.own
    assert replace(mine, backend="torch").own is None and replace(mine, backend="torch").processes == 4


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"can": "sample"}, "has can='sample'; can must be a tuple of 'sample', 'score', 'train', 'reward'"),
        ({"can": ("samples",)}, "has can=('samples',); can must be a tuple of"),
        ({"can": ()}, "has can=(); can must be a tuple of"),
        ({"name": ""}, "has name=''; records and messages show the name"),
        ({"opener": None}, "has opener=None; opener(context) returns the engine"),
        ({"opener": "open_mine"}, "has opener='open_mine'; opener(context) returns"),
        ({"opener": lambda: None}, "opener(context) returns the engine"),
        ({"opener": later}, "opener(context) returns the engine; it is a plain function, not async"),
        ({"opener": one_by_one}, "opener(context) returns the engine; it is a plain function, not async"),
        ({"checks": later}, "checks(group, where) yields problems"),
        ({"checks": lambda group: ()}, "checks(group, where) yields problems"),
        ({"checks": lambda group, where: 1 / 0}, "checks of backend 'mine' raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_description_is_one_problem(wrong, text):
    described = {"name": "mine", "can": ("sample",), "opener": lambda context: None} | wrong
    found = said(WorkerGroup("sampler", backend=Backend(**described)))
    assert text in found and found.count("Fix:") == 1, found


MODULE = """
raise_if_imported = 1 / 0

async def later(context): ...

def short(): ...

def right(context, more=1): ...

def checks(group, where, *more): ...

if raise_if_imported:
    try:
        def maybe(context): ...
    except ImportError:
        from elsewhere import other as renamed

class Engine:
    def inner(self, context): ...
"""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"opener": "nowhere:open"}, "which names the module nowhere, which is not found"),
        ({"opener": "nowhere.deep:open"}, "which names the module nowhere.deep, which is not found"),
        ({"opener": "mine_of_it:rihgt"}, "which names rihgt, which the module mine_of_it does not have"),
        ({"opener": "mine_of_it:inner"}, "which names inner, which the module mine_of_it does not have"),
        ({"opener": "mine_of_it:later"}, "which names an async function"),
        ({"opener": "mine_of_it:short"}, "which names a function that does not take (context)"),
        ({"checks": "mine_of_it:short"}, "which names a function that does not take (group, where)"),
        ({"opener": "broken_of_it:open"}, "which names the module broken_of_it, which has a syntax error in line 2"),
        ({"checks": "nowhere:checks"}, "which names the module nowhere, which is not found"),
        *(({"opener": f"mine_of_it:{name}"}, "") for name in ("right", "maybe", "renamed", "Engine")),
    ],
)
def test_a_named_function_is_found_without_importing_its_module(tmp_path, monkeypatch, given, says):
    (tmp_path / "mine_of_it.py").write_text(MODULE)
    (tmp_path / "broken_of_it.py").write_text("\ndef open(context:\n")
    monkeypatch.syspath_prepend(tmp_path)
    group = WorkerGroup("sampler", backend=Backend(**{"name": "mine", "can": ("sample",), "opener": opened} | given))
    found = said(group)
    assert says in found and found.count("Fix:") == bool(says)


def test_a_named_check_of_a_module_that_raises_is_at_that_line(tmp_path, monkeypatch):
    (tmp_path / "mine_of_it.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with forgotten(tmp_path):
        found = said(
            WorkerGroup("w", backend=Backend(name="mine", can=("sample",), opener=opened, checks="mine_of_it:checks"))
        )
    assert found.startswith(f"{tmp_path}/mine_of_it.py:2: checks of backend 'mine' raised ZeroDivisionError")


def short(self, model): ...


class Whole:
    """An engine whose methods take anything, as one that passes them on to another engine."""

    def __getattr__(self, name):
        return lambda *given, **named: None


@pytest.mark.parametrize(
    ("name", "method", "says"),
    [
        ("generate", later, "generate() of the engine of backend 'mine' is async"),
        ("generate", one_by_one, "generate() of the engine of backend 'mine' is a generator"),
        ("stream", later, "stream() of the engine of backend 'mine' is async"),
        ("encode", short, "encode() of the engine of backend 'mine' does not take (model, texts, *, chat)"),
        ("stream", one_by_one, ""),
        ("encode", lambda self, *given, chat: None, ""),
    ],
)
def test_a_method_that_cannot_be_called_is_named_when_the_engine_is_opened(name, method, says):
    made = type("Mine", (Whole,), {name: method})()
    group = WorkerGroup("w", backend=Backend(name="mine", can=("sample",), opener=lambda context: made))
    context = StageContext(group=group, rank=0, seed=0, group_size=1, run_dir=None, shared={})
    if not says:
        assert engine(context) is made
        return
    with pytest.raises(StageError) as error:
        engine(context)
    assert f"{__file__}:{method.__code__.co_firstlineno}: {says}" in str(error.value)
    assert f"Fix: write def {name}(self, " in str(error.value)
