"""The step of benchmarks/gpu/step.py with verl and vLLM on one GPU, for comparison.

python -m benchmarks.gpu.verl_step [--strategy fsdp2|megatron] [--model 0.6B] [--groups 64] [--samples 8]
                                   [--tokens 1024] [--steps 4] [--budget 16480] [--memory 0.7] [--out FILE]

The same model, prompts, number of samples and tokens, two updates per batch, no reference model, bfloat16 with float32
master weights, token-level truncated importance sampling. As verl's performance guide advises: microbatches by tokens,
fused kernels for logprobs, no recomputation where memory suffices, and vLLM sleeps while verl trains. FSDP takes
PyTorch's attention on rows of equal length, where there is no padding to remove; Megatron packs its rows. Responses
always have the maximum length. `--set KEY=VALUE` overrides any key of verl's configuration; `--compose` only prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import SHAPES, add_work, model_of
from benchmarks.gpu.step import even
from benchmarks.report import report
from stages.tasks import Generated

UPDATES = 2
STAGES = ("gen", "old_log_prob", "update_actor", "update_weights")
TURN_END = "<|im_end|>"  # verl expects it in the tokenizer of a Qwen model
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """The reward, with the signature that verl expects."""
    return even(solution_str)


def with_chat(model: str, vocabulary: int) -> None:
    """Give the tokenizer in a model's folder a chat template that only joins messages, and a name for each of the
    model's tokens: verl never samples a token without one."""
    path = Path(model)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    known = tokenizer["model"]["vocab"]
    for index in range(len(known), vocabulary):
        known[TURN_END if index == vocabulary - 1 else f"<unused{index}>"] = index
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))


def write_prompts(path: Path, count: int) -> None:
    """Prompts as the table that verl reads."""
    import pandas

    task = Generated("reverse")
    pairs = [task.train(index, order=0) for index in range(count)]
    table = {
        "data_source": ["reverse"] * count,
        "prompt": [[{"role": "user", "content": prompt}] for prompt, _ in pairs],
        "reward_model": [{"style": "rule", "ground_truth": answer} for _, answer in pairs],
        "extra_info": [{"index": index} for index in range(count)],
    }
    pandas.DataFrame(table).to_parquet(path)


def overrides(options: argparse.Namespace, folder: Path, model: str) -> list[str]:
    """The keys of verl's configuration that differ from its defaults."""
    prompts, megatron = folder / "prompts.parquet", options.strategy == "megatron"
    actor = {
        "ppo_mini_batch_size": options.groups // UPDATES, "optim.lr": 1e-6, "use_kl_loss": False,
        "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": options.budget,
    }  # fmt: skip
    if megatron:
        transformer = {"attention_backend": options.attention}
        if options.recompute:
            transformer |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        actor |= {"megatron.use_mbridge": True, "megatron.vanilla_mbridge": True}
        actor |= {f"megatron.override_transformer_config.{key}": value for key, value in transformer.items()}
    else:
        actor |= {"strategy": "fsdp2"}
    rollout = {
        "name": "vllm", "n": options.samples, "tensor_model_parallel_size": 1, "ignore_eos": True,
        "gpu_memory_utilization": options.memory, "free_cache_engine": True, "calculate_log_probs": True,
        "max_num_seqs": options.groups * options.samples, "max_num_batched_tokens": 16384,
    }  # fmt: skip
    network = {
        "path": model, "use_remove_padding": megatron, "enable_gradient_checkpointing": options.recompute,
        "use_fused_kernels": options.fused != "none",
    }  # fmt: skip
    if options.fused != "none":
        network["fused_kernel_options.impl_backend"] = options.fused
    whole: dict[str, Any] = {
        "data.train_files": prompts, "data.val_files": prompts, "data.train_batch_size": options.groups,
        "data.max_prompt_length": 64, "data.max_response_length": options.tokens, "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "algorithm.adv_estimator": "grpo", "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
        "reward.custom_reward_function.path": Path(__file__).resolve(),
        "trainer.n_gpus_per_node": 1, "trainer.val_before_train": False, "trainer.resume_mode": "disable",
        "trainer.total_training_steps": options.steps, "trainer.logger": '["console","file"]',
        "trainer.default_local_dir": folder / "checkpoints",
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "+ray_kwargs.ray_init.address": "local", "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": folder, "hydra.output_subdir": "null",
    }  # fmt: skip
    for room, keys in (("actor", actor), ("rollout", rollout), ("model", network)):
        whole |= {f"actor_rollout_ref.{room}.{key}": value for key, value in keys.items()}
    return [*(["model_engine=megatron"] if megatron else []), *(f"{k}={v}" for k, v in whole.items()), *options.set]


def seconds(options: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    """What verl measured of each step, as many as it makes in `options.limit` seconds.

    Raises CalledProcessError or TimeoutExpired if verl makes fewer than two steps. Its processes end with it.
    """
    model, lines = model_of(options.model, folder), folder / "metrics.jsonl"
    with_chat(model, SHAPES[options.model]["vocab_size"])
    write_prompts(folder / "prompts.parquet", options.groups * options.steps)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(options, folder, model)]
    paths = [str(Path(path).resolve()) for path in (*os.environ.get("PYTHONPATH", "").split(os.pathsep), "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "VERL_FILE_LOGGER_PATH": str(lines)}
    if options.compose:
        command += ["--cfg", "job"]
    try:
        subprocess.run(command, env=environment, check=True, timeout=options.limit)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        if len(_steps(lines)) < 2:
            raise
    return _steps(lines)


def _steps(lines: Path) -> list[dict[str, float]]:
    return [json.loads(line)["data"] for line in lines.read_text().splitlines()] if lines.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--strategy", choices=("fsdp2", "megatron"), default="fsdp2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=int, default=16480, help="tokens per microbatch")
    parser.add_argument("--memory", type=float, default=0.7, help="share of the GPU for vLLM's weights and cache")
    parser.add_argument(
        "--fused",
        choices=("triton", "torch", "liger", "none"),
        help="default: torch with fsdp2, whose rows triton refuses",
    )
    parser.add_argument("--attention", choices=("fused", "auto", "unfused"), default="fused", help="Megatron's")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds after which verl is stopped")
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="more of verl's configuration")
    parser.add_argument("--compose", action="store_true", help="print verl's configuration and stop")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    options.fused = options.fused or ("torch" if options.strategy == "fsdp2" else "triton")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with tempfile.TemporaryDirectory() as folder:
        steps = seconds(options, Path(folder))
    if options.compose:
        return

    def mean(name: str) -> float:
        return statistics.fmean(step.get(name, 0.0) for step in steps[1:])

    tokens = options.groups * options.samples * mean("response_length/mean")
    step_s, rollout_s = mean("timing_s/step"), mean("timing_s/gen")
    row = {
        "model": options.model,
        "max_staleness": f"verl, {options.strategy}, one GPU",
        "step s": round(step_s, 2),
        **{f"{stage} s": round(mean(f"timing_s/{stage}"), 2) for stage in STAGES},
        "tokens/s/GPU": round(tokens / step_s),
        "rollout tokens/s/GPU": round(tokens / rollout_s),
        "memory GiB": round(mean("actor/perf/max_memory_reserved_gb"), 1),
    }
    notes = (
        f"One GPU; {options.groups} x {options.samples} samples of {options.tokens} tokens, microbatches of "
        f"{options.budget} tokens, vLLM has {options.memory:g} of the GPU; {len(steps)} of {options.steps} steps."
    )
    report("gpu.verl_step", [row], list(row), notes, options.out)


if __name__ == "__main__":
    main()
