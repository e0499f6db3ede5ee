"""A user's own backend in a folder outside the repository: checked, and run. The code is that of the docs page."""

import json

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


def said(group, work="sample"):
    return " ".join(str(problem) for problem in backend_problems(group, None, work))


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("trch", "no backend has that name. Fix: did you mean 'torch'?"),
        (Backend(name="vllm", can=("sample",), opener="mine:open"), "could not tell the two apart"),
        (Backend(name="mine", can=("score",), opener="mine:open"), "'mine' can only score"),
        (Backend(name="mine", can=("sample",), opener="mine:open", packages=("no_such",)), "the package 'no_such'"),
        (Backend(name="mine"), "runs plain functions only"),
    ],
)
def test_what_cannot_be_is_refused(backend, says):
    assert says in said(WorkerGroup("sampler", backend=backend))


def test_its_own_checks_are_asked():
    from pipeline.errors import Problem

    def checks(group, where):
        if group.gpus:
            yield Problem(where=where, what="it has GPUs", why="mine runs on CPUs", fix="gpus=0")

    mine = Backend(name="mine", can=("sample",), opener="mine:open", checks=checks)
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


def test_a_copy_with_another_backend_is_that_one():
    from dataclasses import replace

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
        ({"checks": lambda group: ()}, "checks(group, where) yields problems"),
        ({"checks": lambda group, where: 1 / 0}, "checks of backend 'mine' raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_description_is_one_problem(wrong, text):
    described = {"name": "mine", "can": ("sample",), "opener": lambda context: None} | wrong
    found = said(WorkerGroup("sampler", backend=Backend(**described)))
    assert text in found and found.count("Fix:") == 1, found
