"""Made-up runs: a minimal engine that follows the rules and otherwise acts in random order.

    run = MadeUp(Setup(max_staleness=2), seed=7)
    run.segment()                             # to the end
    run.write(folder)                         # events.jsonl, plan.json, metrics.jsonl, checkpoints/

It shares no code with the checker: here a rule says what may happen next, there what must have happened before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.journal.setups import REST, TEXTS, Setup

Event = dict[str, Any]


@dataclass
class Row:
    """A group: which fields it has, which stages have finished it, which stages it was handed to."""

    step: int | None
    fields: set[str] = field(default_factory=set)
    out: set[str] = field(default_factory=set)  # stages it was handed to
    behind: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    began: int | None = None
    versions: tuple[int, int] | None = None
    dropped: bool = False
    unwanted: bool = False
    cleared: bool = False
    early: bool = False  # its texts were cleared before the rest

    @property
    def oldest(self) -> int | None:
        return self.versions[0] if self.versions else self.began


@dataclass
class Job:
    """A running task."""

    number: int
    stage: str
    step: int
    groups: list[int]
    attempt: int
    version: int
    replica: int | None

    @property
    def head(self) -> Event:
        return {"task": self.number, "stage": self.stage, "step": self.step, "attempt": self.attempt}


class MadeUp:
    """A run directory that is being made up."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.plan, self.random = setup, setup.plan(), random.Random(seed)
        self.stages: dict[str, Event] = {stage["name"]: stage for stage in self.plan["stages"]}
        self.events: list[Event] = []
        self.metrics: list[Event] = []
        self.manifests: dict[int, Event] = {}
        self.clock = 100.0

    def segment(self, start: int = 0, *, stop: Callable[[MadeUp], bool] = lambda run: False) -> None:
        """Run from `start` to the end, or until `stop` as if the process was killed then."""
        self._begin(start)
        self.log("started", graph="made_up", start=start, steps=self.setup.steps, executor="local", wall_s=0.0,
                 monotonic_s=self.now())  # fmt: skip
        self._hand_out("refit", start - 1, [])
        while len(self.ended) < self.setup.steps - start or self.jobs or self.copied or not self._all_cleared():
            if stop(self):
                return
            actions = [*self._admissions(), *self._tasks(), *self._claims(), *self._ends()]
            actions += [partial(self._go_on, job) for job in self.jobs]
            if not actions:
                raise AssertionError(f"nothing can happen: {self.events[-3:]}")
            self.random.choice(actions)()
        self.log("ended", steps=self.setup.steps, rows_left=0)

    def write(self, folder: Path) -> Path:
        """Write the files of the run."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(self.plan))
        for name, lines in (("events.jsonl", self.events), ("metrics.jsonl", self.metrics)):
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        for steps, manifest in self.manifests.items():
            path = folder / "checkpoints" / f"step_{steps:06d}"
            path.mkdir(parents=True, exist_ok=True)
            (path / "manifest.json").write_text(json.dumps(manifest))
        return folder

    def log(self, kind: str, **event: Any) -> None:
        """Append an event."""
        if kind == "got":
            event["field_bytes"] = [8] * len(event["fields"])
        if kind in ("got", "put", "ran", "cleared", "held", "checkpointed"):
            event |= {"start_s": self.now(), "end_s": self.now()}
        elif kind != "started":
            event["at_s"] = self.now()
        self.events.append({"type": kind, **event})

    def now(self) -> float:
        self.clock = round(self.clock + 0.001, 3)
        return self.clock

    def _begin(self, start: int) -> None:
        manifest = self.manifests.get(start, {"next_group": 0, "pending": []})
        self.start, self.version = start, start - 1
        self.quick: tuple[int, int] | None = None  # a replica of the sampler, and the version that it alone has
        self.rows: dict[int, Row] = {}
        self.jobs: list[Job] = []
        self.batches: dict[int, list[int]] = {}
        self.over: set[tuple[str, int]] = set()  # stage, step
        self.given: set[tuple[str, int]] = set()
        self.ended: list[int] = []
        self.copied: dict[int, Event] = {}  # step -> the manifest of a checkpoint that has no name yet
        self.saved: set[int] = set()
        self.opened = self.claimed = start  # batches
        self.next_group, self.pending = manifest["next_group"], list(manifest["pending"])
        self.numbers = 0
        self.metrics = [line for line in self.metrics if line["step"] <= start]

    # Admission and claim.

    def _held(self) -> int:
        return sum(not self._released(number) for number in self.rows)

    def _released(self, number: int) -> bool:
        row = self.rows[number]
        if row.dropped:
            return row.out == row.behind
        return row.step is not None and row.behind >= self._holders(row.step)

    def _holders(self, step: int) -> set[str]:
        return {name for name in self.stages if self._holds(name) and self._runs_at(name, step)}

    def _holds(self, stage: str) -> bool:
        return stage not in ("refit", "evaluate")

    def _runs_at(self, stage: str, step: int) -> bool:
        return (step + 1) % self.stages[stage]["every"] == 0 or step == self.setup.steps - 1

    def _admit(self, step: int, count: int) -> None:
        groups = []
        for _ in range(count):
            if self.pending:
                groups.append(self.pending.pop(0))
            else:
                groups.append(self.next_group)
                self.next_group += 1
            self.rows[groups[-1]] = Row(step=None if self.setup.drop else step)
        self.log("admitted", step=step, groups=groups, version=self.version)
        if not self.setup.drop and not self.setup.gate:
            self._claim(step, groups)

    def _claim(self, step: int, groups: list[int]) -> None:
        self.batches[step] = groups
        for group in groups:
            self.rows[group].step = step
        self.claimed += 1
        self.log("claimed", step=step, groups=groups)

    def _admissions(self) -> Iterable[Callable[[], None]]:
        setup, room = self.setup, self.setup.capacity - self._held()
        if setup.drop:
            waiting = sum(row.step is None and not row.dropped for row in self.rows.values())
            waiting -= sum(row.unwanted and not row.dropped for row in self.rows.values())
            asked = self.claimed * setup.batch + waiting
            count = min((setup.ahead + self.version + 1) * setup.batch, setup.steps * setup.batch) - asked
            if min(count, room) > 0:
                yield partial(self._admit, self.claimed, min(count, room))
        elif self.opened < setup.steps and room >= setup.batch and self.claimed == self.opened:
            yield self._open
        elif setup.gate and self.claimed < self.opened:
            step = self.opened - 1
            lacking = setup.batch - sum(row.step == step and not row.dropped for row in self.rows.values())
            if lacking:
                yield partial(self._admit, step, lacking)

    def _open(self) -> None:
        self.opened += 1
        self._admit(self.opened - 1, self.setup.batch)

    def _claims(self) -> Iterable[Callable[[], None]]:
        if self.setup.drop:
            ready = [n for n, row in self.rows.items() if self._is_ready(row)]
            if len(ready) >= self.setup.batch and self.claimed < self.setup.steps:
                yield self._claim_ready
        elif self.setup.gate and self.claimed < self.opened:
            groups = [n for n, row in self.rows.items() if row.step == self.opened - 1 and not row.dropped]
            if len(groups) == self.setup.batch and all("kept" in self.rows[n].fields for n in groups):
                yield partial(self._claim, self.opened - 1, groups)

    def _is_ready(self, row: Row) -> bool:
        return row.step is None and not row.dropped and not row.unwanted and row.behind >= set(self.plan["pool"])

    def _claim_ready(self) -> None:
        bound = self.claimed - self.setup.max_staleness
        for number, row in self.rows.items():
            if row.step is None and not row.dropped and row.oldest is not None and row.oldest < bound:
                row.unwanted = "rollout" in row.out - row.behind
                if not row.unwanted:
                    self._drop(number, "", "stale")
        ready = [n for n, row in self.rows.items() if self._is_ready(row)]
        if len(ready) >= self.setup.batch:
            self._claim(self.claimed, sorted(self.random.sample(ready, self.setup.batch)))

    def _drop(self, number: int, stage: str, reason: str) -> None:
        self.rows[number].dropped = True
        self.log("dropped", stage=stage, step=self.claimed, groups=[number], reason=reason, tokens=[5])

    # Tasks.

    def _tasks(self) -> Iterable[Callable[[], None]]:
        for name, stage in self.stages.items():
            if not self._holds(name):
                yield from self._weights_tasks(name)
            elif stage["per"] == "batch":
                yield from self._batch_tasks(name)
            else:
                yield from self._group_tasks(name)

    def _weights_tasks(self, name: str) -> Iterable[Callable[[], None]]:
        opening = self.start - 1 if name == "refit" or self.start == 0 else self.start
        for step in range(opening, self.opened if not self.setup.drop else self.claimed):
            reads = "train" if name == "refit" else "refit"
            due = step < self.start or self._runs_at(name, step)
            if due and (name, step) not in self.given and (reads, step) in self.over and self._fenced(name, step):
                if name == "refit" and not self.setup.in_flight and self._streams():
                    continue
                yield partial(self._hand_out, name, step, [])

    def _streams(self) -> bool:
        return any(job.stage == "rollout" for job in self.jobs)

    def _fenced(self, name: str, step: int) -> bool:
        """Return whether the fences of a stage allow it to start."""
        for fence in self.plan["fences"]:
            at = step - fence["lag"]
            if fence["after"] == name and at >= self.start - 1:
                opens = fence["before"] == "refit" or (fence["before"] == "evaluate" and self.start == 0)
                due = self._runs_at(fence["before"], at) if at >= self.start else opens
                if due and (fence["before"], at) not in self.over:
                    return False
        return True

    def _batch_tasks(self, name: str) -> Iterable[Callable[[], None]]:
        for step, batch in self.batches.items():
            size = self.stages[name]["run_groups"] or len(batch)
            for first in range(0, len(batch), size):
                groups = batch[first : first + size]
                if not self._runs_at(name, step) or not all(self._may_have(name, n) for n in groups):
                    continue
                if self._fenced(name, step) and (name != "train" or self._checkpoints_copied(step)):
                    yield partial(self._hand_out, name, step, groups)

    def _checkpoints_copied(self, step: int) -> bool:
        every = self.setup.checkpoint_every
        due = (done for done in range(self.start, step) if every and (done + 1) % every == 0)
        return all(done in self.copied or done in self.saved for done in due)

    def _may_have(self, name: str, number: int) -> bool:
        row, stage = self.rows[number], self.stages[name]
        wanted = {*stage["reads"], *stage["awaits"]}
        return not row.dropped and not row.unwanted and name not in row.out and wanted <= row.fields

    def _group_tasks(self, name: str) -> Iterable[Callable[[], None]]:
        pooled = name in self.plan["pool"]
        by_step: dict[tuple[int, int], list[int]] = {}
        for number, row in self.rows.items():
            step = self.claimed if pooled else row.step
            if step is not None and self._may_have(name, number) and self._may_sample(name, step):
                by_step.setdefault((step, row.attempts.get(name, 0)), []).append(number)
        for (step, _), groups in by_step.items():
            some = sorted(self.random.sample(groups, self.random.randint(1, len(groups))))
            yield partial(self._hand_out, name, step, some)

    def _may_sample(self, name: str, step: int) -> bool:
        if name != "rollout":
            return True
        least = self.start if self.setup.drop else max(self.start, step - self.setup.ahead)
        sending = any(job.stage == "refit" for job in self.jobs)
        version = self.quick[1] if self.quick else self.version
        return version >= least and (self.quick is not None or not sending or self.setup.in_flight)

    def _hand_out(self, name: str, step: int, groups: list[int]) -> None:
        stage = self.stages[name]
        self.numbers += 1
        together = stage["shape"] == "transfer" or stage["sharding"]
        quick = self.quick if name == "rollout" else None
        attempts = {self.rows[number].attempts.get(name, 0) for number in groups} or {0}
        job = Job(
            self.numbers, name, step, list(groups), attempts.pop(),
            quick[1] if quick else max(self.version, 0),
            None if together else quick[0] if quick
            else self.random.randint(0, 1 if stage["groups"][0] != "learner" else 0),
        )  # fmt: skip
        self.jobs.append(job)
        self.given.add((name, step))
        for number in groups:
            self.rows[number].out.add(name)
            if name == "rollout":
                self.rows[number].began = self.version
        samples = len(groups) * self.setup.group_size
        self.log("submitted", **job.head, group=stage["groups"][0], replica=job.replica, groups=groups,
                 samples=samples, version=job.version)  # fmt: skip
        if stage["shape"] == "stream":
            self._fetch(job)

    def _fetch(self, job: Job) -> None:
        stage, size = self.stages[job.stage], self.setup.group_size
        if not stage["reads"] or not job.groups:
            return
        first = stage["first_groups"]
        samples = (len(job.groups) if first is None else min(first, len(job.groups))) * size
        if stage["chooses"]:
            self.log("got", stage=job.stage, step=job.step, fields=stage["chooses"],
                     samples=len(job.groups) * size, size_bytes=8)  # fmt: skip
        for share in self._shares(samples, stage):
            fields = [name for name in stage["reads"] if not name.endswith("_weights")]
            self.log("got", stage=job.stage, step=job.step, fields=fields, samples=share, size_bytes=8)

    def _shares(self, samples: int, stage: Event) -> list[int]:
        ranks = self.setup.ranks if stage["sharding"] else 1
        return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]

    # Progress of tasks.

    def _go_on(self, job: Job) -> None:
        if job.groups and self.random.random() < self.setup.dies and job.stage != "train":
            return self._die(job)
        if job.stage == "rollout":
            return self._sample(job)
        if job.stage == "refit" and self.setup.partly and self.quick is None:
            return self._serve(job)
        if job.stage == "refit" and self.quick and (tasks := [*self._group_tasks("rollout")]):
            return tasks[0]()
        self.jobs.remove(job)
        self._fetch(job)
        if job.stage == "train":
            self._train(job)
        self._put(job, self._judged(job) if job.stage == "filter" else job.groups)
        stage = self.stages[job.stage]
        workers = [(group, 0) for group in stage["groups"]]
        if stage["sharding"]:
            workers = [(stage["groups"][0], rank) for rank in range(self.setup.ranks)]
        for group, worker in workers:
            self._ran(job, group, worker)
        if job.stage == "refit":
            self.version, self.quick = job.step + 1, None
            self.log("published", stage="refit", step=job.step, version=self.version, sha256=f"{job.step + 7:064x}")
        self._acknowledge(job, job.groups)
        if not job.groups or all(job.stage in self.rows[n].behind for n in self.batches.get(job.step, [-1]) if n >= 0):
            self.over.add((job.stage, job.step))

    def _serve(self, job: Job) -> None:
        """One replica gets the weights before the other."""
        self.quick = self.random.randint(0, 1), job.step + 1
        self.log("served", **job.head, replica=self.quick[0], version=self.quick[1])

    def _judged(self, job: Job) -> list[int]:
        dropped = [number for number in job.groups if self.random.random() < 0.3 and number % 3]
        for number in dropped:
            self._drop(number, "filter", "all samples have the same reward")
        return [number for number in job.groups if number not in dropped]

    def _sample(self, job: Job) -> None:
        """Some groups of a stream end: they are put, or were cancelled."""
        left = [number for number in job.groups if "rollout" not in self.rows[number].behind]
        quick = [n for n in left if n % 5 < 4 or self.rows[n].unwanted or self.random.random() < 0.03]
        if not quick:
            return
        done = sorted(self.random.sample(quick, self.random.randint(1, len(quick))))
        unwanted = [number for number in done if self.rows[number].unwanted]
        self._put(job, [number for number in done if number not in unwanted])
        for number in unwanted:
            self._drop(number, "", "cancelled")
        self._acknowledge(job, done)
        if done == left:
            self.jobs.remove(job)
            self._ran(job, "sampler", job.replica or 0)

    def _put(self, job: Job, groups: list[int]) -> None:
        stage = self.stages[job.stage]
        fields = [name for name in stage["writes"] if not name.endswith("_weights")]
        if not fields or not groups:
            return
        versions = []
        for number in groups:
            self.rows[number].fields |= set(fields)
            if stage["stamps"]:
                newest = max(job.version, self.version)
                self.rows[number].versions = (job.version, newest)
                versions.append([job.version, newest])
        first = 0
        for share in self._shares(len(groups) * self.setup.group_size, stage):
            size = self.setup.group_size
            touched = groups[first // size : (first + share + size - 1) // size]
            first += share
            self.log("put", stage=job.stage, step=job.step, attempt=job.attempt, fields=fields, groups=touched,
                     samples=share, size_bytes=8, versions=versions)  # fmt: skip

    def _train(self, job: Job) -> None:
        size, samples = self.setup.group_size, len(job.groups) * self.setup.group_size
        for rank in range(self.setup.ranks):
            mine = [job.groups[i // size] for i in range(rank, samples, self.setup.ranks)]
            groups = sorted(set(mine))
            spans = [self.rows[number].versions or (0, 0) for number in groups]
            entries = {"token_versions": 5 * len(mine), "prev_logprobs": 5 * len(mine)}
            self.log("trained", **job.head, worker=rank, version=job.step, groups=groups,
                     samples=[mine.count(number) for number in groups], oldest=[low for low, _ in spans],
                     newest=[high for _, high in spans], entries=entries)  # fmt: skip

    def _ran(self, job: Job, group: str, worker: int) -> None:
        self.log("ran", **job.head, group=group, worker=worker, groups=job.groups, cpu_s=0.1, metrics={})

    def _acknowledge(self, job: Job, groups: list[int]) -> None:
        for number in groups:
            self.rows[number].behind.add(job.stage)
        self.log("acknowledged", **job.head, groups=groups)

    def _die(self, job: Job) -> None:
        """The attempt is lost and its remaining groups are handed out again. Sometimes it reports once more."""
        self.jobs.remove(job)
        left = [number for number in job.groups if job.stage not in self.rows[number].behind]
        for number in [number for number in left if self.rows[number].unwanted]:
            self._drop(number, "", "cancelled")
        self.log("retried", **job.head, groups=left, reason="worker lost")
        for number in left:
            row = self.rows[number]
            row.out.discard(job.stage)
            row.attempts[job.stage] = job.attempt + 1
            if job.stage == "rollout":
                row.began = None
        if self.random.random() < 0.5:
            self.log("fenced", **job.head, groups=left)

    # End of tasks, steps and the run.

    def _ends(self) -> Iterable[Callable[[], None]]:
        free = [n for n, row in self.rows.items() if not row.cleared and self._released(n)]
        if free:
            yield partial(self._clear, free)
        texts = [
            n for n, row in self.rows.items() if not (row.cleared or row.early or n in free) and self._texts_free(n)
        ]
        if texts:
            yield partial(self._clear_texts, texts)
        if self.start == 0 and {("refit", -1), ("evaluate", -1)} <= self.over and -1 not in self.ended_all:
            yield partial(self._end, -1)
        for step in range(self.start, self.claimed):
            if self._copies(step) and ("refit", step) in self.over:
                yield partial(self._copy, step)
            elif step not in self.ended and self._is_over(step):
                yield partial(self._end, step)
        for step in self.copied:
            if set(range(self.start, step + 1)) <= set(self.ended):
                yield partial(self._name, step)

    @property
    def ended_all(self) -> list[int]:
        return [line["step"] - 1 for line in self.metrics]

    def _copies(self, step: int) -> bool:
        every = self.setup.checkpoint_every
        due = step == self.setup.steps - 1 or bool(every and (step + 1) % every == 0)
        return due and step not in self.copied and step not in self.saved

    def _is_over(self, step: int) -> bool:
        if step not in self.batches or self._copies(step):
            return False
        groups = all(self.rows[n].behind >= self._holders(step) for n in self.batches[step])
        single = all((name, step) in self.over for name in ("refit", "evaluate") if self._runs_at(name, step))
        decided = all(row.out == row.behind for row in self.rows.values() if row.step == step)
        return groups and single and decided

    def _end(self, step: int) -> None:
        if step >= 0:
            self.ended.append(step)
        self.metrics.append({"step": step + 1, "version": self.version, "loss": 0.5})
        self.log("step_ended", step=step, metrics={"loss": 0.5})

    def _copy(self, step: int) -> None:
        following, pending = self.next_group, []
        if self.setup.drop:
            unclaimed = [n for n, row in self.rows.items() if row.step is None and not (row.dropped or row.unwanted)]
            later = [number for at, batch in self.batches.items() if at > step for number in batch]
            pending = sorted([*unclaimed, *later, *self.pending])
        else:
            following = max(n for n, row in self.rows.items() if row.step is not None and row.step <= step) + 1
        self.copied[step] = {"steps": step + 1, "version": step + 1, "next_group": following, "pending": pending}
        self.log("held", step=step)

    def _name(self, step: int) -> None:
        self.manifests[step + 1] = self.copied.pop(step)
        self.saved.add(step)
        self.log("checkpointed", step=step, folder=f"step_{step + 1:06d}", size_bytes=8)

    def _texts_free(self, number: int) -> bool:
        row = self.rows[number]
        return not row.dropped and row.step is not None and row.behind >= {"prompts", "rollout", "reward", "prev"}

    def _clear_texts(self, groups: list[int]) -> None:
        for number in groups:
            self.rows[number].early = True
        self.log("cleared", step=0, groups=groups, partitions=[TEXTS], last=False)

    def _clear(self, groups: list[int]) -> None:
        for number in groups:
            self.rows[number].cleared = True
        for early in (True, False):
            stored = [number for number in groups if self.rows[number].fields and self.rows[number].early is early]
            if stored:
                left = [REST] if early else [TEXTS, REST]
                self.log("cleared", step=0, groups=stored, partitions=left, last=True)

    def _all_cleared(self) -> bool:
        return all(row.cleared for row in self.rows.values())
