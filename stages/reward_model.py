"""RewardModel: scores samples with a Hugging Face sequence classification model that has one label.

    judge = WorkerGroup("judge", backend="torch", gpus=1)

    RewardModel(Model("Skywork/Skywork-Reward-V2-Qwen3-0.6B"), on=judge, chat=True, microbatch=16)
    Reward(math_verify, model_reward, weights=(1.0, 0.1))

The model's own tokenizer encodes the texts, so the policy may have another one. The stage only writes the field
`model_reward`; `ops.rewards.model_reward`, or any reward function that reads this field, makes it part of the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pipeline import Graph, Model, Output, Stage, StageContext, Task, WorkerGroup
from pipeline.declare.columns import Columns
from pipeline.declare.parameters import at_least, broken, truth
from pipeline.errors import Problem
from stages.backends import backend_problems, engine, model_problems
from stages.vocabulary import MODEL_REWARD, PROMPT, RESPONSE

_BACKEND = "torch"


_RULES = (
    at_least("microbatch", 0, why="microbatch is the number of samples per pass, or 0 for all"),
    truth("chat", why="chat is True, for the model's own chat template, or False", fix=True),
)


@dataclass(frozen=True)
class RewardModel(Stage):
    """Scores the prompt and response of each sample.

    model       a folder or hub name of a model with a one-label sequence classification head; not trained here
    on          a worker group with backend "torch"; several workers divide a batch by groups
    microbatch  samples per pass; 0 means all of the task. The score does not depend on it
    chat        True formats prompt and response as user and assistant messages with the tokenizer's chat template;
                False concatenates them
    name        the stage's name in the graph

    Metric: `mean`.
    """

    model: Model
    _: KW_ONLY
    on: WorkerGroup | None = None
    microbatch: int = 0
    chat: bool = False
    name: str = "reward_model"

    reads = (PROMPT, RESPONSE)
    writes = (MODEL_REWARD,)
    per = "group"

    @property
    def uses(self) -> tuple[Model, ...]:
        """The reward model, frozen."""
        return (self.model.frozen() if isinstance(self.model, Model) else self.model,)

    def check(self, graph: Graph) -> Iterable[Problem]:
        """Check the backend, the worker group, the model and all ranges."""
        where = str(self.location)
        found = list(backend_problems(self.on, self, "reward"))
        yield from found
        yield from model_problems(self.model)
        group = self.on
        if group is not None and group.backend != _BACKEND and not found:
            yield Problem(
                where=str(group.location),
                what=f"worker group {group.name!r} has the backend {group.backend!r} and a RewardModel",
                why="reward models run on torch",
                fix=f"backend={_BACKEND!r}",
            )
        if group is not None and (group.model_parallel > 1 or group.fully_sharded):
            yield Problem(
                where=str(group.location),
                what=f"worker group {group.name!r} shards its models across workers and has a RewardModel",
                why="each worker of a RewardModel holds the whole model and scores its own groups",
                fix="use a separate worker group with workers=, without *_parallel and fully_sharded",
            )
        if self.model.warm_start is not None:
            yield Problem(
                where=str(self.model.location),
                what=f"the reward model {self.model.source!r} has a warm start",
                why="a warm start trains a language model",
                fix="leave out warm_start=",
            )
        if self.model.frozen() in [stage.updates.frozen() for stage in graph.stages if stage.updates]:
            yield Problem(
                where=where,
                what=f"stage {self.name!r} scores with {self.model.source!r}, which is trained as the policy",
                why="a reward model is a sequence classification model, not a language model",
                fix="RewardModel(Model('the reward model'), ...)",
            )
        yield from broken(_RULES, self, where=where, says=f"stage {self.name!r} has {{}}")

    def setup(self, context: StageContext) -> Callable[[Columns, Task], Output]:
        """Load the model, so that an invalid one is reported before the first step."""
        backend = engine(context)
        backend.reward(self.model, [], [], chat=self.chat, microbatch=self.microbatch)

        def run(columns: Columns, task: Task) -> Output:
            prompts: Any = columns[PROMPT.name]
            responses: Any = columns[RESPONSE.name]
            scores = backend.reward(self.model, prompts, responses, chat=self.chat, microbatch=self.microbatch)
            return Output({MODEL_REWARD.name: scores}, {"mean": scores.mean().item()})

        return run
