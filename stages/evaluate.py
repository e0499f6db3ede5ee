"""Evaluation of the served weights on prompts that training does not see, greedily. Writes no field, only metrics.

Evaluate(policy, Generated("reverse"), on=sampler, every=10, prompts=1000, max_tokens=6)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import fmean

from ops.rewards import exact_match
from pipeline import Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.columns import Columns
from pipeline.errors import Problem
from stages.backends import Sampling, backend_problems, engine, model_problems
from stages.prompts import file_problems, read_jsonl
from stages.tasks import Generated
from stages.vocabulary import SERVED_WEIGHTS


@dataclass(frozen=True)
class Evaluate(Stage):
    """Greedy responses to held-out prompts, scored.

    source        a `Generated` task, whose held-out prompts are used, or the path of a JSONL file of held-out rows
    reward        a function of (response, answer), reported beside exact match
    every         steps between evaluations
    prompts       how many, from the first on; fewer where the source has fewer
    max_tokens    of a response
    decode_batch  prompts that are decoded together; 0 is all
    prompt, answer  columns of the file

    Metrics: `eval/exact_match`, `eval/<reward>`, `eval/count`, `eval/length_mean`, `eval/truncated`.
    """

    model: Model
    source: Generated | str | Path
    _: KW_ONLY
    on: WorkerGroup | None = None
    reward: Callable[[str, str], float] = exact_match
    every: int = 10
    prompts: int = 1000
    max_tokens: int = 512
    decode_batch: int = 0
    prompt: str = "prompt"
    answer: str = "answer"

    name = "evaluate"
    reads = (SERVED_WEIGHTS,)
    per = "batch"

    @property
    def uses(self) -> tuple[Model, ...]:
        """The served policy."""
        return (self.model,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Backend, model, ranges, and that there are held-out prompts."""
        where = str(self.location)
        yield from backend_problems(self.on)
        yield from model_problems(self.model)
        for name, value, least in (
            ("every", self.every, 1),
            ("prompts", self.prompts, 1),
            ("max_tokens", self.max_tokens, 1),
            ("decode_batch", self.decode_batch, 0),
        ):
            if value < least:
                yield Problem(
                    where=where,
                    what=f"stage {self.name!r} has {name}={value}",
                    why=f"{name} is {least} or more",
                    fix=f"{name}={Evaluate.__dataclass_fields__[name].default}",
                )
        if isinstance(self.source, Generated):
            if self.source.held_out == 0:
                yield Problem(
                    where=where,
                    what=f"the task {self.source.task!r} holds no prompt out",
                    why="evaluation on prompts that were trained on shows memory, not skill",
                    fix="Generated(..., held_out=1000)",
                )
        else:
            yield from file_problems(self.source, (self.prompt, self.answer), where)

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Opens the backend and its served copy of the model; reads the prompts."""
        backend = engine(context)
        pairs = self._pairs()
        sampling = Sampling(self.max_tokens, greedy=True)

        def run(columns: Columns, task: Task) -> Output:
            texts: list[str] = []
            lengths: list[int] = []
            truncated = 0
            step = self.decode_batch or len(pairs)
            for start in range(0, len(pairs), step):
                prompt_ids = backend.encode(self.model, [prompt for prompt, _ in pairs[start : start + step]])
                made = backend.generate(self.model, prompt_ids, sampling, None)
                texts += backend.decode(self.model, made.response_ids)
                lengths += made.response_ids.lengths
                truncated += int(made.truncated.sum())
            scored = {
                f"eval/{function.__name__}": fmean(function(text, answer) for text, (_, answer) in zip(texts, pairs))
                for function in dict.fromkeys((exact_match, self.reward))
            }
            counts = {
                "eval/count": float(len(pairs)),
                "eval/length_mean": fmean(lengths),
                "eval/truncated": truncated / len(pairs),
            }
            return Output(metrics=scored | counts)

        return run

    def _pairs(self) -> list[tuple[str, str]]:
        if isinstance(self.source, Generated):
            return self.source.held_out_pairs(min(self.prompts, self.source.held_out))
        rows = read_jsonl(self.source, (self.prompt, self.answer))
        return [(prompt, answer) for prompt, answer in rows[: self.prompts]]
