"""Fits the durations of a recorded run from its events alone.

    durations, notes = fitted(plan, [event for _, event in trace.read(run_dir.events)])

Each stage's seconds are fitted as fixed + per sample (+ per token if that explains clearly more), with no negative
coefficient; the ratios of single tasks to the fit are kept. For streams, the time at which each group finished is kept
too. Streams that ran in a process at the same time are given equal parts of it, since the simulator shares it equally
(`pipeline.simulation.shares`). The first step is left out, because it includes loading and compilation. A synchronous
run is the best record: if tasks of different processes contended while they were recorded, the contention counts as
their own time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from types import MappingProxyType

from pipeline.analysis.episodes import waits_by_task
from pipeline.plan.plan import Plan, PlannedStage
from pipeline.record import trace
from pipeline.record.history import Tasks
from pipeline.simulation.durations import Came, Costs, Durations, LinearFit, Recorded, StageTimes
from pipeline.simulation.episodes import recorded_processes, saved_seconds
from pipeline.simulation.least_squares import non_negative
from pipeline.simulation.shares import RecordedStreams, first_end_s, free_seconds

TOKENS_PAY = 0.8  # a fit by tokens is used if it leaves less than this fraction of the squared error,
WORTH = 0.01  # and if the relative error without tokens is above this
MOST_ROUNDS = 16  # of a stream that waits for environments now and then: enough for others to compute meanwhile


def fitted(
    plan: Plan,
    events: Iterable[trace.TraceEvent],
    *,
    cores: float | None = None,
    environments: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Durations, list[str]]:
    """Return the durations of every stage that ran, and notes on what the record lacks. `plan` is the run's own;
    `environments` are other numbers of environment processes per worker, by stage."""
    tasks = Tasks(events)
    streams = RecordedStreams(plan, tasks)
    stages: dict[str, StageTimes] = {}
    proportional: dict[int, list[str]] = defaultdict(list)  # samples per task -> stages that ran at this size only
    for stage in plan.stages:
        if stage.shape == "external":
            stages[stage.name] = _outside(stage, tasks)
            continue
        ran = tasks.of(stage.name)
        if not ran:
            continue
        if stage.shape == "stream":
            stages[stage.name], sizes = _stream(
                plan, stage, tasks, ran, cores, streams, environments.get(stage.name, 0)
            )
        else:
            stages[stage.name], sizes = _map(plan, stage, tasks, ran)
        if len(sizes) == 1 and stage.path and max(sizes):
            proportional[max(sizes)].append(stage.name)
    notes = [
        f"{', '.join(names)} only ran on {samples} samples: other sizes are assumed to scale in proportion"
        for samples, names in proportional.items()
    ]
    return Durations(stages, _costs(plan, tasks, streams.room)), notes


def _map(plan: Plan, stage: PlannedStage, tasks: Tasks, ran: Sequence[trace.Submitted]) -> tuple[Recorded, set[int]]:
    points = []
    cpu_s = took_s = 0.0
    for task in ran:
        spans = tasks.ran[task.task]
        replicas = _replicas(plan, stage) if task.replica is None and stage.sharding else 1
        samples = -(-task.samples // replicas)
        tokens = sum(tasks.tokens.get(group, 0) for group in task.groups) * plan.group_size // replicas
        seconds = [span.end_s - span.start_s for span in spans]
        if stage.shape == "transfer":  # its sides wait for each other
            seconds = [max(span.end_s for span in spans) - min(span.start_s for span in spans)]
        points += [(float(samples), float(tokens), one) for one in seconds]
        cpu_s += sum(span.cpu_s for span in spans)
        took_s += sum(seconds) * (len(spans) if stage.shape == "transfer" else 1)
    line = fit(points, cores=cpu_s / took_s if took_s else 0.0)
    return Recorded(line=line, batch=plan.batch), {int(point[0]) for point in points}


def _stream(
    plan: Plan,
    stage: PlannedStage,
    tasks: Tasks,
    ran: Sequence[trace.Submitted],
    cores: float | None,
    streams: RecordedStreams,
    environments: int,
) -> tuple[Recorded, set[int]]:
    group = next(group for group in plan.groups if group.name == stage.groups[0])
    spans = {task.task: tasks.ran[task.task][0] for task in ran}
    firsts = [streams.within(n, first_end_s(tasks, n, span.end_s)) for n, span in spans.items()]
    most = min(float(group.threads) or float("inf"), cores or float("inf"))
    later_s = saved_seconds(tasks, stage.name, environments) if environments else {}  # by group
    if later_s:  # not known of all tasks of a long record
        ran = [task for task in ran if not later_s.keys().isdisjoint(task.groups)]
        spans = {task.task: spans[task.task] for task in ran}
    waits = waits_by_task(tasks)
    timed = [task for task in ran if task.task in waits]
    if any(waits[task.task] for task in timed):
        return _with_environments(plan, tasks, timed, streams, waits, later_s, most), {task.samples for task in timed}
    wholes = {n: streams.within(n, span.end_s) + _later(tasks, n, later_s) for n, span in spans.items()}
    # Streams share a GPU from their first to their last token. Elsewhere, a group cannot finish before it is computed,
    # so the first group to finish bounds how long computing took.
    longest_s = sum(wholes.values()) if group.gpus else sum(firsts)
    used = min(most, max(sum(span.cpu_s for span in spans.values()) / max(longest_s, 1e-9), 1e-9))
    points, came = [], {}
    for task in ran:
        n, span = task.task, spans[task.task]
        computed_s = wholes[n] if group.gpus else min(span.cpu_s / used, wholes[n])
        computed_at_s = streams.behind(n, computed_s)
        tokens = sum(tasks.tokens.get(number, 0) for number in task.groups) * plan.group_size
        if computed_s > 0:
            points.append((float(task.samples), float(tokens), computed_s))
        for put in tasks.puts[n]:
            by_s = max((later_s.get(number, 0.0) for number in put.groups), default=0.0)
            took_s = max(0.0, streams.within(n, put.end_s) + by_s)
            fraction = min(1.0, took_s / computed_s) if computed_s > 0 else 1.0
            wait_s = max(0.0, put.end_s + by_s - computed_at_s)
            came.update({number: Came(fraction, wait_s, tasks.tokens.get(number, 0)) for number in put.groups})
    processes = recorded_processes(tasks, stage.name)
    made = Recorded(line=fit(points, cores=used), batch=plan.batch, came=came, processes=processes)
    return made, {task.samples for task in ran}


def _with_environments(
    plan: Plan,
    tasks: Tasks,
    ran: Sequence[trace.Submitted],
    streams: RecordedStreams,
    waits: Mapping[int, Sequence[tuple[float, float]]],
    later_s: Mapping[int, float],
    most: float,
) -> Recorded:
    """Episodes: what they compute, apart from the time in which environments alone work (`waits`), since that passes
    for several tasks at once. `later_s` changes the latter only. A task that is not recorded as a whole, as one whose
    worker was lost, says neither."""
    points, came, away_s = [], {}, []
    cpu_s = sum(tasks.ran[task.task][0].cpu_s for task in ran)
    for task in ran:
        n, span = task.task, tasks.ran[task.task][0]

        def computed_s(until_s: float, n: int = n) -> float:
            away_s = sum(min(end_s, until_s) - start_s for start_s, end_s in waits[n] if start_s < until_s)
            return max(0.0, streams.within(n, until_s) - away_s)

        whole_s = computed_s(span.end_s)
        away_s.append(max(0.0, sum(end_s - start_s for start_s, end_s in waits[n]) + _later(tasks, n, later_s)))
        tokens = sum(tasks.tokens.get(number, 0) for number in task.groups) * plan.group_size
        if whole_s > 0:
            points.append((float(task.samples), float(tokens), whole_s))
        for put in tasks.puts[n]:
            fraction = min(1.0, computed_s(put.end_s) / whole_s) if whole_s > 0 else 1.0
            came.update({number: Came(fraction, 0.0, tasks.tokens.get(number, 0)) for number in put.groups})
    cores = min(most, max(cpu_s / max(sum(seconds for *_, seconds in points), 1e-9), 1e-9))
    return Recorded(
        line=fit(points, cores=cores),
        batch=plan.batch,
        came=came,
        processes=recorded_processes(tasks, ran[0].stage),
        away_s=fmean(away_s),
        rounds=max(1, min(MOST_ROUNDS, round(median(len(waits[task.task]) for task in ran)))),
    )


def _later(tasks: Tasks, task: int, later_s: Mapping[int, float]) -> float:
    """Return by how much the last group of a stream ends later."""
    ended_s = {number: put.end_s for put in tasks.puts[task] for number in put.groups}
    if not ended_s:
        return 0.0
    return max(at_s + later_s.get(number, 0.0) for number, at_s in ended_s.items()) - max(ended_s.values())


def _outside(stage: PlannedStage, tasks: Tasks) -> Recorded:
    admitted = {group: e.at_s for e in tasks.others if isinstance(e, trace.Admitted) for group in e.groups}
    delays_s = [
        put.end_s - admitted[group]
        for put in tasks.others
        if isinstance(put, trace.Put) and put.stage == stage.name
        for group in put.groups
        if group in admitted
    ]
    return Recorded(line=fit([(0.0, 0.0, delay_s) for delay_s in delays_s], cores=0.0))


def _costs(plan: Plan, tasks: Tasks, room: Mapping[str, int]) -> Costs:
    dispatch: dict[str, list[float]] = defaultdict(list)
    report: dict[str, list[float]] = defaultdict(list)
    free = free_seconds(plan, tasks)
    for number, task in tasks.submitted.items():
        if number in tasks.ran and number in tasks.acknowledged:
            spans = tasks.ran[number]
            first = min(spans, key=lambda span: span.start_s)
            own = free[tasks.process.get((first.group, first.worker), 0)]
            dispatch[task.stage].append(own.within(task.at_s, first.start_s))
            ended_s = {group: put.end_s for put in tasks.puts[number] for group in put.groups}
            if plan.stage(task.stage).shape != "stream" or not ended_s:
                ended_s = dict.fromkeys(task.groups or (0,), max(span.end_s for span in spans))
            report[task.stage] += [
                message.at_s - ended_s[group]
                for message in tasks.acknowledged[number]
                for group in (message.groups or (0,))
                if group in ended_s
            ]
    admitted = sum(len(event.groups) for event in tasks.others if isinstance(event, trace.Admitted))
    dropped = [e for e in tasks.others if isinstance(e, trace.Dropped) and plan.gate and e.stage == plan.gate.stage]
    reasons = Counter(event.reason for event in dropped for _ in event.groups)
    saved_s = [event.end_s - event.start_s for event in tasks.others if isinstance(event, trace.Held)]
    driver_s, beside_s = _processes(tasks)
    return Costs(
        dispatch_s={stage: max(0.0, median(values)) for stage, values in dispatch.items()},
        report_s={stage: max(0.0, median(values) - driver_s) for stage, values in report.items()},
        driver_s=driver_s,
        beside_cpu_s=beside_s,
        checkpoint_s=median(saved_s) if saved_s else 0.0,
        drop_rate=sum(reasons.values()) / admitted if admitted else 0.0,
        drop_reason=reasons.most_common(1)[0][0] if reasons else "dropped",
        again_s=_again_s(plan, tasks),
        room=room,
    )


def _again_s(plan: Plan, tasks: Tasks) -> float:
    """Return the seconds per token in which a sampler's replica on GPUs computes its running samples again, after
    weights that came in mid-sequence: those of the quickest stage that scores, or else a third of those of an update,
    whose backward pass takes twice as long as its forward pass. 0 if the record was made with such weights, since the
    time is then part of its rollout."""
    groups = {group.name: group for group in plan.groups}
    samplers = [groups[stage.groups[0]] for stage in plan.stages if stage.shape == "stream" and stage.stamps]
    if plan.refit == "in_flight" or not samplers or not samplers[0].gpus:
        return 0.0
    each_s: dict[bool, list[float]] = {True: [], False: []}
    for stage in plan.stages:
        group = groups[stage.groups[0]]
        if stage.shape != "map" or not (stage.uses or stage.updates) or not group.gpus:
            continue
        ran = tasks.of(stage.name)
        tokens = sum(tasks.tokens.get(number, 0) for task in ran for number in task.groups) * plan.group_size
        took_s = sum(span.end_s - span.start_s for task in ran for span in tasks.ran[task.task]) / group.workers
        if tokens:
            each_s[bool(stage.updates)].append(took_s * group.gpus / tokens / (3.0 if stage.updates else 1.0))
    return min(each_s[False] or each_s[True], default=0.0) * samplers[0].replicas / samplers[0].gpus


def _processes(tasks: Tasks) -> tuple[float, float]:
    """Return (driver CPU seconds per report, CPU seconds outside tasks per task); 0 if the record lacks them."""
    used = [e for e in tasks.others if isinstance(e, trace.StepEnded) and e.processes_cpu_s]
    if len(used) < 2:
        return 0.0, 0.0
    first, last = used[0], used[-1]
    spans = [span for spans in tasks.ran.values() for span in spans if first.at_s < span.end_s <= last.at_s]
    reports = [
        event for events in tasks.acknowledged.values() for event in events if first.at_s < event.at_s <= last.at_s
    ]
    if not spans or not reports:
        return 0.0, 0.0
    tasks_s = sum(span.cpu_s for span in spans)
    beside_s = last.processes_cpu_s - first.processes_cpu_s - tasks_s
    driver_s = last.driver_cpu_s - first.driver_cpu_s
    if any(isinstance(event, trace.Started) and event.executor == "local" for event in tasks.others):
        driver_s = max(0.0, driver_s - tasks_s)  # the tasks ran in the driver's process
    return driver_s / len(reports), max(0.0, beside_s) / len({span.task for span in spans})


def _replicas(plan: Plan, stage: PlannedStage) -> int:
    return next(group.replicas for group in plan.groups if group.name == stage.groups[0])


def fit(points: Sequence[tuple[float, float, float]], *, cores: float) -> LinearFit:
    """Fit a line through (samples, tokens, seconds) with the least relative errors."""
    if not points:
        return LinearFit(cores=cores)
    by_sample = non_negative([((1.0, samples), seconds) for samples, _, seconds in points])
    coefficients, error = (*by_sample[0], 0.0), by_sample[1]
    if len({tokens for _, tokens, _ in points}) > 2 and error > WORTH**2 * len(points):
        by_token, token_error = non_negative([((1.0, s, tokens), seconds) for s, tokens, seconds in points])
        if token_error < TOKENS_PAY * error:
            coefficients = (by_token[0], by_token[1], by_token[2])
    fixed_s, per_sample_s, per_token_s = coefficients
    made = [fixed_s + per_sample_s * samples + per_token_s * tokens for samples, tokens, _ in points]
    ratios = sorted(seconds / fitted_s for (_, _, seconds), fitted_s in zip(points, made) if fitted_s > 0)
    return LinearFit(
        fixed_s=fixed_s, per_sample_s=per_sample_s, per_token_s=per_token_s, cores=cores, ratios=tuple(ratios) or (1.0,)
    )
