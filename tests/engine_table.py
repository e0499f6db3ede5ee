"""The tables of docs/models.md: which family of models runs in which backend, divided how, and with what.

    python -m tests.engine_table            # says whether the tables are those of the page
    python -m tests.engine_table --write    # writes them into the page

A cell is what `--check` says of a small config of the family, and the tests and kept results that show that it runs:
`SHOWN`, and for Megatron-core the cases of tests/engines/megatron_cases.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from pipeline import Model, WorkerGroup
from pipeline.errors import Problem
from stages import ClippedLoss, LoRA, Rollout, Train
from stages import backends as known_backends
from stages.backends import backend_problems, model_problems
from stages.backends.vllm import limits

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- what follows is written by python -m tests.engine_table --write -->", "<!-- end of the tables -->"
Device = Literal["CPU", "GPU"]
LEGEND = (
    "A cell says where a family has been run. **CPU**: a test on the CPU shows it, in float32. **GPU**: a kept result",
    "has it, or a test in tests/gpu that has passed on an H200, in bfloat16. **not run**: `--check` allows it, and",
    "neither is there. **no**: `--check` refuses it, for the reasons below. **-**: the family has no such part.",
    "`python -m tests.engine_table --write` writes the tables, from what `--check` says of a small config of each",
    "family and from the lists of tests and results in `tests/engine_table.py`; a test fails if the page differs.",
)
PLAIN = {
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
SIGMOID = {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
HYBRID = PLAIN | {
    "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "ssm_state_size": 64, "mamba_num_heads": 8,
    "mamba_head_dim": 64, "n_groups": 2, "conv_kernel": 4, "chunk_size": 64, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
MOE = HYBRID | SIGMOID | {
    "layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_shared_expert_intermediate_size": 256,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A row: what models of the family have, and a small config of one."""

    name: str
    kind: str
    config: Mapping[str, Any]
    experts: bool = False
    images: bool = False

    @property
    def model_type(self) -> str:
        """The key of its config."""
        return self.kind.partition(",")[0]


FAMILIES = (
    Family("Llama", "llama", PLAIN),
    Family("Qwen2", "qwen2", PLAIN),
    Family("Qwen3", "qwen3", PLAIN),
    Family(
        "Qwen3-MoE", "qwen3_moe",
        PLAIN | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
        experts=True,
    ),
    Family("GLM-4.5 (`glm4_moe`)", "glm4_moe", PLAIN | SIGMOID, experts=True),
    Family(
        "DeepSeek-V3 (`deepseek_v3`)", "deepseek_v3",
        PLAIN | SIGMOID | {"num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
                           "qk_rope_head_dim": 32, "head_dim": 32, "v_head_dim": 64},
        experts=True,
    ),
    Family("NemotronH (`nemotron_h`)", "nemotron_h", HYBRID),
    Family("NemotronH with experts", "nemotron_h, experts", MOE, experts=True),
    Family("NemotronH with latent experts", "nemotron_h, latent", MOE | {"moe_latent_size": 128}, experts=True),
    Family(
        "gpt-oss (`gpt_oss`)", "gpt_oss", PLAIN | {"num_local_experts": 8, "num_experts_per_tok": 2}, experts=True
    ),
    Family("Qwen3-VL (`qwen3_vl`)", "qwen3_vl", {"text_config": PLAIN, "vision_config": {"depth": 1}}, images=True),
    Family("Qwen2.5-VL (`qwen2_5_vl`)", "qwen2_5_vl", {"text_config": PLAIN, "vision_config": {"depth": 1}},
           images=True),
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column: a worker group, and what the model has. `needs` is the part that a family may lack."""

    title: str
    backend: str
    workers: int = 1
    group: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    needs: Literal["", "experts", "images"] = ""
    samples: bool = False

    @property
    def name(self) -> str:
        """Its name in `SHOWN`."""
        return f"{self.backend} {self.title}"


def _divided(title: str, needs: Literal["", "experts"] = "", **sizes: int) -> Column:
    return Column(title, "megatron", 2, sizes, needs=needs)


TRAINERS = (
    Column("1 rank", "torch"),
    Column("DP", "torch", 2),
    Column("FSDP2", "torch", 2, {"fully_sharded": True}),
    Column("1 rank", "megatron"),
    _divided("TP", tensor_parallel=2),
    _divided("PP", pipeline_parallel=2),
    _divided("DP"),
    _divided("CP", context_parallel=2),
    _divided("EP", "experts", expert_parallel=2),
    _divided("ETP", "experts", tensor_parallel=2, expert_tensor_parallel=2),
)
SAMPLERS = (
    Column("sampler", "torch", samples=True),
    Column("1 rank", "vllm", samples=True),
    Column("TP", "vllm", 2, {"tensor_parallel": 2}, samples=True),
    Column("FP8 weights", "vllm", group={"weights": "fp8"}, samples=True),
    Column("FP8 cache", "vllm", group={"cache": "fp8"}, samples=True),
)
FEATURES = tuple(
    Column(title, backend, model=model, needs=needs, samples=backend == "vllm")
    for title, model, needs in (
        ("LoRA", {"lora": LoRA()}, ""),
        ("replay", {"router_replay": True}, "experts"),
        ("images", {}, "images"),
    )
    for backend in ("torch", "megatron", "vllm")
)
OWN = "megatron CP"  # CPU tests give it an attention of their own, and `--check` refuses it without GPUs

_MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3")
_HYBRIDS = ("nemotron_h", "nemotron_h, experts", "nemotron_h, latent")
_SEEING = ("qwen3_vl", "qwen2_5_vl")
_UNITS = "tests/unit/test_torch_families.py::"
_ONE_RANK = "tests/engines/test_megatron.py::test_one_rank_trains_"
_REFITS = "tests/engines/test_vllm_refit.py::"
_IMAGES = "tests/engines/test_vllm_images.py::test_samples_have_the_logprobs_of_the_trainer_before_and_after_refits"
FEW_LAYERS = {  # whole steps of models of few layers, trained by Megatron-core and sampled by vLLM
    "benchmarks/results/gpu.step.glm-4.5-air-2-layers.json::glm-4.5-air": ("glm4_moe",),
    "benchmarks/results/gpu.step.nemotron-3-nano-4-layers.json::nemotron-3-nano": ("nemotron_h, experts",),
    "benchmarks/results/gpu.step.deepseek-v3-2-layers.json::deepseek-v3": ("deepseek_v3",),
    "benchmarks/results/gpu.step.nemotron-3-super-3-layers.replay.json::nemotron-3-super": ("nemotron_h, latent",),
}
REPLAYED = {
    "benchmarks/results/gpu.step.glm-4.5-air-2-layers.replay.json::--replay": ("glm4_moe",),
    "benchmarks/results/gpu.step.nemotron-3-nano-4-layers.replay.json::--replay": ("nemotron_h, experts",),
    "benchmarks/results/gpu.step.deepseek-v3-2-layers.replay.json::--replay": ("deepseek_v3",),
    "benchmarks/results/gpu.step.nemotron-3-super-3-layers.replay.json::--replay": ("nemotron_h, latent",),
}
ADAPTED = {"benchmarks/results/gpu.step.lora.8B.json::--lora 16": ("qwen3",)}
SHOWN: Mapping[Device, Mapping[str, Mapping[str, tuple[str, ...]]]] = {  # by column: tests or results, and families
    "CPU": {
        "torch 1 rank": {
            f"{_ONE_RANK}as_the_torch_backend_does": ("qwen3", "qwen3_moe"),
            f"{_UNITS}test_an_update_changes_all_weights_and_no_constant": (
                "llama",
                "qwen2",
                "glm4_moe",
                "deepseek_v3",
                "gpt_oss",
                *_HYBRIDS,
            ),
            "tests/unit/test_images.py::test_an_update_trains_what_sees_and_without_images_gives_it": _SEEING,
        },
        "torch sampler": {
            "tests/unit/test_torch_generate.py::test_rollout_logprobs_are_those_of_scoring": ("qwen3",),
            "tests/unit/test_routes.py::test_the_sampler_returns_the_experts_of_each_token": ("qwen3_moe",),
            f"{_UNITS}test_samples_have_the_logprobs_of_scores": (
                "llama",
                "qwen2",
                "glm4_moe",
                "deepseek_v3",
                "gpt_oss",
                *_HYBRIDS,
            ),
            "tests/unit/test_images.py::test_samples_have_the_logprobs_of_the_trainer": _SEEING,
        },
        "torch DP": {"tests/integration/test_ranks.py::WAYS": ("qwen3",)},
        "torch FSDP2": {"tests/integration/test_ranks.py::WAYS": ("qwen3",)},
        "torch LoRA": {
            "tests/unit/test_lora.py::test_one_update_with_the_identity_is_one_of_the_layers_themselves": ("qwen3",),
            f"{_ONE_RANK}an_adapter_as_the_torch_backend_does": (
                "qwen2",
                *_MIXTURES,
                "nemotron_h",
                "nemotron_h, latent",
            ),
            "tests/unit/test_torch_families.py::test_an_adapter_has_all_linear_layers": ("gpt_oss",),
        },
        "torch replay": {"tests/unit/test_routes.py::test_replaying_the_own_choice_changes_no_bit": _MIXTURES},
        "torch images": {
            "tests/unit/test_images.py::test_an_update_trains_what_sees_and_without_images_gives_it": _SEEING
        },
        "vllm 1 rank": {
            "tests/engines/test_vllm.py::tiny": ("qwen3",),
            f"{_REFITS}test_a_llama_is_written_by_the_table": ("llama",),
            "tests/engines/test_vllm_lora.py::test_layers_of_nemotron_h_have_adapters": ("nemotron_h",),
            f"{_REFITS}test_a_mixture_routed_by_sigmoids": ("glm4_moe",),
            f"{_REFITS}test_fused_experts_and_attention_sinks_are_served": ("gpt_oss",),
            _IMAGES: _SEEING,
        },
        "vllm TP": {
            f"{_REFITS}test_a_model_with_a_table_is_written_by_it": ("qwen2",),
            f"{_REFITS}golden": ("qwen3_moe",),
            f"{_REFITS}test_a_mixture_routed_by_sigmoids": ("deepseek_v3",),
            f"{_REFITS}test_the_states_of_mamba_layers_are_served": ("nemotron_h",),
            "tests/engines/test_vllm_lora.py::test_two_tensor_parallel_ranks_divide_an_adapter": ("qwen3",),
        },
        "vllm LoRA": {
            "tests/engines/test_vllm_lora.py::test_samples_and_logprobs_are_those_of_the_trainer": ("qwen3",),
            "tests/engines/test_vllm_lora.py::test_layers_of_nemotron_h_have_adapters": ("nemotron_h",),
        },
        "vllm FP8 cache": {"tests/engines/test_cache_scales.py::test_an_engine_scales_its_cache": ("qwen3",)},
        "vllm images": {_IMAGES: _SEEING},
    },
    "GPU": {  # kept results of whole steps, updates or samples, and tests that have passed on an H200; in bfloat16
        "torch 1 rank": {"benchmarks/results/gpu.torch_backend.json::bfloat16": ("qwen3",)},
        "torch sampler": {"benchmarks/results/gpu.torch_backend.json::rollout/length_mean": ("qwen3",)},
        "torch DP": {"benchmarks/results/gpu.torch_backend.ray.json::2 workers a group": ("qwen3",)},
        "torch FSDP2": {"benchmarks/results/gpu.torch_backend.ray_fully_sharded.json::fully sharded": ("qwen3",)},
        "megatron 1 rank": {
            "benchmarks/results/gpu.update.json::0.6B": ("qwen3",),
            "benchmarks/results/gpu.mixture.json::30B-A3B": ("qwen3_moe",),
            **FEW_LAYERS,
        },
        "megatron TP": {"benchmarks/results/gpu.refit_matrix.json::TP2 -> TP2": ("qwen3",)},
        "megatron PP": {"benchmarks/results/gpu.refit_matrix.json::PP2 -> TP2": ("qwen3",)},
        "megatron EP": {"benchmarks/results/gpu.refit_matrix.json::EP2 -> TP2": ("qwen3_moe",)},
        "vllm 1 rank": {
            "benchmarks/results/gpu.step.json::1 GPUs sample": ("qwen3",),
            **FEW_LAYERS,
        },
        "vllm TP": {
            "benchmarks/results/gpu.refit_matrix.json::TP2 -> TP2": ("qwen3",),
            "benchmarks/results/gpu.refit_matrix.json::EP2 -> TP2": ("qwen3_moe",),
        },
        "vllm FP8 weights": {
            "benchmarks/results/gpu.step.fp8.json::--weights fp8": ("qwen3",),
            "tests/gpu/test_quantized.py::test_a_refit_brings_what_a_folder_has": ("qwen3",),
        },
        "vllm FP8 cache": {
            "benchmarks/results/gpu.recipe.fp8.json::--cache fp8": ("qwen3",),
            "tests/gpu/test_cache.py::test_keys_and_values_far_above_448_are_scaled": ("qwen3",),
        },
        "megatron LoRA": ADAPTED,
        "vllm LoRA": ADAPTED,
        "megatron replay": REPLAYED,
        "vllm replay": {"tests/gpu/test_routes.py::test_the_experts_that_vllm_chose": ("qwen3_moe",), **REPLAYED},
    },
}


def of_cases() -> Iterator[tuple[str, str]]:
    """Columns of Megatron-core, and the families that its cases on a CPU show. Needs Megatron-core."""
    from tests.engines import megatron_cases

    yield from (("megatron 1 rank", kind) for kind in megatron_cases.FAMILIES)
    for case in (megatron_cases.CASES | megatron_cases.OF_FOUR).values():
        kind = case.family if case.family.startswith("nemotron_h") else case.family.partition(",")[0]
        tensor = case.layout.tensor
        for title, has in (
            ("LoRA", case.lora is not None),
            ("replay", case.replay),
            ("TP", tensor > 1),
            ("PP", case.layout.pipeline > 1),
            ("DP", case.layout.data > 1),
            ("CP", case.layout.context > 1),
            ("EP", case.expert > 1),
            ("ETP", "experts" in _parts(kind) and (case.expert_tensor or tensor) > 1),
        ):
            if has and (title == "LoRA" or case.lora is None):
                yield f"megatron {title}", kind


def _parts(kind: str) -> set[str]:
    return {part for one in FAMILIES if one.kind == kind for part in ("experts", "images") if getattr(one, part)}


@cache
def shown() -> set[tuple[Device, str, str]]:
    """What the tests and results show: device, column and family."""
    found: set[tuple[Device, str, str]] = {("CPU", column, kind) for column, kind in of_cases()}
    for device, columns in SHOWN.items():
        found |= {(device, name, kind) for name, by in columns.items() for kinds in by.values() for kind in kinds}
    return found


def refusals(family: Family, column: Column, device: Device) -> list[Problem]:
    """What `--check` says of the family's model on such a group, if all packages are there."""
    config = {"model_type": family.model_type, **family.config}
    if device == "CPU" and column.backend == "vllm" and family.config.get("n_groups"):
        config["n_groups"] = 1  # of Mamba heads: it computes no more per rank there
    model = Model("tiny", config=config, alphabet="0123456789", images=family.images, **column.model)
    gpus = column.workers if device == "GPU" else 0
    group = WorkerGroup("group", backend=column.backend, workers=column.workers, gpus=gpus, **column.group)
    stage = (
        Rollout(model, on=group, samples_per_prompt=2)
        if column.samples
        else Train(model, on=group, loss=ClippedLoss(), lr=1e-6)
    )
    with (
        patch.object(known_backends, "is_installed", lambda package: True),
        patch.object(limits, "_installed", lambda: "0.32.0"),
    ):
        work = "sample" if column.samples else "train"
        return [*model_problems(model), *backend_problems(group, stage, work)]  # type: ignore[arg-type]


@dataclass
class Reasons:
    """Why something is refused: families and backends, by reason."""

    by: dict[str, tuple[dict[str, None], dict[str, None]]] = field(default_factory=dict)

    def add(self, family: Family, column: Column, problems: list[Problem]) -> None:
        """Add those of one cell."""
        for problem in problems:
            families, backends = self.by.setdefault(problem.why, ({}, {}))
            families[family.name.partition(" (")[0]] = backends[f"`{column.backend}`"] = None

    def lines(self) -> Iterator[str]:
        """One line for each reason."""
        for why, (families, backends) in self.by.items():
            yield f"- {', '.join(backends)}: {why} ({', '.join(families)})."


def cell(family: Family, column: Column, everywhere: Reasons, on_a_cpu: Reasons) -> str:
    """What the table says. Raises ValueError for what is shown and refused."""
    if column.needs and column.needs not in _parts(family.kind):
        return "-"
    found: dict[Device, list[Problem]] = {
        "CPU": refusals(family, column, "CPU"),
        "GPU": refusals(family, column, "GPU"),
    }
    devices = [device for device in found if (device, column.name, family.kind) in shown()]
    for device in devices:
        if found[device] and (column.name != OWN or found["GPU"]):
            raise ValueError(f"{family.name} in {column.name} is shown on a {device}, and refused: {found[device][0]}")
    if found["GPU"]:
        everywhere.add(family, column, found["GPU"])
        return "no"
    if column.name != OWN:
        on_a_cpu.add(family, column, found["CPU"])
    return ", ".join(devices) or "not run"


def lines() -> Iterator[str]:
    """The tables, and why what is refused is."""
    everywhere, on_a_cpu = Reasons(), Reasons()
    yield from LEGEND
    yield ""
    for title, columns in (("training", TRAINERS), ("sampling", SAMPLERS), ("with", FEATURES)):
        heads = [f"`{column.backend}` {column.title}" for column in columns]
        yield f"| {title} | {' | '.join(heads)} |"
        yield "|---" * (len(columns) + 1) + "|"
        for family in FAMILIES:
            cells = [cell(family, column, everywhere, on_a_cpu) for column in columns]
            yield f"| {family.name} | {' | '.join(cells)} |"
        yield ""
    yield "Why `--check` says no:"
    yield ""
    yield from everywhere.lines()
    yield ""
    yield "What it refuses without GPUs only:"
    yield ""
    yield from on_a_cpu.lines()


def page(text: str) -> str:
    """Return the text of the page with today's tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", *lines(), "", END + after])


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine_table")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/models.md")
    options = parser.parse_args()
    kept = PAGE.read_text()
    made = page(kept)
    if options.write:
        PAGE.write_text(made)
    print("the tables are those of the page" if made == kept else "the tables differ from those of the page")
    return int(made != kept and not options.write)


if __name__ == "__main__":
    sys.exit(main())
