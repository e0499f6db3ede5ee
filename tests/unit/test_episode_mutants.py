"""Mistakes with the tokens of episodes that other trainers have made: a test sees each of them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from tests.numerics import mutate
from tests.unit import test_episode, test_torch_learner, test_torch_stages, test_turn_advantages
from tests.unit.test_episode import Worker

Check = Callable[[Worker, Path, pytest.MonkeyPatch], None]


def tokens(worker: Worker, folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_episode.test_tokens_are_those_that_the_engine_had(worker)


def turns(worker: Worker, folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_turn_advantages.test_each_token_has_the_advantage_of_its_turn(worker)


def compared(worker: Worker, folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_torch_stages.test_tokens_that_the_policy_did_not_draw_are_not_compared()


def trained(worker: Worker, folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_torch_learner.test_tokens_that_the_policy_did_not_draw_do_not_train(test_torch_learner.loaded())


def updated(worker: Worker, folder: Path, patch: pytest.MonkeyPatch) -> None:
    test_turn_advantages.test_an_update_sees_the_advantages_of_its_tokens(folder, patch)


PLAY, TRAIN, ADVANTAGE = "stages.episode.play", "stages.train", "stages.advantage"
TRAINER = "stages.backends.trainer"
MISTAKES: dict[str, tuple[str, str, str, str, Check]] = {  # module, what it defines, original text, replacement, check
    "mask shifted by one": (TRAIN, "_sampled", "versions.values >= 0", "(versions.values >= 0).roll(1)", updated),
    "inserted token trained": (TRAIN, "_sampled", "versions.values >= 0", "versions.values >= -1", compared),
    "inserted token drawn": (
        PLAY, "Play", "(len(inserted),), INSERTED,", "(len(inserted),), self._turns.version,", tokens,
    ),
    "inserted token left out": (PLAY, "Play", "    self._add(inserted,", "    0 and self._add(inserted,", tokens),
    "age of an inserted token": (
        TRAIN, "TrainRunner", "age = task.step - versions.values[drawn]", "age = task.step - versions.values", compared,
    ),
    "logprobs of inserted tokens": (
        TRAIN, "TrainRunner", "rollout_logprobs.values[drawn], batch.old_logprobs.values[drawn]",
        "rollout_logprobs.values, batch.old_logprobs.values", compared,
    ),
    "loss of inserted tokens": (
        TRAINER, "BaseLearner._objective", "mask_NT & padded(part.sampled)", "mask_NT", trained,
    ),
    "end of a turn before its last token": (
        PLAY, "Play", "_ends.append(self.tokens)", "_ends.append(self.tokens - 1)", tokens,
    ),
    "logprobs of another turn": (
        PLAY, "Play", "torch.cat([part[n] for part in parts])",
        "torch.cat([part[n] for part in (parts[::-1] if n == 1 else parts)])", tokens,
    ),
    "rewards of other turns": (PLAY, "Play", "self._rewards[-1] =", "self._rewards[0] =", tokens),
    "advantage of another turn": (ADVANTAGE, "_of_tokens", "of_tokens(each_U,", "of_tokens(each_U.flip(0),", turns),
    "advantage of another sample": (
        ADVANTAGE, "_of_tokens", "for each_U, ends_U, made_T in rows", "for each_U, ends_U, made_T in [*rows][::-1]",
        turns,
    ),
    "advantages of inserted tokens": (ADVANTAGE, "_of_tokens", "made_T >= 0)", "made_T >= -1)", turns),
}  # fmt: skip


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def source_of(name: str) -> str:
    return inspect.getsource(importlib.import_module(name))


def put(name: str, defined: str, source: str, patch: pytest.MonkeyPatch) -> None:
    """Replace what a module defines by what other source defines."""
    module = importlib.import_module(name)
    holder, _, member = defined.rpartition(".")
    owner = getattr(module, holder) if holder else module  # subclasses have what a class of theirs is given
    patch.setattr(owner, member, attrgetter(defined)(mutate.load(source, module)))


def test_the_unchanged_source_passes(worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, defined, *_ in MISTAKES.values():
        put(name, defined, source_of(name), monkeypatch)
    for check in {mistake[-1] for mistake in MISTAKES.values()}:
        check(worker, tmp_path, monkeypatch)


@pytest.mark.journal_expected
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, defined, right, wrong, check = MISTAKES[mistake]
    assert source_of(name).count(right) == 1, f"{name} no longer has {right!r} once: adapt this list"
    put(name, defined, source_of(name).replace(right, wrong), monkeypatch)
    with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
        check(worker, tmp_path, monkeypatch)
