"""The step of benchmarks/gpu/step.py with TRL's GRPOTrainer and vLLM on one GPU, for comparison.

python -m benchmarks.gpu.trl_step [--model 0.6B] [--groups 64] [--samples 8] [--tokens 1024] [--steps 4]
                                  [--memory 0.3] [--microbatch 8] [--keep-activations] [--out FILE]

The same model, prompts, number of samples and tokens, two updates per batch, no reference model, bfloat16, truncated
importance sampling. Defaults are TRL's: vLLM has 0.3 of the GPU and sleeps while TRL trains, activations are
recomputed. The default microbatch is small because of the logits, over 152k tokens for each position.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import add_work, model_of
from benchmarks.gpu.step import even
from benchmarks.report import report
from stages.tasks import Generated

UPDATES = 2


def seconds(options: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of its generation."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = model_of(options.model, folder)
    task = Generated("reverse")
    prompts = [task.train(index, order=0)[0] for index in range(options.groups * options.steps)]
    passes = options.groups * options.samples // options.microbatch
    ends_s, generation_s = [time.perf_counter()], []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends_s.append(time.perf_counter())

    class Timed(GRPOTrainer):
        def _generate(self, *given: Any, **more: Any) -> Any:
            begun_s = time.perf_counter()
            made = super()._generate(*given, **more)
            generation_s.append(time.perf_counter() - begun_s)
            return made

    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=options.steps * UPDATES, num_generations=options.samples,
        per_device_train_batch_size=options.microbatch, steps_per_generation=passes,
        gradient_accumulation_steps=passes // UPDATES,
        max_completion_length=options.tokens, learning_rate=1e-6, lr_scheduler_type="constant", beta=0.0, bf16=True,
        temperature=1.0, gradient_checkpointing=not options.keep_activations, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, seed=0, shuffle_dataset=False, max_grad_norm=1.0, loss_type="dapo",
        use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True, vllm_max_model_length=options.tokens + 64,
        vllm_importance_sampling_mode="token_truncate", vllm_gpu_memory_utilization=options.memory,
        model_init_kwargs={"dtype": "bfloat16"},
    )  # fmt: skip
    Timed(
        model=model, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[Clock()],
        reward_funcs=lambda completions, **_: [even(text) for text in completions],
    ).train()  # fmt: skip
    whole = ends_s[::UPDATES]
    return [after - before for before, after in pairwise(whole)], generation_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU for vLLM's weights and cache")
    parser.add_argument("--microbatch", type=int, default=8, help="samples per forward and backward pass")
    parser.add_argument("--keep-activations", action="store_true", help="do not recompute activations")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with tempfile.TemporaryDirectory() as folder:
        steps_s, generation_s = seconds(options, Path(folder))
    step_s, rollout_s = statistics.fmean(steps_s[1:]), statistics.fmean(generation_s[1:])
    tokens = options.groups * options.samples * options.tokens
    row = {
        "model": options.model,
        "max_staleness": "TRL, one GPU",
        "step s": round(step_s, 2),
        "rollout s": round(rollout_s, 2),
        "tokens/s/GPU": round(tokens / step_s),
        "rollout tokens/s/GPU": round(tokens / rollout_s),
    }
    notes = (
        f"One GPU; {options.groups} x {options.samples} samples of {options.tokens} tokens, {options.steps} steps; "
        f"vLLM has {options.memory:g} of the GPU, microbatches of {options.microbatch} samples, activations "
        f"{'kept' if options.keep_activations else 'recomputed'}."
    )
    report("gpu.trl_step", [row], list(row), notes, options.out)


if __name__ == "__main__":
    main()
