"""Checks what user code returns to a worker: runners, outputs, columns and metrics. Knows stages, no data plane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

from pipeline.data_plane.plain import is_tensor, plain
from pipeline.data_plane.tensordicts import from_tensordict, is_tensordict
from pipeline.declare.abilities import bounds_of, prefixes_of
from pipeline.declare.columns import Columns, Ragged
from pipeline.declare.runners import runner_fault
from pipeline.declare.stage import Stage, runner_problem
from pipeline.declare.task import Output, Task
from pipeline.declare.times import SampleTimes
from pipeline.errors import Problem, StageError, counted, line_of_code, shown
from pipeline.plan.names import METRICS
from pipeline.record.spent import MOST_NAMES


def runner(stage: Stage, made: Any) -> Any:
    """Return the runner that setup returned. Raises StageError if it cannot be one."""
    if wrong := runner_fault(made, stage.shape):
        shows = f"is missing: setup() returned {shown(made)}" if not callable(made) else wrong
        raise StageError(runner_problem(stage, shows, line_of_code(made)))
    return made


def output(stage: Stage, produced: Output | Columns | None, stages: Iterable[Stage] = ()) -> Output:
    """Return what a runner returned as an Output with columns. Raises StageError if a metric is not a number, or has
    the name of a metric that the engine or another of the graph's `stages` reports."""
    made = produced if isinstance(produced, Output) else Output(columns={} if produced is None else produced)
    if is_tensordict(made.columns):
        ragged = {field.name for field in stage.writes if field.ragged}
        made = replace(made, columns=from_tensordict(made.columns, ragged))
    if not isinstance(made.columns, Mapping):
        what = f"the runner of stage {stage.name!r} returned {shown(made.columns)}"
        raise _error(stage, what, "it returns columns by their names", "return {'name': column}, or an Output")
    numbers = {name: _number(stage, name, value) for name, value in made.metrics.items()}
    for name in numbers:
        if "/" in name:
            _check_prefix(stage, name, stages)
    return replace(made, columns={name: plain(column) for name, column in made.columns.items()}, metrics=numbers)


def own(produced: Any) -> Any:
    """Return what a stream yielded with copies of its columns: the stream goes on, and may use its buffers again."""
    if isinstance(produced, Output):
        return replace(produced, columns=own(produced.columns))
    if is_tensordict(produced):
        return produced.clone()
    if isinstance(produced, Mapping):
        return {name: _copied(column) for name, column in produced.items()}
    return produced


def _copied(column: Any) -> Any:
    if isinstance(column, Ragged):
        return Ragged(_copied(column.values), column.lengths)
    if isinstance(column, list):
        return list(column)
    return column.clone() if is_tensor(column) else column


def _number(stage: Stage, name: str, value: Any) -> float:
    """Return a metric as a float; a tensor or an array must have one element."""
    try:
        if isinstance(name, str) and isinstance(value, float | SupportsFloat):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # it has several elements
        pass
    what = f"stage {stage.name!r} returned the metric {name}={shown(value)}"
    why = "metrics are numbers with a name, averaged over the samples of a step"
    raise _error(stage, what, why, f"return one number for {name!r}, or leave it out")


def _check_prefix(stage: Stage, name: str, stages: Iterable[Stage]) -> None:
    """Raise StageError if the part of a metric's name before the slash belongs to the engine or another stage."""
    prefix, _, rest = name.partition("/")
    if prefix in prefixes_of(stage):
        return
    why = METRICS.get(prefix)
    if why is None and any(other.name == prefix for other in stages):
        why = f"the metrics {prefix}/... are those of stage {prefix!r}"
    if why:
        what = f"stage {stage.name!r} returned the metric {name!r}"
        raise _error(stage, what, why, f"return it as {rest!r}, which is recorded as {stage.name}/{rest}")


def rows(stage: Stage, output: Output, task: Task, samples: int, group_size: int) -> Sequence[int]:
    """Return the samples of the task that the columns of an output belong to. Raises StageError unless the columns are
    those that the stage declares, and it may drop what it drops."""
    _check_columns(stage, output.columns)
    if output.dropped:
        _check_dropped(stage, output.dropped, len(task.groups))
        if output.index is not None:
            what = f"stage {stage.name!r} returned an Output with both index and dropped"
            raise _error(stage, what, "the columns of a gate are those of the groups it keeps", "leave out index")
        return [i for i in range(samples) if i // group_size not in output.dropped]
    if output.index is None:
        return range(samples)
    return _checked_index(stage, output.index, samples, group_size)


def _checked_index(stage: Stage, given: Sequence[int], samples: int, group_size: int) -> list[int]:
    """Return an output's index. Raises StageError unless it names samples of the task, each once, in whole groups, and
    all of them if the stage is no stream."""
    wrong = next((i for i in given if isinstance(i, bool) or i not in range(samples)), None)
    if wrong is not None:
        why = f"the task has samples 0 to {samples - 1}"
        raise _misplaced(stage, f"has index {shown(wrong)}", why)
    index = [int(i) for i in given]
    counts, groups = Counter(index), Counter(i // group_size for i in index)
    if len(counts) < len(index):
        raise _misplaced(
            stage, f"has sample {counts.most_common(1)[0][0]} twice in its index", "a sample has one value"
        )
    if part := [group for group, count in groups.items() if count < group_size]:
        raise _misplaced(stage, f"has a part of group {min(part)} of its task", "an output has whole groups")
    if stage.shape != "stream" and len(index) < samples:
        why = "only a stream returns its samples in parts"
        raise _misplaced(stage, f"has {len(index)} of {samples} samples", why)
    return index


def timed_groups(stage: Stage, output: Output, samples: int, group_size: int) -> list[int]:
    """Return the groups of a task whose times an output has, by position. Raises StageError unless these are the
    times of whole groups of the task."""
    named = sorted(output.times) if all(isinstance(i, int) for i in output.times) else [-1]
    groups = dict.fromkeys(i // group_size for i in named)
    wrong = ""
    if named != [i for group in groups for i in range(group * group_size, (group + 1) * group_size)]:
        wrong = "for a part of a group"
    elif named[0] < 0 or named[-1] >= samples:
        wrong = f"for samples {named[0]} to {named[-1]} of a task that has {samples}"
    for i, times in output.times.items() if not wrong else ():
        if not isinstance(times, SampleTimes) or times.problem:
            says = times.problem if isinstance(times, SampleTimes) else f"they are {shown(times)}"
            wrong = f"for sample {i} that cannot be: {says}"
            break
    names = {name for times in output.times.values() for name, _ in times.parts} if not wrong else set()
    if len(names) > MOST_NAMES:
        wrong = f"with {len(names)} names of parts, and at most {MOST_NAMES} are recorded"
    if wrong:
        why = "times are a SampleTimes for each sample of whole groups, and a part does not end before it begins"
        what = f"stage {stage.name!r} returned times {wrong}"
        raise _error(stage, what, why, "times={i: SampleTimes() for i in index}, and until() for each part")
    return list(groups)


def finishes(output: Output) -> bool:
    """Return whether an output finishes samples, and not only cancels groups or counts open samples."""
    return bool(output.columns) or not (output.cancelled or output.open is not None)


def open_samples(stage: Stage, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of unfinished samples by part. Raises StageError unless a stream gives counts of parts."""
    found = dict(counts) if isinstance(counts, Mapping) else {}
    fine = all(isinstance(name, str) and type(count) is int and count >= 0 for name, count in found.items())
    if stage.shape == "stream" and isinstance(counts, Mapping) and fine and len(found) <= MOST_NAMES:
        return found
    what = f"stage {stage.name!r} returned open={shown(counts)}"
    why = "a stream counts its unfinished samples, by the part of their time that they are in"
    raise _error(stage, what, why, 'open={"environment": 41, "generate": 23}')


def _misplaced(stage: Stage, what: str, why: str) -> StageError:
    fix = "give the positions of all samples of each group, counted from the task's first sample, or leave out index"
    return _error(stage, f"an output of stage {stage.name!r} {what}", why, fix)


def _check_columns(stage: Stage, columns: Mapping[str, Any]) -> None:
    """Raise StageError unless the columns are those that the stage declares."""
    declared, got = {field.name for field in stage.writes if not field.per_step}, set(columns)
    if declared != got:
        parts = [f"lacks {', '.join(sorted(declared - got))}"] if declared - got else []
        parts += [f"adds {', '.join(sorted(got - declared))}"] if got - declared else []
        what = f"the output of stage {stage.name!r} {' and '.join(parts)}"
        why = "a stage must return exactly the columns that it declares in writes"
        raise _error(stage, what, why, "correct `writes`, or what the runner returns")


def check_lengths(stage: Stage, read: Columns, output: Output, index: Sequence[int], keys: Sequence[str]) -> None:
    """Raise StageError if a field of a sample has another length than one of the same dimension that the stage `read`,
    since readers divide all fields of a dimension alike, or is longer than the stage's `bounds` allow, since the plan
    counts on them. `keys` are those of the task, `index` the output's among them."""
    _check_bounds(stage, output.columns, index, keys)
    lengths = {field.ragged: field.name for field in stage.reads if field.ragged and field.name in read}
    for field in stage.writes:
        other, column = lengths.get(field.ragged or ""), output.columns.get(field.name)
        if other is None or not isinstance(column, Ragged) or len(column.lengths) != len(index):
            continue
        wanted = [read[other].lengths[i] for i in index]  # type: ignore[union-attr]
        if list(column.lengths) != wanted:
            at = next(at for at, (own, one) in enumerate(zip(column.lengths, wanted)) if own != one)
            what = f"stage {stage.name!r} returned a field {field.name!r} of length {column.lengths[at]} "
            what += f"for key {keys[index[at]]}, whose {other!r} has the length {wanted[at]}"
            why = f"fields that share the dimension {field.ragged} share its lengths"
            raise _error(stage, what, why, "return one entry per token, or declare another dimension")


def _check_bounds(stage: Stage, columns: Columns, index: Sequence[int], keys: Sequence[str]) -> None:
    for dim, most in bounds_of(stage).items():
        for field in stage.writes:
            column = columns.get(field.name)
            if field.ragged != dim or not isinstance(column, Ragged) or max(column.lengths, default=0) <= most:
                continue
            at = next(at for at, length in enumerate(column.lengths) if length > most)
            key = keys[index[at]] if at < len(index) else f"row {at}"
            what = f"stage {stage.name!r} returned a field {field.name!r} of length {column.lengths[at]} for key {key}"
            why = f"its bounds allow {most} along {dim}, and the plan counts on them"
            raise _error(stage, what, why, "return fewer entries, or correct bounds")


def _check_dropped(stage: Stage, dropped: Collection[int], groups: int) -> None:
    """Raise StageError unless the stage may drop these of its groups, by their position in the task."""
    if stage.gate is None or not set(dropped) <= set(range(groups)):
        what = f"stage {stage.name!r} drops groups {sorted(dropped)} of {groups}"
        why = "only a stage with a gate drops groups, by their position in the task"
        raise _error(stage, what, why, "set gate, or correct dropped")


def repeated(stage: Stage, groups: Collection[int]) -> StageError:
    """Return the error for groups that a stream yielded before."""
    what = f"stage {stage.name!r} yielded group {min(groups)} twice"
    return _error(stage, what, "a group is finished with its first output", "yield each group once")


def unfinished(stage: Stage, left: Collection[int]) -> StageError:
    """Return the error for a stream that ended without output for these groups."""
    what = f"stage {stage.name!r} ended without output for {counted(len(left), 'group')}, {min(left)} among them"
    why = "a stream yields or cancels every group that it is given"
    return _error(stage, what, why, "yield an Output whose index names the samples of those groups")


def _error(stage: Stage, what: str, why: str, fix: str) -> StageError:
    return StageError(Problem(where=str(stage.location), what=what, why=why, fix=fix))
