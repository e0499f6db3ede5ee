"""A rank of a refit over gloo, for tests: python -m tests.refit_ranks RANK PORT FOLDER

Two senders and two receivers carry every pair of layouts of every family out, by every transport, for two versions.
What a receiver holds is compared with what vLLM's own loader would have made of the same folder; what differs is
written to FOLDER/RANK.json, by case.
"""

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

from ops.comm.stateless_group import StatelessGroup
from ops.refit.layout import Layout
from ops.refit.plan import build
from ops.refit.share import Publisher, Share
from ops.refit.transports.broadcast import Broadcast
from ops.refit.transports.packed import Packed
from ops.refit.transports.pull import Pull
from stages.backends.megatron import places as megatron
from stages.backends.vllm import places as vllm
from tests.unit.refit_models import FAMILIES, ITEM, SERVING, TRAINING, folder, served, trained

SENDERS = RECEIVERS = 2
TRAINED = ("TP1", "TP2", "PP2", "DP2", "EP2")
SERVED = ("TP1", "TP2", "DP2")
TRANSPORTS = ("pull", "gloo", "broadcast")
CPU = torch.device("cpu")
CASES = [
    (family, training, serving)
    for family, training, serving in product(FAMILIES, TRAINED, SERVED)
    if training != "EP2" or FAMILIES[family].experts
]


def main() -> None:
    rank, port, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

    def join(offset: int, ranks: list[int]) -> StatelessGroup | None:
        if rank not in ranks:
            return None
        return StatelessGroup.join(
            "127.0.0.1", port + offset, rank=ranks.index(rank), ranks=len(ranks), device=CPU, deadline_s=120
        )

    found = {}
    for number, (family, training, serving) in enumerate(CASES):
        parts = len(TRAINING[training])
        takers = SERVING[serving][0] * SERVING[serving][1]
        if rank >= SENDERS + takers or parts <= rank < SENDERS:
            pass  # it has no part in this one
        ranks = [*range(parts), *range(SENDERS, SENDERS + takers)]
        groups = [join(0, ranks), join(1, ranks[:parts]), join(2, [0, *ranks[parts:]])] if number == 0 else groups
        found[f"{family} {training} {serving}"] = []
    (out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
