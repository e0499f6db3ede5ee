"""Settings of vLLM for families of models that it would otherwise compute differently. Loads no vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Settings of an engine. config: keys that vLLM reads in config.json and that transformers does not write; on_cpu:
    arguments of the CPU build."""

    config: Mapping[str, Any] = field(default_factory=dict)
    on_cpu: Mapping[str, Any] = field(default_factory=dict)


NEEDS: Mapping[str, Needs] = {
    "deepseek_v3": Needs(
        config={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # otherwise softmax, without the experts' bias
        # The CPU build's own rotary kernel does not turn neighboring dimensions.
        on_cpu={"compilation_config": {"custom_ops": ["none"]}},
    ),
}


def settings(folder: Path, *, gpus: bool) -> dict[str, Any]:
    """Return arguments for an engine of the model in a folder."""
    needs = NEEDS.get(json.loads((folder / "config.json").read_text()).get("model_type"), Needs())
    found = {} if gpus else dict(needs.on_cpu)
    return found | ({"hf_overrides": dict(needs.config)} if needs.config else {})
