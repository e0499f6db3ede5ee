"""One rank of a data-parallel learner, without Ray: the update of a frozen batch for every way of splitting it.

Run by `torch.multiprocessing`; rank 0 writes metrics, gradients and weights for each way.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import Model
from pipeline.declare.columns import Ragged
from pipeline.declare.ranks import RankLayout, Ranks, reach_store
from pipeline.declare.sharding import Dynamic, Microbatching, Packed, Plain, Sharding
from pipeline.errors import StageError
from stages import ClippedLoss
from stages.backends import Batch, Optimization, one_shard
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.sharded import divide, whole
from stages.backends.model.weights import weights
from stages.backends.torch.optimize import TorchLearner
from stages.backends.torch.score import score
from tests.unit.tiny import QWEN3

POLICY = Model("tiny", config=QWEN3, alphabet="0123456789")
SAMPLES, MINIBATCHES = 24, 2
LOSS = ClippedLoss(kl=0.1, aggregation="sequence")
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Way:
    """How the batch is split, and whether the weights are sharded."""

    name: str
    microbatching: Microbatching
    fully_sharded: bool = False


WAYS = (
    Way("plain", Plain()),
    Way("plain microbatches", Plain(3)),
    Way("dynamic", Dynamic(48)),
    Way("packed", Packed(40)),
    Way("packed, fully sharded", Packed(40), fully_sharded=True),
    Way("plain, fully sharded", Plain(3), fully_sharded=True),
)


def frozen_batch(network: Any) -> Batch:
    """Return prompts and responses of very different lengths, and logprobs that drifted away from the network's."""
    random = torch.Generator().manual_seed(5)

    def ragged(low: int, high: int) -> Ragged:
        lengths = torch.randint(low, high, (SAMPLES,), generator=random).tolist()
        return Ragged.of([torch.randint(2, 12, (length,), generator=random) for length in lengths])

    prompts, responses = ragged(1, 8), ragged(1, 17)
    current = score(network, prompts, responses, one_shard(prompts, responses), temperature=1.0, pad=0)
    noise = [torch.randn(current.values.shape, generator=random) * 0.3 for _ in range(2)]
    old, ref = (Ragged((current.values + n).clamp(max=0), current.lengths) for n in noise)
    return Batch(prompts, responses, torch.randn(SAMPLES, generator=random), old, current, ref)


def shares(batch: Batch, way: Way, ranks: int) -> list[Any]:
    lengths = {"P": batch.prompt_ids.lengths, "T": batch.response_ids.lengths}
    return Sharding.of(way.microbatching, minibatches=MINIBATCHES).shards(lengths, ranks)


def run_way(pristine: Any, batch: Batch, way: Way, ranks: Ranks) -> dict[str, Any]:
    """Update twice on the batch and return the results of the first and the last update."""
    network = copy.deepcopy(pristine)
    if way.fully_sharded and ranks.connected:
        divide(network, ranks, torch.float32)
    learner = TorchLearner(network, Optimization(lr=1e-2, clip_grad=1.0), pad=0, ranks=ranks)
    shard = shares(batch, way, ranks.layout.data)[ranks.rank]
    mine = batch.at(shard.index)
    gradients: dict[str, torch.Tensor] = {}
    step = learner._step

    def look(*given: Any) -> None:
        if not gradients:
            gradients.update({name: whole(p.grad).clone() for name, p in learner.masters.items()})
        step(*given)

    learner._step = look
    metrics = [
        learner.update(mine, LOSS, temperature=1.0, update=update, packed=shard.packed) for update in shard.updates
    ]
    logprobs = score(network, mine.prompt_ids, mine.response_ids, shard, temperature=1.0, pad=0)
    rows = dict(zip(shard.index, logprobs.rows()))
    everything = {i: row for part_of in ranks.gather(rows) for i, row in part_of.items()}
    folder = Path(os.environ["RANKS_OUT"]) / f"state-{ranks.layout.data}-{way.name}"
    folder.mkdir(exist_ok=True)
    learner.save(folder)
    return {
        "metrics": metrics,
        "gradients": gradients,
        "weights": weights(network),
        "logprobs": torch.cat([everything[i] for i in range(SAMPLES)]),
    }


def main(rank: int, size: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANKS_OUT=out, GLOO_SOCKET_IFNAME="lo")
    ranks = Ranks()
    if size > 1:
        store = reach_store("127.0.0.1", port, size, deadline_s=DEADLINE_S)
        ranks = Ranks.join(RankLayout(data=size), rank, store, device="cpu", deadline_s=DEADLINE_S)
    pristine = load_network(POLICY, load_tokenizer(POLICY), dtype=torch.float32, device=torch.device("cpu"))
    batch = frozen_batch(pristine)
    results = {way.name: run_way(pristine, batch, way, ranks) for way in WAYS}
    if rank == 0:
        torch.save(results, Path(out) / f"{size}.pt")
    ranks.leave()


def pack_alone(rank: int, size: int, port: int, out: str) -> None:
    """Show the mistake: each rank splits its own share, although ranks meet in every layer of every microbatch.

    Writes the outcome: "done", or the error.
    """
    result = Path(out) / f"alone-{rank}.txt"
    learner, mine, _ = _divided(rank, size, port, deadline_s=6.0)
    shard = one_shard(mine.prompt_ids, mine.response_ids, Sharding.of(Packed(40)))
    try:
        learner.update(mine, LOSS, temperature=1.0, update=shard.updates[0], packed=True)
        result.write_text("done")
    except RuntimeError as error:
        result.write_text(str(error))
    os._exit(0)  # the process group is incomplete


def pack_together(rank: int, size: int, port: int, out: str) -> None:
    """Update on the same batch, split by the driver."""
    learner, _, ranks = _divided(rank, size, port, deadline_s=240.0)
    batch = _long_and_short()
    lengths = {"P": batch.prompt_ids.lengths, "T": batch.response_ids.lengths}
    shard = Sharding.of(Packed(40)).shards(lengths, size)[rank]
    learner.update(batch.at(shard.index), LOSS, temperature=1.0, update=shard.updates[0], packed=True)
    (Path(out) / f"together-{rank}.txt").write_text(f"{len(shard.updates[0].microbatches)}")
    ranks.leave()


def ask_first(rank: int, size: int, port: int, out: str) -> None:
    """Ranks that packed alone may score, because they do not meet there; the preflight keeps them from training."""
    _, mine, ranks = _divided(rank, size, port, deadline_s=240.0)
    shard = one_shard(mine.prompt_ids, mine.response_ids, Sharding.of(Packed(40)))
    network = load_network(POLICY, load_tokenizer(POLICY), dtype=torch.float32, device=torch.device("cpu"))
    packed = score(network, mine.prompt_ids, mine.response_ids, shard, temperature=1.0, pad=0)
    plain = one_shard(mine.prompt_ids, mine.response_ids)
    padded = score(network, mine.prompt_ids, mine.response_ids, plain, temperature=1.0, pad=0)
    torch.testing.assert_close(packed.values, padded.values, atol=1e-5, rtol=0)
    try:
        ranks.agree("stage 'train', step 1", f"{len(shard.updates[0].microbatches)} microbatches")
    except StageError as error:
        (Path(out) / f"asked-{rank}.txt").write_text(str(error))
    ranks.leave()


def _long_and_short() -> Batch:
    """Return four long samples, then four short ones: packed, half a batch takes 4 rows of 40 tokens, or 1."""
    rows = [torch.arange(2, 2 + length) % 10 + 2 for length in (30,) * 4 + (4,) * 4]
    responses, prompts = Ragged.of(rows), Ragged.of([torch.tensor([3, 4, 5])] * 8)
    zero = Ragged(torch.zeros(len(responses.values)), responses.lengths)
    return Batch(prompts, responses, torch.linspace(-1, 1, 8), zero, zero, zero)


def _divided(rank: int, size: int, port: int, deadline_s: float) -> tuple[TorchLearner, Batch, Ranks]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = reach_store("127.0.0.1", port, size, deadline_s=240.0)
    ranks = Ranks.join(RankLayout(data=size), rank, store, device="cpu", deadline_s=deadline_s)
    network = load_network(POLICY, load_tokenizer(POLICY), dtype=torch.float32, device=torch.device("cpu"))
    divide(network, ranks, torch.float32)
    learner = TorchLearner(network, Optimization(lr=1e-2), pad=0, ranks=ranks)
    return learner, _long_and_short().at(range(rank * 4, rank * 4 + 4)), ranks


def share_columns(rank: int, size: int, port: int, out: str) -> None:
    """Two siblings of one replica: the leader fetches, and fails on the second call."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = reach_store("127.0.0.1", port, size, deadline_s=240.0)
    ranks = Ranks.join(RankLayout(tensor=size), rank, store, device="cpu", deadline_s=240.0)
    calls = []

    def fetch() -> Any:
        calls.append(rank)
        if len(calls) > 1:
            raise KeyError("no such row")
        ragged = Ragged(torch.arange(6, dtype=torch.bfloat16).view(3, 2), (1, 2))
        return {"text": ["a", "b"], "pixels": ragged, "empty": torch.zeros(0, 3), "flags": torch.tensor([True, False])}

    columns = ranks.share(fetch)
    assert columns["text"] == ["a", "b"] and columns["empty"].shape == (0, 3)
    assert columns["flags"].tolist() == [True, False]
    assert columns["pixels"].lengths == (1, 2) and columns["pixels"].values.dtype == torch.bfloat16
    assert columns["pixels"].values.tolist() == [[0, 1], [2, 3], [4, 5]]
    try:
        ranks.share(fetch)
    except (KeyError, StageError) as error:
        (Path(out) / f"shared-{rank}.txt").write_text(f"{len(calls)} {type(error).__name__}: {error}")
    ranks.leave()
