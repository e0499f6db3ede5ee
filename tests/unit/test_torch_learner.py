"""Optimizer updates of the torch backend: loss, accumulation, schedules, and exact state."""

import copy
import json
import math
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pipeline import Model
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Plain, Sharding
from pipeline.errors import CheckpointError
from stages import ClippedLoss
from stages.backends import Batch, Optimization, one_shard
from stages.backends.model.build import load_network, load_tokenizer
from stages.backends.model.weights import weights
from stages.backends.torch.optimize import TorchLearner
from stages.backends.torch.score import score as score_shard
from tests.parking import Late
from tests.shares import weight_hash
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
POLICY = Model("tiny", config=QWEN3, alphabet="0123456789")
CPU = torch.device("cpu")


def loaded() -> Any:
    return load_network(POLICY, load_tokenizer(POLICY), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def pristine() -> Any:
    return loaded()


def learner(pristine: Any, **settings: Any) -> TorchLearner:
    return TorchLearner(copy.deepcopy(pristine), Optimization(**{"lr": 1e-2, **settings}), pad=0)


def score(network: Any, prompts: Ragged, responses: Ragged, *, temperature: float = 1.0) -> Ragged:
    shard = one_shard(prompts, responses)
    return score_shard(network, prompts, responses, shard, temperature=temperature, pad=0)


def updated(one: TorchLearner, given: Batch, loss: Any, *, temperature: float = 1.0, size: int = 0) -> dict:
    """Run one update on the whole batch, in microbatches of `size` samples, and return its metrics."""
    shard = one_shard(given.prompt_ids, given.response_ids, Sharding.of(Plain(size)))
    return one.update(given, loss, temperature=temperature, update=shard.updates[0], packed=shard.packed)


def backward(one: TorchLearner, given: Batch, loss: Any, only: int | None = None, *, size: int = 0) -> None:
    """Accumulate gradients of all microbatches, or of one, without an optimizer step."""
    (update,) = one_shard(given.prompt_ids, given.response_ids, Sharding.of(Plain(size))).updates
    microbatches = update.microbatches if only is None else update.microbatches[only : only + 1]
    one._backward(given, loss, 1.0, replace(update, microbatches=microbatches), packed=False)


def batch(network: Any, count: int = 12, seed: int = 0, drift: float = 0.3) -> Batch:
    """Return ragged prompts and responses, with old logprobs `drift` (standard deviation) away from the network's."""
    random = torch.Generator().manual_seed(seed)

    def ragged(low: int, high: int) -> Ragged:
        lengths = torch.randint(low, high, (count,), generator=random).tolist()
        return Ragged.of([torch.randint(2, 12, (length,), generator=random) for length in lengths])

    prompts, responses = ragged(1, 6), ragged(1, 9)
    current = score(network, prompts, responses)
    noise = [torch.randn(current.values.shape, generator=random) * drift for _ in range(2)]
    old, ref = (Ragged((current.values + n).clamp(max=0), current.lengths) for n in noise)
    return Batch(prompts, responses, torch.randn(count, generator=random), old, current, ref)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("microbatch", [1, 5, 12])
def test_microbatches_give_the_update_of_the_whole_minibatch(pristine: Any, aggregation: str, microbatch: int) -> None:
    loss = ClippedLoss(kl=0.1, aggregation=aggregation)
    given = batch(pristine)
    expected = updated(learner(pristine), given, loss)
    found = updated(learner(pristine), given, loss, size=microbatch)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_gradients_of_microbatches_add_up(pristine: Any) -> None:
    given, loss = batch(pristine), ClippedLoss(kl=0.1)
    whole, parts = learner(pristine), learner(pristine)
    backward(whole, given, loss)
    backward(parts, given, loss, size=5)
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(parts.parameters[name].grad, parameter.grad, atol=1e-6, rtol=1e-5)


def test_the_loss_is_that_of_the_formula(pristine: Any) -> None:
    given = batch(pristine)
    current = score(pristine, given.prompt_ids, given.response_ids)
    total, clipped, divergence, largest = 0.0, 0, 0.0, 0.0
    assert given.ref_logprobs is not None
    rows = zip(current.rows(), given.old_logprobs.rows(), given.ref_logprobs.rows(), given.advantage.tolist())
    for now, old, ref, advantage in rows:
        for a, b, c in zip(now.tolist(), old.tolist(), ref.tolist()):
            ratio = math.exp(a - b)
            bounded = min(max(ratio, 0.8), 1.3)
            total -= min(ratio * advantage, bounded * advantage)
            clipped += ratio * advantage > bounded * advantage
            divergence += math.exp(c - a) - (c - a) - 1
            largest = max(largest, ratio)
    tokens = sum(current.lengths)
    found = updated(learner(pristine), given, ClippedLoss(clip=(0.2, 0.3), kl=0.5))
    assert found["loss"] == pytest.approx((total + 0.5 * divergence) / tokens, rel=1e-4)
    assert found["clip_fraction"] == pytest.approx(clipped / tokens)
    assert 0 < clipped < tokens
    assert found["kl"] == pytest.approx(divergence / tokens, rel=1e-4)
    assert found["ratio_max"] == pytest.approx(largest, rel=1e-4)


def test_tokens_that_the_policy_did_not_draw_do_not_train(pristine: Any) -> None:
    """They have the advantage of their sample, but the loss and its gradient by hand are of the other tokens."""
    given = batch(pristine)
    drawn = Ragged(torch.arange(len(given.response_ids.values)) % 3 != 1, given.response_ids.lengths)
    count = int(drawn.values.sum())
    by_hand, total = copy.deepcopy(pristine), torch.zeros(())
    columns = (given.prompt_ids, given.response_ids, given.old_logprobs, given.ref_logprobs, drawn)
    rows = zip(*(column.rows() for column in columns if column is not None), given.advantage, strict=True)
    for prompt, response, old, ref, own, advantage in rows:
        logits = by_hand(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        now = logits.log_softmax(-1).gather(-1, response[:, None])[own, 0]
        ratio = (now - old[own]).exp()
        lost = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.3) * advantage)
        total = total + (lost + 0.5 * ((ref[own] - now).exp() - (ref[own] - now) - 1)).sum() / count
    total.backward()
    one, loss = learner(pristine), ClippedLoss(clip=(0.2, 0.3), kl=0.5)
    (update,) = one_shard(given.prompt_ids, given.response_ids, Sharding.of(Plain(5))).updates
    found = one._backward(replaced(given, sampled=drawn), loss, 1.0, replace(update, tokens=count), packed=False)
    assert sum(float(sums["loss"]) for sums in found) == pytest.approx(total.item(), rel=1e-4)
    wanted = dict(by_hand.named_parameters())
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=1e-6, rtol=1e-4)


def test_an_update_raises_what_has_a_positive_advantage(pristine: Any) -> None:
    given = batch(pristine, drift=0.0)
    one = learner(pristine, lr=1e-3)
    before = score(one.network, given.prompt_ids, given.response_ids)
    updated(one, given, ClippedLoss())
    after = score(one.network, given.prompt_ids, given.response_ids)
    gains = [float((b - a).sum()) for a, b in zip(before.rows(), after.rows())]
    assert float(torch.tensor(gains) @ given.advantage) > 0


def test_the_norm_of_the_gradient_is_bounded(pristine: Any) -> None:
    given = batch(pristine)
    free, bound = learner(pristine, clip_grad=0.0), learner(pristine, clip_grad=0.01)
    norms = [updated(one, given, ClippedLoss())["grad_norm"] for one in (free, bound)]
    assert norms[0] == norms[1] > 0.01
    moments = [
        torch.cat([one.optimizer.state[p]["exp_avg"].flatten() for p in one.masters.values()]) for one in (free, bound)
    ]
    torch.testing.assert_close(moments[1] * norms[0] / 0.01, moments[0], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("where", ["old_logprobs", "advantage"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(pristine: Any, where: str) -> None:
    good = batch(pristine)
    bad = batch(pristine)
    (bad.advantage if where == "advantage" else bad.old_logprobs.values)[0] = float("nan")
    one, other = learner(pristine), learner(pristine)
    before = weight_hash(weights(one.network))
    assert updated(one, bad, ClippedLoss())["skipped"] == 1.0
    assert weight_hash(weights(one.network)) == before
    for each in (one, other):
        assert updated(each, good, ClippedLoss())["skipped"] == 0.0
    assert weight_hash(weights(one.network)) == weight_hash(weights(other.network)) != before
    assert (one.skipped, one.updates) == (1, 2)


def test_a_learning_rate_of_0_keeps_the_weights(pristine: Any) -> None:
    one = learner(pristine, lr=0.0)
    updated(one, batch(pristine), ClippedLoss())
    assert weight_hash(weights(one.network)) == weight_hash(weights(pristine))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0]),
    ],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    settings = Optimization(lr=1.0, schedule=schedule, warmup=2, updates=6)
    assert [settings.learning_rate(i) for i in range(7)] == pytest.approx(expected, abs=1e-6)


def test_the_schedule_reaches_the_optimizer(pristine: Any) -> None:
    one = learner(pristine, schedule="linear", updates=2, lr=1e-2)
    rates = [updated(one, batch(pristine), ClippedLoss())["lr"] for _ in range(2)]
    assert rates == [1e-2, 5e-3]
    assert one.optimizer.param_groups[0]["lr"] == 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_continues_bit_for_bit(pristine: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    network = copy.deepcopy(pristine).to(dtype)
    given = [batch(pristine, seed=seed) for seed in range(4)]
    one = TorchLearner(copy.deepcopy(network), Optimization(lr=1e-2, weight_decay=0.1), pad=0)
    for each in given[:2]:
        updated(one, each, ClippedLoss())
    one.save(tmp_path)
    other = TorchLearner(copy.deepcopy(network), Optimization(lr=1e-2, weight_decay=0.1), pad=0)
    updated(other, given[3], ClippedLoss())
    other.restore(tmp_path)
    for each in given[2:]:
        results = [updated(which, each, ClippedLoss()) for which in (one, other)]
        assert results[0] == results[1]
    assert weight_hash(weights(one.network)) == weight_hash(weights(other.network)) != weight_hash(weights(network))
    assert one.updates == other.updates == 4
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors", ".safetensors"]


def test_gradients_of_bfloat16_weights_add_up_in_float32(pristine: Any) -> None:
    given, loss = batch(pristine), ClippedLoss()
    one = TorchLearner(copy.deepcopy(pristine).to(torch.bfloat16), Optimization(lr=1e-5), pad=0)
    parts = []
    for i in range(2):
        backward(one, given, loss, only=i, size=6)
        parts.append({name: master.grad.clone() for name, master in one.masters.items()})
        if i == 0:
            for master in one.masters.values():
                master.grad = None
    backward(one, given, loss, only=0, size=6)
    for name, master in one.masters.items():
        assert master.grad.dtype == torch.float32
        torch.testing.assert_close(master.grad, parts[0][name] + parts[1][name])


def test_small_updates_of_bfloat16_weights_add_up(pristine: Any) -> None:
    given = batch(pristine)
    one = TorchLearner(copy.deepcopy(pristine).to(torch.bfloat16), Optimization(lr=1e-5), pad=0)
    start = {name: master.clone() for name, master in one.masters.items()}
    for _ in range(5):
        updated(one, given, ClippedLoss())
    for name, master in one.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(one.parameters[name], master.to(torch.bfloat16))
        assert not torch.equal(master, start[name])


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "learner.json"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_state_that_is_not_whole_is_refused(pristine: Any, tmp_path: Path, name: str, damage: str) -> None:
    one = learner(pristine)
    updated(one, batch(pristine), ClippedLoss())
    one.save(tmp_path)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
    with pytest.raises(CheckpointError, match="the learner's state cannot be read"):
        learner(pristine).restore(tmp_path)


def test_the_counters_are_json(pristine: Any, tmp_path: Path) -> None:
    one = learner(pristine)
    updated(one, batch(pristine), ClippedLoss())
    one.save(tmp_path)
    assert json.loads((tmp_path / "learner.json").read_text()) == {"backend": "torch", "updates": 1, "skipped": 0}


def test_recomputed_activations_give_the_same_update(pristine: Any) -> None:
    given = batch(pristine)
    plain, recomputing = learner(pristine), learner(pristine, checkpoint_activations=True)
    calls = []
    recomputing.network.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    expected, found = (updated(one, given, ClippedLoss()) for one in (plain, recomputing))
    assert len(calls) == 2
    assert found == pytest.approx(expected, rel=1e-6)
    assert weight_hash(weights(plain.network)) == weight_hash(weights(recomputing.network))


def test_temperature_divides_the_logits(pristine: Any) -> None:
    given = batch(pristine, drift=0.0)
    cold = score(pristine, given.prompt_ids, given.response_ids, temperature=0.5)
    same = Batch(given.prompt_ids, given.response_ids, given.advantage, cold)
    assert updated(learner(pristine), same, ClippedLoss(), temperature=0.5)["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert updated(learner(pristine), same, ClippedLoss())["ratio_max"] > 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parked_learner_can_be_saved_and_goes_on_to_the_bit(pristine: Any, tmp_path: Path, dtype: Any) -> None:
    given, loss = batch(pristine), ClippedLoss(kl=0.1)
    parked, other = (TorchLearner(copy.deepcopy(pristine).to(dtype), Optimization(lr=1e-2), pad=0) for _ in range(2))
    for one in (parked, other):
        updated(one, given, loss)
    parked.parking = Late()
    parked.park()
    for one, name in ((parked, "parked"), (other, "other")):
        (tmp_path / name).mkdir()
        one.save(tmp_path / name)
    for file in (tmp_path / "other").iterdir():
        assert (tmp_path / "parked" / file.name).read_bytes() == file.read_bytes()
    parked.leave()
    for one in (parked, other):
        updated(one, given, loss)
    assert weight_hash(weights(parked.network)) == weight_hash(weights(other.network))
    parked.park()
    parked.leave()
    for one, name in ((parked, "parked"), (other, "other")):
        one.save(tmp_path / name)
    for file in (tmp_path / "other").iterdir():
        assert (tmp_path / "parked" / file.name).read_bytes() == file.read_bytes()
