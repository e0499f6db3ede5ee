"""Adapters that vLLM would not compute as the trainer does, resumes with another adapter or backend, and merges with
weights whose numbers are not known."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphs.quickstart import TINY_QWEN3
from tests.errors.harness import DEF, LINES, TOP, Case, command, graph_text, live_text
from tests.errors.resumes import ResumeCase, nothing

IMPORT = "from stages import LoRA\n\n\n"
QUIET = "from transformers.utils.logging import disable_progress_bar\n\ndisable_progress_bar()\n"
ON_A_GPU = 'WorkerGroup("sampler", backend="vllm", gpus=1)'
LEARNER = 'WorkerGroup("learner", backend="torch", gpus=1)'
HYBRID = "'model_type': 'nemotron_h', 'layers_block_type': ['mamba', 'moe', 'attention'], 'n_groups': 1"
ON_CPUS = {name: f'WorkerGroup("{name}", backend="torch")' for name in ("sampler", "learner")}
LATENT = "'model_type': 'deepseek_v3', 'q_lora_rank': None"
MIXTURE = "'model_type': 'qwen3_moe', 'num_experts': 4, 'moe_intermediate_size': 64"


def adapted(name: str, config: str, lora: str = "LoRA()", **lines: str) -> Case:
    """Return a case of a graph whose model, of this config, has an adapter."""
    policy = f"Model('tiny', config={{{config}}}, alphabet=task.alphabet, lora={lora})"
    return Case(name, {"policy": policy, "learner": LEARNER} | lines, at=("policy",), top=IMPORT)


def _trained(lora: str) -> str:
    """Return a graph file that trains a model with this adapter."""
    policy = f"Model('tiny', config={TINY_QWEN3}, alphabet=task.alphabet, lora={lora})"
    stages = "(rollout, reward, prev, advantage, train, refit)"
    return graph_text(TOP + QUIET + IMPORT, DEF, LINES | {"policy": policy, "stages": stages})


@dataclass(frozen=True)
class AfterTraining(ResumeCase):
    """A case on a finished run of one step that trained an adapter."""

    def damage(self, finished: Path, folder: Path) -> None:
        now = (folder / "graph.py").read_text()
        (folder / "graph.py").write_text(_trained("LoRA(rank=4, targets=('q_proj',))"))
        code, _, stderr = command(folder, "graph.py", "--executor", "local", "--steps", "1", "--run-dir", "run")
        assert code == 0, stderr
        (folder / "graph.py").write_text(now)
        self.change(folder)


def another(name: str, lora: str, change: Callable[[Path], None] = nothing) -> ResumeCase:
    """Return a case of a resume with this adapter."""
    args = ("--executor", "local", "--steps", "2", "--run-dir", "run", "--resume")
    return AfterTraining(name, text=_trained(lora), args=args, code=6, change=change)


def _saved_by_megatron(folder: Path) -> None:
    saved = folder / "run/checkpoints/step_000001"
    manifest = json.loads((saved / "manifest.json").read_bytes())
    data = json.dumps({"backend": "megatron"}).encode()
    (saved / "train/learner.json").write_bytes(data)
    manifest["files"]["train/learner.json"] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (saved / "manifest.json").write_text(json.dumps(manifest))


def _without_a_scale(folder: Path) -> None:
    """Let the adapter's model be in 8-bit floats."""
    import torch
    from safetensors.torch import load_file, save_file

    (built,) = (path for path in (folder / "run/models").iterdir() if path.is_dir())
    shutil.copytree(built, folder / "base")
    tensors = load_file(built / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "base/model.safetensors")
    config = json.loads((built / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "base/config.json").write_text(json.dumps(config))


CASES: list[Case] = [
    adapted("adapter_of_a_latent_that_queries_lack", LATENT, "LoRA(targets=('o_proj', 'q_a_proj'))", **ON_CPUS),
    adapted("adapter_with_a_target_twice", LATENT, "LoRA(targets=('q_proj', 'o_proj', 'q_proj'))", **ON_CPUS),
    adapted("adapter_of_a_rank_above_its_matrix", repr(TINY_QWEN3)[1:-1], "LoRA(rank=128)", **ON_CPUS),
    another("resume_with_another_alpha", "LoRA(rank=4, alpha=8, targets=('q_proj',))"),
    another("resume_without_the_adapter", "None"),
    another("resume_with_another_backend", "LoRA(rank=4, targets=('q_proj',))", _saved_by_megatron),
    AfterTraining(
        "merge_without_scales",
        text=live_text(),
        graph=None,
        program="export",
        args=("run", "--model", "new", "--merge", "base"),
        change=_without_a_scale,
    ),
    adapted(
        "adapter_of_projections_around_experts",
        f"{HYBRID}, 'moe_latent_size': 64",
        "LoRA(targets=('in_proj', 'fc1_latent_proj'))",
        sampler=ON_A_GPU,
    ),
    adapted(
        "adapter_of_copied_mamba_heads",
        HYBRID,
        sampler='WorkerGroup("sampler", backend="vllm", gpus=2, tensor_parallel=2)',
    ),
    adapted(
        "adapter_of_a_mixture_on_a_cpu",
        MIXTURE,
        sampler='WorkerGroup("sampler", backend="vllm")',
        learner='WorkerGroup("learner", backend="torch")',
    ),
    adapted("adapter_of_a_convolution", HYBRID, "LoRA(targets=('in_proj', 'conv1d'))", sampler=ON_A_GPU),
]
