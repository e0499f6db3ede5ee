"""Plans of made-up runs in the format of plan.json: written by hand, so that the planner cannot change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TEXTS, REST = "made_up.prev+reward", "made_up.train+samples"  # the partitions of the plan


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Parameters of a made-up run. `dies` is the chance that a task is lost instead of proceeding."""

    steps: int = 4
    batch: int = 4
    group_size: int = 2
    max_staleness: int = 0
    pipeline_depth: int | None = None
    drop: bool = False
    in_flight: bool = False
    partly: bool = False  # one replica of the sampler gets weights before the other
    gate: bool = False
    ranks: int = 1
    run_groups: int | None = None
    checkpoint_every: int = 2
    dies: float = 0.0

    @property
    def ahead(self) -> int:
        return self.max_staleness if self.pipeline_depth is None else min(self.pipeline_depth, self.max_staleness)

    @property
    def capacity(self) -> int:
        return (self.max_staleness + 2) * self.batch

    def plan(self) -> dict[str, Any]:
        """Return the plan of a GRPO step, from prompts to refit, with an evaluation and kept samples."""
        sharding = {"mode": "plain"} if self.ranks > 1 else None
        kept = ["kept"] if self.gate else []
        stages = [
            _stage("prompts", "host", writes=["prompt"]),
            _stage(
                "rollout", "sampler", shape="stream", per="group", reads=["prompt"], reads_back=["served_weights"],
                writes=["response", "token_versions"], stamps="token_versions",
            ),
            _stage("reward", "host", reads=["response"], writes=["reward"]),
            _stage("advantage", "host", per="group", reads=["reward"], writes=["advantage"], awaits=kept),
            _stage(
                "prev", "learner", per="batch", reads=["response"], writes=["prev_logprobs"], awaits=kept,
                sharding=sharding, run_groups=self.run_groups,
            ),
            _stage(
                "train", "learner", per="batch", reads=["advantage", "prev_logprobs", "token_versions"], awaits=kept,
                writes=["trained_weights"], updates="policy", sharding=sharding,
            ),
            _stage(
                "refit", "learner", "sampler", shape="transfer", per="batch", reads=["trained_weights"],
                writes=["served_weights"],
            ),
            _stage("evaluate", "sampler", per="batch", reads=["served_weights"], every=2),
            _stage("samples", "host", per="batch", reads=["reward"], awaits=kept, first_groups=2, chooses=["reward"]),
        ]  # fmt: skip
        if self.gate:
            stages.insert(3, _stage("filter", "host", per="group", reads=["reward"], writes=["kept"]))
        pool = ["prompts", "rollout", "reward", *(["filter"] if self.gate else []), "advantage"]
        return {
            "name": "made_up",
            "batch": self.batch,
            "group_size": self.group_size,
            "steps": self.steps,
            "max_staleness": self.max_staleness,
            "ahead": self.ahead,
            "on_stale": "drop" if self.drop else "wait",
            "refit": "in_flight" if self.in_flight else "drain",
            "capacity": self.capacity,
            "checkpoint_every": self.checkpoint_every,
            "stages": stages,
            "fences": [
                {"before": "train", "after": "prev", "lag": 1},
                {"before": "prev", "after": "train", "lag": 0},
                {"before": "refit", "after": "train", "lag": 1},
                {"before": "evaluate", "after": "refit", "lag": 1},
            ],
            "groups": [
                {"name": "host", "workers": 2, "model_parallel": 1},
                {"name": "sampler", "workers": 2, "model_parallel": 1},
                {"name": "learner", "workers": self.ranks, "model_parallel": 1},
            ],
            "partitions": [
                {
                    "name": TEXTS,
                    "fields": ["prompt", "response"],
                    "holders": ["prompts", "rollout", "reward", "prev"],
                },
                {
                    "name": REST,
                    "fields": ["token_versions", "reward", "advantage", "prev_logprobs", *kept],
                    "holders": [
                        stage["name"] for stage in stages if stage["name"] not in ("prompts", "refit", "evaluate")
                    ],
                },
            ],
            "weights_fields": ["trained_weights", "served_weights"],
            "gate": {"stage": "filter", "field": "kept", "max_groups": 100} if self.gate else None,
            "pool": pool if self.drop else [],
        }


def _stage(name: str, *groups: str, **given: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "shape": "map", "per": "sample", "reads": [], "writes": [], "reads_back": [], "awaits": [], "updates": None,
        "every": 1, "first_groups": None, "chooses": [], "sharding": None, "run_groups": None, "stamps": None,
    }  # fmt: skip
    return {"name": name, "groups": list(groups), **defaults, **given}
