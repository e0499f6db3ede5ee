"""How well the simulator predicts runs that it was not fitted to, and how fast it is.

python -m benchmarks.simulator [--steps 20] [--rounds 3] [--only speed] [--out FILE]

Three synchronous runs are recorded on Ray and TransferQueue: the quickstart; the quickstart with delayed groups
(lognormal, benchmarks/delayed.py); and a graph whose stages only sleep (benchmarks/asleep.py). From these records alone
the simulator predicts other configurations, which are then run:

    contended        no delays, max_staleness=1: sampler and learner compute at the same time on the same cores
    late, wait       delayed groups, max_staleness=1, in-flight refit
    late, drop       delayed groups, max_staleness=2, on_stale="drop", in-flight refit
    asleep, ...      the same two with sleeping stages, so that a busy machine does not disturb them

Aim: predicted seconds per step within 15 % of the measured ones. Speed: 1,024 rollout workers for 100 steps of 1,024
groups in under 30 s of one core. A loop of 5 million additions measures how fast that core is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks import asleep, delayed
from benchmarks.report import report
from graphs import quickstart
from pipeline import Graph, Schedule
from pipeline.analysis.report import Report, analyse
from pipeline.plan.plan import Plan
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir
from pipeline.simulation.distributions import parse
from pipeline.simulation.durations import Drawn, Durations
from pipeline.simulation.recording import recorded, simulated
from pipeline.simulation.virtual_run import Simulation
from pipeline.simulation.whatif import Changes

MEAN_S, TAIL = 0.25, 0.8
AIM, AIM_S = 0.15, 30.0
CORES = float(len(os.sched_getaffinity(0)))
WAIT = Changes(max_staleness=1, refit="in_flight")
DROP = Changes(max_staleness=2, on_stale="drop", refit="in_flight")
RUNS: dict[str, tuple[str, Changes]] = {  # the record that a run is predicted from, and the changes to it
    "sync": ("sync", Changes()),
    "contended": ("sync", Changes(max_staleness=1)),
    "late, sync": ("late, sync", Changes()),
    "late, wait": ("late, sync", WAIT),
    "late, drop": ("late, sync", DROP),
    "asleep, sync": ("asleep, sync", Changes()),
    "asleep, wait": ("asleep, sync", WAIT),
    "asleep, drop": ("asleep, sync", DROP),
}


def described(name: str, steps: int) -> Graph:
    """The graph of a configuration: the quickstart without evaluation, or the sleeping graph."""
    change = RUNS[name][1]
    schedule = Schedule(
        steps=steps,
        max_staleness=change.max_staleness or 0,
        on_stale=change.on_stale or "wait",
        refit=change.refit or "drain",
    )
    if name.startswith("asleep"):
        return asleep.graph(schedule)
    graph = quickstart.graph(
        steps=steps,
        max_staleness=schedule.max_staleness,
        on_stale=schedule.on_stale,
        refit=schedule.refit,
        warm_start_steps=40,
        warm_start_until=1.0,
    )
    if name.startswith("late"):
        return delayed.with_delays(graph, mean_s=MEAN_S, tail=TAIL)
    return replace(graph, stages=tuple(stage for stage in graph.stages if stage.name != "evaluate"))


def run(name: str, steps: int, folder: Path) -> None:
    """Run a configuration in this process, recorded in `folder`."""
    from pipeline.engine.driver import Driver
    from pipeline.executors.ray import RayExecutor

    graph = described(name, steps)
    planned = plan(graph)[0]
    run_dir = RunDir(folder).create()
    run_dir.plan.write_bytes(msgspec.json.encode(planned))
    Driver(graph, planned, RayExecutor(modules=(delayed, asleep)), run_dir=run_dir).execute()


def measured(name: str, steps: int, folder: Path) -> Path:
    """Run a configuration in a separate process. Returns its run directory."""
    path = folder / name.replace(", ", "-")
    command = [
        sys.executable,
        "-m",
        "benchmarks.simulator",
        "--run",
        name,
        "--steps",
        str(steps),
        "--folder",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    return path


def read(path: Path) -> Report:
    """The report of a run directory."""
    recording = recorded(path, cores=CORES)
    return analyse(recording.events, recording.plan)


def predicted(record: Path, change: Changes, rounds: int = 5) -> list[Report]:
    """Predict a changed run from the record of another, for several seeds."""
    recording = recorded(record, cores=CORES)
    return [simulated(recording, change, seed=seed)[1] for seed in range(rounds)]


def compared(names: Sequence[str], steps: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Predicted and measured numbers of each configuration. Each round has every run once; numbers are medians over
    rounds, since a machine's speed varies from minute to minute."""
    needed = [name for name in RUNS if name in names or any(RUNS[other][0] == name for other in names)]
    runs: dict[str, list[Path]] = {name: [] for name in needed}
    for number in range(rounds):
        for name in needed:
            runs[name].append(measured(name, steps, folder / str(number)))
            print(
                f"round {number + 1}: {name} {1e3 * read(runs[name][-1]).steps.mean:.0f} ms",
                file=sys.stderr,
                flush=True,
            )
    rows = []
    for name in names:
        record, change = RUNS[name]
        predictions = [predicted(path, change) for path in runs[record]]
        message = [one for reports in predictions for one in reports]
        real = [read(path) for path in runs[name]]
        predicted_s = [statistics.fmean(one.steps.mean for one in reports) for reports in predictions]
        real_s = [one.steps.mean for one in real]
        dropped = [100 * statistics.fmean(one.dropped.share for one in reports) for reports in (message, real)]
        age = [statistics.fmean(one.staleness.mean for one in reports) for reports in (message, real)]
        error = statistics.median(predicted_s) / statistics.median(real_s) - 1
        paces = [pace(mine, other) for mine, other in zip(runs[name], runs[record])]
        rows.append(
            {
                "configuration": name,
                "predicted ms": round(1e3 * statistics.median(predicted_s), 1),
                "measured ms": round(1e3 * statistics.median(real_s), 1),
                "error %": round(100 * error, 1),
                "within 15 %": "fitted to it" if name == record else "yes" if abs(error) <= AIM else "NO",
                "rounds, predicted ms": " ".join(f"{1e3 * one:.0f}" for one in predicted_s),
                "rounds, measured ms": " ".join(f"{1e3 * one:.0f}" for one in real_s),
                "pace": " ".join(f"{one:.2f}" for one in paces),
                "busy, predicted": _busy(message),
                "busy, measured": _busy(real),
                "staleness": "{:.2f} / {:.2f}".format(*age),
                "dropped %": "{:.1f} / {:.1f}".format(*dropped),
                "bound by": real[0].critical_path.sentence,
            }
        )
    return rows


def pace(run: Path, record: Path) -> float:
    """The ratio of CPU seconds per trainer task, run over record. Both have the same tasks, so it shows whether the
    machine was slower."""
    took_s = []
    for path in (run, record):
        events = [event for _, event in trace.read(RunDir(path).events) if isinstance(event, trace.Ran)]
        took_s.append(statistics.median(event.cpu_s for event in events if event.stage == "train" and event.step > 0))
    return took_s[0] / max(took_s[1], 1e-9)


def _busy(reports: Sequence[Report]) -> str:
    groups = reports[0].utilisation
    means = {name: statistics.fmean(one.utilisation[name] for one in reports) for name in groups}
    return " ".join(f"{name} {100 * share:.0f} %" for name, share in means.items())


def wide(workers: int, steps: int, on_stale: Literal["wait", "drop"]) -> Plan:
    """The quickstart's graph with `workers` rollout workers and as many groups per step."""
    graph = quickstart.graph(
        steps=steps, max_staleness=2, on_stale=on_stale, refit="in_flight", prompts_per_step=workers
    )
    return _with_workers(plan(graph)[0], workers)


def _with_workers(planned: Plan, workers: int) -> Plan:
    return Changes(workers={"sampler": workers}).applied(
        planned, Durations({stage.name: Drawn(parse("0.01")) for stage in planned.stages})
    )[0]


def speed(workers: int = 1024, steps: int = 100) -> list[dict[str, Any]]:
    """CPU seconds of a large simulation on one core."""
    rows = []
    seconds = {"rollout": "lognormal(10, 0.8)", "train": "2 @ 1", "prev_logprobs": "0.5 @ 1", "refit": "0.1"}
    for on_stale in ("wait", "drop"):
        planned = wide(workers, steps, on_stale)  # type: ignore[arg-type]
        durations = Durations({s.name: Drawn(parse(seconds.get(s.name, "0.01"))) for s in planned.stages})
        counted = [0]

        def count(_: object, counted: list[int] = counted) -> None:
            counted[0] += 1

        loop_before_s = additions()
        began_s = time.process_time()
        simulation = Simulation(planned, durations, write=count)
        simulation.run()
        took_s = time.process_time() - began_s
        loop_s = statistics.fmean((loop_before_s, additions()))
        rows.append(
            {
                "configuration": f"{workers} workers x {steps} steps, {on_stale}",
                "CPU s": round(took_s, 1),
                "under 30 s": "yes" if took_s < AIM_S else "NO",
                "5 M additions s": round(loop_s, 2),
                "virtual s": round(simulation.now_s, 1),
                "events": counted[0],
            }
        )
    return rows


def additions(count: int = 5_000_000) -> float:
    """CPU seconds of a plain loop, a measure of the machine's current speed."""
    began_s, total = time.process_time(), 0
    for i in range(count):
        total += i
    return time.process_time() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each configuration, in turns")
    parser.add_argument("--only", choices=("speed", *RUNS), nargs="+", help="only these configurations")
    parser.add_argument("--run", choices=RUNS, help="run only this configuration, recorded in --folder")
    parser.add_argument("--folder", type=Path, help="keep the run directories here")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    if options.run:
        run(options.run, options.steps, options.folder)
        return
    rows: list[dict[str, Any]] = []
    chosen = options.only or [*RUNS, "speed"]
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in chosen if name in RUNS]
        if names:
            rows += compared(names, options.steps, options.rounds, options.folder or Path(folder))
    if "speed" in chosen:
        rows += speed()
    notes = (
        f"{options.rounds} rounds of {options.steps} steps of 32 x 16 samples on {CORES:g} cores; delays lognormal, "
        f"mean {MEAN_S} s, sigma {TAIL}. Medians of the rounds' means after the warm-up; predictions are means over "
        "5 seeds, from the synchronous record of the same round alone. Staleness in versions and dropped groups: "
        "predicted / measured. Pace: CPU seconds of the trainer's tasks in each run over those in its record; not 1 "
        "if the machine was faster in one of them."
    )
    report("simulator", rows, list(dict.fromkeys(key for row in rows for key in row)), notes, options.out)


if __name__ == "__main__":
    main()
