"""How long it takes to plan a refit on one core, and how evenly the plan loads the senders.

python -m benchmarks.refit_plan [--out FILE]

The benchmark describes the layouts, builds the plan, computes its digest and lists one receiver's copies: the work of
each rank once per run. Megatron ranks of TP x PP x EP (and data-parallel replicas) send to replicas of vLLM. The 671B
shape is DeepSeek-V3's: 61 layers of 256 experts, 4 layers per pipeline stage, experts over 64 ranks, the rest over 8;
32 replicas of 32 ranks serve it.

Aim: under 2 s for Qwen3-30B-A3B, under 30 s for 1,024 ranks of the 671B shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

from benchmarks.report import report
from ops.refit.layout import Layout, Place, Tensor, dense, whole
from ops.refit.plan import build
from stages.backends.megatron import places as megatron
from stages.backends.megatron.parts import Part
from stages.backends.model.decoder import Decoder, Dense, Grouped, Layer, Sparse, StateSpace
from stages.backends.model.families import HYBRID_NAMES
from stages.backends.vllm import places as vllm

ITEM_BYTES = 2
QWEN3_30B = Decoder(
    layers=48 * (Layer(mixer=Grouped(heads=32, groups=4, head_dim=128, norm=True),
                       mlp=Sparse(experts=128, chosen=8, inner=768)),),
    hidden=2048, vocab=151936, tied=False,
)  # fmt: skip
QWEN3_4B = Decoder(
    layers=36 * (Layer(mixer=Grouped(heads=32, groups=8, head_dim=128, norm=True), mlp=Dense(inner=9728)),),
    hidden=2560, vocab=151936, tied=True,
)  # fmt: skip
_NANO = {  # NVIDIA/Megatron-LM, examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh
    "M": Layer(mixer=StateSpace(heads=64, head_dim=64, groups=8, state=128, kernel=4), mlp=None),
    "*": Layer(mixer=Grouped(heads=32, groups=2, head_dim=128), mlp=None),
    "E": Layer(mixer=None, mlp=Sparse(experts=128, chosen=6, inner=1856, gated=False, sigmoid=True, shared=3712)),
}
NEMOTRON_NANO = Decoder(
    layers=tuple(_NANO[kind] for kind in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    hidden=2688, vocab=131072, tied=False, renamed=HYBRID_NAMES,
)  # fmt: skip

_SUPER = {  # the same folder, NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh
    "M": Layer(mixer=StateSpace(heads=128, head_dim=64, groups=8, state=128, kernel=4), mlp=None),
    "*": Layer(mixer=Grouped(heads=32, groups=2, head_dim=128), mlp=None),
    "E": Layer(mixer=None, mlp=Sparse(experts=512, chosen=22, inner=2688, gated=False, sigmoid=True, shared=5376,
                                      latent=1024)),
}  # fmt: skip
NEMOTRON_SUPER = Decoder(
    layers=tuple(
        _SUPER[kind]
        for kind in "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    hidden=4096, vocab=131072, tied=False, renamed=HYBRID_NAMES,
)  # fmt: skip


def qwen3(decoder: Decoder, parts: list[Part], tensor: int, replicas: int) -> tuple[Layout, Layout]:
    """The layouts of Megatron ranks and of vLLM replicas. Each of these ranks gets tensors without a place whole."""
    tensors = megatron.tensors(decoder, "bfloat16")
    beside = [
        dense(name, whole(tensors[name].shape), tensors[name].item_bytes, f"whole {name}")
        for name in sorted(tensors.keys() - vllm.tensors(decoder, "bfloat16").keys())
    ]
    served = [
        vllm.places(decoder, rank, tensor, ITEM_BYTES) + beside for _ in range(replicas) for rank in range(tensor)
    ]
    return Layout(tensors, [megatron.places(decoder, part, ITEM_BYTES) for part in parts]), Layout(tensors, served)


LAYERS, EXPERTS, INNER, HIDDEN = 61, 256, 2048, 7168
DEEPSEEK: dict[str, tuple[tuple[int, ...], int | None]] = {  # shape, and the dimension that tensor parallelism divides
    "mlp.experts.*.gate_proj": ((EXPERTS, INNER, HIDDEN), 1),
    "mlp.experts.*.up_proj": ((EXPERTS, INNER, HIDDEN), 1),
    "mlp.experts.*.down_proj": ((EXPERTS, HIDDEN, INNER), 2),
    "mlp.shared_experts.gate_proj": ((INNER, HIDDEN), 0),
    "mlp.shared_experts.up_proj": ((INNER, HIDDEN), 0),
    "mlp.shared_experts.down_proj": ((HIDDEN, INNER), 1),
    "mlp.gate": ((EXPERTS, HIDDEN), None),
    "mlp.gate.e_score_correction_bias": ((EXPERTS,), None),
    "self_attn.q_a_proj": ((1536, HIDDEN), None),
    "self_attn.q_b_proj": ((128 * 192, 1536), 0),
    "self_attn.kv_a_proj_with_mqa": ((576, HIDDEN), None),
    "self_attn.kv_b_proj": ((128 * 256, 512), 0),
    "self_attn.o_proj": ((HIDDEN, 128 * 128), 1),
    "input_layernorm": ((HIDDEN,), None),
    "post_attention_layernorm": ((HIDDEN,), None),
}


def deepseek(stages: int = 16, tensor: int = 8, experts: int = 64, serve: int = 32) -> tuple[Layout, Layout]:
    """The layouts of DeepSeek-V3: 1,024 training ranks and 1,024 serving ranks."""
    tensors = {f"{i}.{n}": Tensor(shape, "bfloat16") for i in range(LAYERS) for n, (shape, _) in DEEPSEEK.items()}

    def place(name: str, dimension: int | None, share: int, shares: int) -> Place:
        box = [*whole(tensors[name].shape)]
        if dimension is not None:
            width = tensors[name].shape[dimension] // shares
            box[dimension] = (width * share, width * (share + 1))
        return dense(name, tuple(box), ITEM_BYTES, name)

    trained: list[list[Place]] = []
    for stage, rank in product(range(stages), range(experts)):
        layers = range(4 * stage, min(4 * stage + 4, LAYERS))
        trained.append(
            [
                place(f"{i}.{n}", 0, rank, experts) if "*" in n else place(f"{i}.{n}", dimension, rank % tensor, tensor)
                for i in layers
                for n, (_, dimension) in DEEPSEEK.items()
            ]
        )
    served = [
        [place(f"{i}.{n}", dimension, rank, serve) for i in range(LAYERS) for n, (_, dimension) in DEEPSEEK.items()]
        for rank in range(serve)
    ]
    return Layout(tensors, trained), Layout(tensors, served * (stages * experts // serve))


def split(tensor: int = 1, stages: int = 1, experts: int = 1, replicas: int = 1) -> list[Part]:
    """The parts of all ranks of a training layout."""
    return [
        Part(
            tensor=t, tensors=tensor, stage=s, stages=stages, expert=e, experts=experts, expert_tensor=t,
            expert_tensors=tensor,
        )
        for _, s, e, t in product(range(replicas), range(stages), range(experts), range(tensor))
    ]  # fmt: skip


CASES: dict[str, Callable[[], tuple[Layout, Layout]]] = {
    "Qwen3-4B, TP2 PP2 -> TP4": lambda: qwen3(QWEN3_4B, split(tensor=2, stages=2), 4, 1),
    "Qwen3-30B-A3B, EP4 -> TP4": lambda: qwen3(QWEN3_30B, split(experts=4), 4, 1),
    "Qwen3-30B-A3B, EP8 DP2 -> 4 x TP4": lambda: qwen3(QWEN3_30B, split(experts=8, replicas=2), 4, 4),
    "671B, 1,024 ranks -> 32 x TP32": deepseek,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.only:
        marks = [time.process_time()]
        source, destination = CASES[name]()
        marks.append(time.process_time())
        plan = build(source, destination)
        marks.append(time.process_time())
        digest = plan.digest
        marks.append(time.process_time())
        copies = plan.copies(0)
        marks.append(time.process_time())
        took_s = [round(after - before, 2) for before, after in pairwise(marks)]
        rows.append(
            {
                "layouts": name,
                **dict(zip(("described s", "planned s", "digest s", "copies s"), took_s)),
                "copies": len(copies),
                "GB received": round(float(plan.received[0]) / 1e9, 2),
                "most sent / mean": round(float(plan.sent.max() / plan.sent.mean()), 3),
                "digest": digest[:12],
            }
        )
    notes = "CPU seconds. Aim: planned in under 2 s for 30B, under 30 s for 671B."
    report("refit_plan", rows, list(rows[0]), notes, options.out)


if __name__ == "__main__":
    main()
