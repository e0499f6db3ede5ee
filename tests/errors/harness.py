"""Graph files that are broken in one place, and the command line's output for them.

A graph file consists of named lines. A case replaces some of them and expects the error to point at these.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROBLEM = re.compile(r"(?P<where>\S.*?): (?P<warning>warning: )?(?P<what>\S.*); (?P<why>\S.*)\. Fix: (?P<fix>\S.*)")

TOP = '''"""A small graph."""
import json
from dataclasses import dataclass
from typing import Literal

from ops.rewards import exact_match
from pipeline import Field, Graph, Model, Output, Schedule, Stage, WorkerGroup
from stages import Advantage, ClippedLoss, Generated, PrevLogprobs, Prompts, Refit, RefLogprobs, Reward, Rollout, Train


@dataclass(frozen=True)
class Step(Stage):
    name: str = "extra"
    reads: tuple = ()
    writes: tuple = ()
    per: str = "sample"
    every: int = 1
    group_size: int | None = None
    setup = lambda *_: dict

'''
DEF = "def graph(steps: int = 2, batch: int = 4) -> Graph:"
LINES = {
    "task": 'Generated("reverse", digits=2, held_out=20)',
    "policy": 'Model("tiny", config={"model_type": "qwen3"}, alphabet=task.alphabet)',
    "sampler": 'WorkerGroup("sampler", backend="torch")',
    "learner": 'WorkerGroup("learner", backend="torch")',
    "scorers": "None",
    "source": "Prompts(task, batch=batch)",
    "rollout": "Rollout(policy, on=sampler, samples_per_prompt=2, max_tokens=3)",
    "reward": "Reward(exact_match, on=scorers)",
    "prev": "PrevLogprobs(policy, on=learner)",
    "advantage": 'Advantage("group_relative")',
    "train": "Train(policy, on=learner, loss=ClippedLoss(), lr=1e-3)",
    "refit": "Refit(policy, source=learner, target=sampler)",
    "extra": "()",
    "versions": 'Step("versions", reads=rollout.writes[4:5])',
    "schedule": "Schedule(steps=steps)",
    "stages": "(rollout, reward, prev, advantage, train, refit, versions, *extra)",
    "made": 'Graph(name="small", source=source, stages=stages, schedule=schedule)',
}
LIVE_TOP = (
    TOP
    + '''from stages.vocabulary import REWARD


@dataclass(frozen=True)
class Count(Stage):
    """Adds up the rewards; what it holds is the checkpoint."""

    model: Model
    reads = (REWARD,)
    per = "batch"

    @property
    def uses(self):
        return (self.model,)

    updates = property(lambda self: self.model)

    def setup(self, context):
        return Counter()


class Counter:
    total = 0.0

    def __call__(self, columns, task):
        self.total += columns["reward"].sum().item()
        return Output(metrics={"total": self.total})

    def save(self, folder):
        (folder / "count.json").write_text(json.dumps(self.total))

    def restore(self, folder):
        self.total = json.loads((folder / "count.json").read_text())


'''
)
SCORE = """def score(prompt: str, answer: str) -> float:
    return 1.0


"""
LIVE = {
    "source": 'Prompts(Generated("reverse", digits=2, held_out=20), batch=batch)',
    "reward": "Reward(score)",
    "count": 'Count(Model("counter"))',
    "schedule": "Schedule(steps=steps, seed=seed, checkpoint_every=1)",
    "made": 'Graph(name="live", source=source, stages=(reward, count), schedule=schedule)',
}
LIVE_DEF = "def graph(steps: int = 2, batch: int = 4, seed: int = 0) -> Graph:"


@dataclass(frozen=True)
class Case:
    """One broken input.

    lines   replacements of LINES by name; an error must point at each of them, or at those in `at` if given
    top     code above graph(); a line of it that ends in `# here` must be pointed at
    define  the line with `def graph`; the file of a live graph has LIVE instead of LINES
    text    the whole graph file instead; None writes no file
    args    arguments of the command after the graph file; `graph` names another file
    files   additional files, by their path below the case's folder
    code    the exit code; 0 if there are only warnings
    program the command: `python -m pipeline.PROGRAM`
    """

    name: str
    lines: dict[str, str] = field(default_factory=dict)
    at: tuple[str, ...] | None = None
    top: str = ""
    define: str = DEF
    text: str | None = ""
    args: tuple[str, ...] = ("--check",)
    graph: str | None = "graph.py"
    files: dict[str, str | bytes] = field(default_factory=dict)
    code: int = 2
    program: str = "run"

    def write(self, folder: Path) -> list[str]:
        """Write the files below `folder` and return the places that an error must name."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        if self.text is None:
            return []
        text = self.text or graph_text(TOP + self.top, self.define, LINES | self.lines)
        (folder / "graph.py").write_text(text)
        named = [f"    {name} = " for name in (self.lines if self.at is None else self.at)]
        return [
            f"graph.py:{number}"
            for number, line in enumerate(text.splitlines(), start=1)
            if line.endswith("# here") or line.startswith(tuple(named))
        ]


def graph_text(top: str, define: str, lines: dict[str, str]) -> str:
    """Return the text of a graph file."""
    body = "".join(f"    {name} = {value}\n" for name, value in lines.items())
    return f"{top}{define}\n{body}    return made\n"


def live_text(score: str = SCORE, **lines: str) -> str:
    """Return a graph that runs without a model: prompts, a reward and a counter."""
    return graph_text(LIVE_TOP + score, LIVE_DEF, LIVE | lines)


def command(folder: Path, *argv: str, program: str = "run") -> tuple[int, str, str]:
    """Run the command line in this process from `folder` and return exit code, stdout and stderr."""
    main = importlib.import_module(f"pipeline.{program}").main
    out, err, before, path = io.StringIO(), io.StringIO(), Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(argv))
    finally:
        os.chdir(before)
        sys.path[:] = path
    return code, out.getvalue(), err.getvalue()


def normal(text: str, folder: Path) -> str:
    """Return the text without machine-specific parts."""
    return text.replace(str(folder), "DIR").replace(str(REPOSITORY), "REPO")
