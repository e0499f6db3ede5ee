"""What episodes cost beside model and tools, what running ahead gains, and how well the simulator foretells it.

python -m benchmarks.episodes [--steps 8] [--groups 32] [--samples 8] [--turns 8] [--mean-s 0.1] [--only sleeping]
                              [--served]

Each step has 256 episodes of 8 turns. The environment answers after a time of its own (lognormal; the same in all
arms), as a coroutine that sleeps, in 4 processes. Arms: synchronous, and max_staleness 1 and 2 with refits in flight,
2 also dropping what gets too old; on Ray and TransferQueue, with a tiny model on the torch backend, which samples in
waves. The table has the mean seconds of a step after the first, the fractions of the time of episode tasks in which
turns were sampled, in which no turn was sampled and an environment worked, and the rest: the overhead; and the seconds
of a step that the simulator foretells from the record of the synchronous arm. The last row: 1,000 episodes whose turns
sleep at the same time in 4 processes; with --served, in those of 4 workers of a group, asked over connections.

Aims: overhead below 3 %; foretold within 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from benchmarks.report import report
from graphs.quickstart import TINY_QWEN3
from ops.rewards import turn_sum
from pipeline import Graph, Model, Schedule, WorkerGroup
from pipeline.analysis.episodes import alone
from pipeline.analysis.report import analyse
from pipeline.declare.times import ENVIRONMENT, GENERATE
from pipeline.engine.driver import Driver
from pipeline.plan.planner import plan
from pipeline.record.history import Tasks
from pipeline.record.spent import parts_of
from pipeline.rundir import RunDir
from pipeline.simulation.recording import recorded, simulated
from pipeline.simulation.whatif import Changes
from stages import (
    Advantage,
    ClippedLoss,
    End,
    Environment,
    Episode,
    Filter,
    Generated,
    Messages,
    Prompts,
    Refit,
    Reply,
    Reward,
    Train,
    TruncatedIS,
)
from stages.episode.attempts import Places
from stages.episode.environment_client import ServedEnvironments
from stages.episode.environment_server import EnvironmentServer
from stages.episode.processes import Processes

PROCESSES, TAIL, WARM = 4, 0.8, 2
ARMS: tuple[tuple[str, int, Literal["wait", "drop"]], ...] = (
    *(("sync", 0, "wait"), ("k=1", 1, "wait"), ("k=2", 2, "wait")),
    ("k=2, drop", 2, "drop"),
)
SLEEPING, SLEEPS_S = 1000, 1.0
Span = tuple[float, float]


@dataclass(frozen=True)
class Slow(Environment):
    """Answers with a digit, after a lognormal time with this mean; ends after `turns` replies."""

    turns: int = 8
    mean_s: float = 0.1

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        times = [draw.lognormvariate(-TAIL * TAIL / 2, TAIL) * self.mean_s for _ in range(self.turns)]
        return times, row["prompt"]

    async def turn(self, state: Any, reply: Reply) -> Messages | End:
        await asyncio.sleep(state.pop())
        return Messages("1", reward=0.1 * reply.text.count("1")) if state else End()


def graph(options: argparse.Namespace, staleness: int, on_stale: Literal["wait", "drop"]) -> Graph:
    """GRPO on slow episodes."""
    task = Generated("reverse", digits=4)
    policy = Model("tiny-qwen3", config=TINY_QWEN3 | {"max_position_embeddings": 256}, alphabet=task.alphabet)
    sampler, learner = (WorkerGroup(name, backend="torch", threads=1) for name in ("sampler", "learner"))
    loss = ClippedLoss(correction=TruncatedIS(cap=2.0) if staleness else None)
    return Graph(
        name="episodes",
        source=Prompts(task, batch=options.groups),
        stages=(
            Episode(
                policy,
                Slow(options.turns, options.mean_s),
                on=sampler,
                samples_per_prompt=options.samples,
                turns=options.turns,
                tokens=16 * options.turns,
                turn_tokens=8,
                environments=PROCESSES,
            ),
            Filter("complete"),
            Reward(turn_sum),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=loss, lr=1e-4, minibatches=2, prev="own"),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=Schedule(
            steps=options.steps,
            max_staleness=staleness,
            on_stale=on_stale,
            refit="in_flight" if staleness else "drain",
            seed=0,
        ),
    )


def run(options: argparse.Namespace, staleness: int, on_stale: Literal["wait", "drop"], folder: Path) -> Path:
    """Run an arm. Returns its run directory."""
    from pipeline.executors.ray import RayExecutor

    described = graph(options, staleness, on_stale)
    planned = plan(described)[0]
    run_dir = RunDir(folder).create()
    run_dir.plan.write_bytes(msgspec.json.encode(planned))
    Driver(described, planned, RayExecutor(modules=[sys.modules[Slow.__module__]]), run_dir=run_dir).execute()
    return folder


def covered_s(spans: Iterable[Span], others: Iterable[Span] = ()) -> float:
    """Seconds in which one of the spans runs, and none of the others."""
    return sum(end_s - start_s for start_s, end_s in alone(spans, others))


def shares(tasks: Tasks) -> dict[str, float]:
    """Percent of the time in which episode tasks run, but for those of the first steps: turns are sampled, environments
    work alone, the rest. Tasks that run at the same time share their worker."""
    ran = [(one.start_s, one.end_s) for n in tasks.spent if tasks.submitted[n].step >= WARM for one in tasks.ran[n]]
    parts = [p for spent in tasks.spent.values() for event in spent for sample in parts_of(event) for p in sample]
    sampling, waiting = ([(p.start_s, p.end_s) for p in parts if p.name == name] for name in (GENERATE, ENVIRONMENT))
    took_s, idle_s, rest_s = covered_s(ran), covered_s(ran, sampling), covered_s(ran, [*sampling, *waiting])
    named = {"sampled %": took_s - idle_s, "environments alone %": idle_s - rest_s, "overhead %": rest_s}
    return {name: round(100 * seconds / took_s, 2) for name, seconds in named.items()}


def rows_of(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row per arm."""
    rows: list[dict[str, Any]] = []
    paths: list[Path] = []
    for name, staleness, on_stale in ARMS:
        paths.append(run(options, staleness, on_stale, folder / str(len(paths))))
        recording = recorded(paths[-1])
        measured_s = analyse(recording.events, recording.plan).steps.mean
        change = Changes(max_staleness=staleness, refit="in_flight", on_stale=on_stale) if staleness else Changes()
        seen = [simulated(recorded(paths[0]), change, seed=seed)[1].steps.mean for seed in range(5)]
        foretold_s = statistics.fmean(seen)
        row = {
            "arm": name,
            "s/step": round(measured_s, 3),
            **shares(Tasks(recording.events)),
            "foretold s/step": round(foretold_s, 3),
            "error %": round(100 * (foretold_s / measured_s - 1), 1),
        }
        rows.append(row)
        rows[-1]["x sync"] = round(rows[0]["s/step"] / row["s/step"], 2)
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def sleeping(*, served: bool) -> dict[str, Any]:
    """Seconds that all turns take which sleep at the same time."""

    async def all_of(places: Places) -> float:
        episodes = []
        for number in range(SLEEPING):
            place = places.place()  # the one with the fewest
            place.episodes.add(number)
            episodes.append((place, number))
        opened = {"row": {"prompt": "1"}, "seed": (0,)}
        await asyncio.gather(*(place.ask("open", number, 60.0, **opened) for place, number in episodes))
        begun_s = time.monotonic()
        await asyncio.gather(*(place.ask("turn", number, 60.0, reply=Reply("1")) for place, number in episodes))
        return time.monotonic() - begun_s

    with ExitStack() as ends:
        made: Processes | ServedEnvironments
        if served:
            servers = [EnvironmentServer(Processes(Sleeper(), count=1, log=None)) for _ in range(PROCESSES)]
            for server in servers:
                ends.callback(server.close)
            made = ServedEnvironments(Sleeper(), [server.listen("127.0.0.1") for server in servers], first=0)
        else:
            made = Processes(Sleeper(), count=PROCESSES, log=None)
        ends.callback(made.close)
        took_s = asyncio.run(all_of(made))
    where = f"{PROCESSES} {'served ' if served else ''}processes"
    return {"arm": f"{SLEEPING} turns of {SLEEPS_S:g} s in {where}", "s/step": round(took_s, 3)}


@dataclass(frozen=True)
class Sleeper(Environment):
    """Its turns sleep."""

    def open(self, row: Mapping[str, Any], draw: Random) -> tuple[Any, str]:
        return None, row["prompt"]

    async def turn(self, state: Any, reply: Reply) -> Messages | End:
        await asyncio.sleep(SLEEPS_S)
        return End()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--mean-s", type=float, default=0.1)
    parser.add_argument("--only", choices=("sleeping",))
    parser.add_argument("--served", action="store_true")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.steps < 5:
        parser.error("--steps is at least 5: the first two are left out, and drop samples ahead")
    rows: list[dict[str, Any]] = []
    if options.only is None:
        with tempfile.TemporaryDirectory() as folder:
            rows = rows_of(options, Path(folder))
    rows.append(sleeping(served=options.served))
    episodes = options.groups * options.samples
    notes = f"{episodes} episodes of {options.turns} turns, whose answers take {options.mean_s:g} s on average."
    if options.only is None:
        worst = max(abs(row["error %"]) for row in rows[1:-1])
        most = max(row["overhead %"] for row in rows[:-1])
        notes += f" Overhead at most {most:.1f} %; aim: 3. Foretold within {worst:.1f} %; aim: 15."
    report("episodes", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
