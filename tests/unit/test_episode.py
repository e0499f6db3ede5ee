"""Episodes on the torch backend: their tokens, draws and ends, and what happens when environments fail."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pipeline import (
    Field,
    Graph,
    GraphError,
    Model,
    Output,
    Schedule,
    Stage,
    StageContext,
    StageError,
    Task,
    WorkerGroup,
)
from pipeline.analysis.episodes import waits_by_task
from pipeline.analysis.gaps import gaps
from pipeline.declare.columns import Ragged
from pipeline.declare.times import SampleTimes
from pipeline.engine.driver import Driver
from pipeline.executors.local import LocalExecutor
from pipeline.executors.policy_versions import versions_of
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.record.history import Tasks
from pipeline.rundir import RunDir
from stages import (
    Advantage,
    ClippedLoss,
    Deadlines,
    End,
    Environment,
    Episode,
    Evaluate,
    Filter,
    Generated,
    Messages,
    PrevLogprobs,
    Refit,
    Reply,
    Reward,
    Rollout,
    Train,
)
from stages.backends import Decoded, Generation, Sampling
from stages.episode import attempts
from stages.episode.attempts import Attempts
from stages.episode.conversation import calls_in
from stages.episode.endpoint.commands import result_in
from stages.episode.environment import Call
from stages.episode.frames import HostAnswer
from stages.episode.processes import EnvironmentFailedError, Processes
from stages.episode.turns import EpisodeName, NextTurn, TurnSampler
from stages.vocabulary import RESPONSE_IDS, TOKEN_VERSIONS
from tests.doors import REPOSITORY
from tests.shares import shares_of
from tests.unit import tiny_graph
from tests.unit.environments import Chatty, Echo, Faulty, Lying, OneTurn, Saying, Sleeping, Telling, Unreadable
from tests.unit.streams import collected
from tests.unit.tiny import QWEN3

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("forked_environments")
POLICY = Model("tiny", config=QWEN3, alphabet="0123456789abc")
SAMPLER = WorkerGroup("sampler", backend="torch", threads=1)
TEXTS = ["1", "0123", "ab", "77"]
FAST = Deadlines(open_s=20.0, turn_s=20.0, episode_s=100.0, close_s=2.0)


class Worker:
    """Runs stages on one engine, as a worker does."""

    def __init__(self, size: int = 2) -> None:
        self.size, self.shared = size, {}
        self.context = StageContext(
            group=SAMPLER, rank=0, seed=3, group_size=size, run_dir=None, shared=self.shared, max_staleness=0
        )

    def outputs(self, stage: Any, texts: list[str] = TEXTS, **changed: Any) -> list[Output]:
        run = stage.setup(self.context)
        columns = {"prompt": [text for text in texts for _ in range(self.size)]}
        task = Task(number=1, stage=stage.name, step=0, groups=tuple(range(5, 5 + len(texts))), version=0, **changed)

        async def collected() -> list[Output]:
            return [output async for output in run(columns, task) if output.columns or output.cancelled]

        return asyncio.run(collected())

    def columns(self, stage: Any, texts: list[str] = TEXTS) -> dict[str, Any]:
        """All columns, in the order of the samples."""
        rows: dict[int, dict[str, Any]] = {}
        for output in self.outputs(stage, texts):
            for place, i in enumerate(output.index or range(len(texts) * self.size)):
                rows[i] = {
                    name: column.rows()[place] if isinstance(column, Ragged) else column[place]
                    for name, column in output.columns.items()
                }
        assert sorted(rows) == list(range(len(texts) * self.size))
        return {name: [rows[i][name] for i in sorted(rows)] for name in rows[0]}

    def close(self) -> None:
        for held in self.shared.values():
            if hasattr(held, "close"):
                held.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def episode(environment: Environment, **settings: Any) -> Episode:
    given = {"turns": 4, "tokens": 40, "turn_tokens": 6, "environments": 2, "deadlines": FAST, "retries": 1}
    return Episode(POLICY, environment, on=SAMPLER, samples_per_prompt=2, **given | settings)


def same(one: dict[str, Any], two: dict[str, Any], names: Any = None) -> bool:
    """Whether columns have the same bits."""
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for name in names or one
        for a, b in zip(one[name], two[name], strict=True)
    )


# Tokens.


def test_one_turn_is_a_rollout_to_the_bit(worker: Worker) -> None:
    rollout = worker.columns(Rollout(POLICY, on=SAMPLER, samples_per_prompt=2, max_tokens=6))
    turn = worker.columns(episode(OneTurn(), turn_tokens=6))
    assert same(rollout, turn, rollout)
    assert set(turn["end"]) == {"answered"} and all(len(ends) == 1 for ends in turn["turn_ends"])


def test_tokens_are_those_that_the_engine_had(worker: Worker) -> None:
    """Sampled and inserted ones in their order, with versions, and logprobs that scoring the sample gives again."""
    made, backend = worker.columns(episode(Echo())), worker.shared["engine"]
    for i in range(len(TEXTS) * 2):
        ids, versions, ends = made["response_ids"][i], made["token_versions"][i], made["turn_ends"][i].tolist()
        messages = json.loads(made["conversation"][i])
        assert messages[0] == {"role": "user", "content": TEXTS[i // 2]} and len(messages) == 6
        place = 0
        for turn, end in enumerate(ends):
            (said,) = backend.decode(POLICY, Ragged(ids[place:end], (end - place,)))
            assert messages[2 * turn + 1] == {"role": "assistant", "content": said}
            assert (versions[place:end] == 0).all()
            if turn + 1 < len(ends):
                inserted = backend.encode(POLICY, [said[:2] or "1"]).values
                place = end + len(inserted)
                assert torch.equal(ids[end:place], inserted) and (versions[end:place] == -1).all()
                assert (made["rollout_logprobs"][i][end:place] == 0).all()
        assert ends[-1] == len(ids) and made["turn_rewards"][i].tolist() == [0.5, 0.5, 1.0]
    prompts, responses = Ragged.of(made["prompt_ids"]), Ragged.of(made["response_ids"])
    scoring = PrevLogprobs(POLICY, on=SAMPLER).setup(worker.context)
    versions = Ragged.of(made["token_versions"])
    given = {"prompt_ids": prompts, "response_ids": responses, "token_versions": versions}
    again = scoring(given, Task(number=2, stage="prev_logprobs", step=0, groups=(5, 6, 7, 8))).columns["prev_logprobs"]
    drawn = versions.values >= 0
    logprobs = torch.cat(made["rollout_logprobs"])
    torch.testing.assert_close(again.values[drawn], logprobs[drawn], atol=1e-5, rtol=0)
    assert 0 < int((~drawn).sum()) < len(drawn)


TRUNCATED = [{}, {"top_k": 2}, {"min_p": 0.9}, {"top_p": 0.2}, {"temperature": 3.0}]


@pytest.mark.parametrize("settings", TRUNCATED, ids=str)
def test_a_turn_draws_on_where_the_sample_was(worker: Worker, settings: dict[str, Any]) -> None:
    """The second turn is a response to the whole conversation so far, with the numbers that follow, and each is drawn
    as the stage says."""
    from stages.backends import Draws, Sampling

    made, backend = worker.columns(episode(Echo(turns=2), **settings)), worker.shared["engine"]
    is_plain = []
    for i in range(4):
        ids, (first, last) = made["response_ids"][i], made["turn_ends"][i].tolist()
        place = first + int((made["token_versions"][i] == -1).sum())
        for begin, end in ((0, first), (place, last)):
            prompt = Ragged.of([torch.cat([made["prompt_ids"][i], ids[:begin]])])
            draws = Draws(3, (5 + i // 2,), (i % 2,), (begin,))
            alone = backend.generate(POLICY, prompt, Sampling(6, **settings), draws).response_ids.values
            plain = backend.generate(POLICY, prompt, Sampling(6), draws).response_ids.values
            assert torch.equal(alone, ids[begin:end])
            is_plain.append(torch.equal(alone, plain))
    assert all(is_plain) == (not settings), "the setting decides about a token"


def test_episodes_do_not_depend_on_the_time_that_environments_take() -> None:
    found = []
    for sleep_s, environments in ((0.0, 1), (0.05, 3)):
        worker = Worker()
        found.append(worker.columns(episode(Echo(sleep_s=sleep_s), environments=environments)))
        worker.close()
    assert same(*found)


@pytest.mark.parametrize(
    ("settings", "end", "truncated"),
    [
        ({}, {"answered"}, None),
        ({"turns": 2}, {"turns"}, True),
        ({"tokens": 9, "turn_tokens": 9}, {"tokens", "answered"}, None),
    ],
)
def test_ends(worker: Worker, settings: dict[str, Any], end: set[str], truncated: bool | None) -> None:
    made = worker.columns(episode(Echo(), **settings))
    assert set(made["end"]) <= end and set(made["end"]) & end
    assert max(map(len, made["response_ids"])) <= settings.get("tokens", 40)
    assert truncated is None or all(bool(each) is truncated for each in made["truncated"])
    assert all(len(ends) <= settings.get("turns", 4) for ends in made["turn_ends"])


def test_an_episode_ends_at_its_deadline(worker: Worker) -> None:
    slow = episode(Echo(turns=9, sleep_s=2.0), turns=9, deadlines=replace(FAST, episode_s=1.0), environments=1)
    asyncio.run(slow.places(worker.context).place().ask("open", -1, 30.0, row={"prompt": "1"}, seed=(0,)))
    assert "deadline" in worker.columns(slow, TEXTS[:1])["end"]


def test_coroutines_of_one_process_run_at_the_same_time(worker: Worker) -> None:
    worker.columns(episode(Sleeping(), environments=1), TEXTS[:1])  # starts the process
    begun_s = time.monotonic()
    made = worker.columns(episode(Sleeping(), environments=1), TEXTS * 10)
    assert set(made["end"]) == {"answered"} and time.monotonic() - begun_s < 8.0, "80 times 0.4 s are 32 s"


def parts_in(outputs: list[Output]) -> dict[int, list[tuple[str, float, float]]]:
    """The parts of each sample's time."""
    found = {}
    for i, times in [item for output in outputs for item in output.times.items()]:
        starts = [times.start_s, *(end_s for _, end_s in times.parts)]
        found[i] = [(name, start_s, end_s) for (name, end_s), start_s in zip(times.parts, starts)]
    return found


def overlaps(parts: list[tuple[str, float, float]]) -> bool:
    ordered = sorted(parts, key=lambda part: part[1])
    return any(one[2] > two[1] for one, two in pairwise(ordered))


def test_times_tell_whom_an_episode_waits_for(worker: Worker) -> None:
    """Calls of one process follow each other, and what waits for them is no time of the environment. A wave of turns
    begins at one time, and each of its turns has been in the queue since it was asked for."""
    outputs = worker.outputs(episode(Echo(turns=2, sleep_s=0.05), environments=1))
    assert {frozenset(output.at_once.items()) for output in outputs} == {frozenset({("environment", 1)})}
    found = parts_in(outputs)
    assert sorted(found) == list(range(8))
    kept = [[part for part in found[i] if part[0] != "worker"] for i in sorted(found)]
    last_opened = max(kept, key=lambda parts: parts[1][2])
    names = [name for name, *_ in last_opened if name != "queue"]
    assert names == [*["process", "environment", "generate"] * 2, "process", "environment"]
    environment = [part for parts in kept for part in parts if part[0] == "environment"]
    assert len(environment) == 24 and not overlaps(environment)
    waves = {start_s for parts in kept for name, start_s, _ in parts if name == "generate"}
    assert len(waves) == 2


def test_coroutines_of_one_process_wait_at_the_same_time(worker: Worker) -> None:
    """A busy worker sends calls late and one by one, so it has three tries."""
    tries = (parts_in(worker.outputs(episode(Sleeping(), environments=1))) for _ in range(3))
    assert any(
        overlaps([part for parts in made.values() for part in parts if part[0] == "environment"]) for made in tries
    )


def drawn_after(seconds: float) -> Any:
    """What draws one token for each sample, after that time."""

    async def drawn(prompts: Ragged, *given: Any, **named: Any) -> Any:
        await asyncio.sleep(seconds)
        ids = Ragged(torch.zeros(len(prompts.lengths), dtype=torch.long), (1,) * len(prompts.lengths))
        yield Decoded(tuple(range(len(prompts.lengths))), Generation(ids, ids, torch.zeros(len(ids.lengths)), ids))

    return drawn


@pytest.mark.parametrize("joins", [True, False])
def test_only_a_backend_that_samples_in_waves_has_a_queue(joins: bool) -> None:
    """The second episode asks 0.05 s after the first."""
    given = {"seed": 0, "version": 0, "unwanted": lambda group: False}
    turns = TurnSampler(drawn_after(0.02), Sampling(4), joins=joins, **given)
    episodes, times = [EpisodeName(0, n) for n in range(2)], [SampleTimes(), SampleTimes()]
    for one in episodes:
        turns.enter(one)

    async def asks(n: int) -> None:
        await asyncio.sleep(0.05 * n)
        times[n].until("worker")
        await turns.sample(episodes[n], NextTurn(torch.zeros(1, dtype=torch.long), 0, 4), times[n])

    async def looks() -> None:
        for _ in range(20):
            await asyncio.sleep(0.005)
            seen.update(one.now for one in times)

    async def both() -> None:
        await asyncio.gather(asks(0), asks(1), looks())

    seen: set[str] = set()

    asyncio.run(both())
    found = [{name: span for name, *span in parts_in([Output(times={0: one})])[0]} for one in times]
    assert seen == {"worker", "generate"} | ({"queue"} if not joins else set())
    assert ("queue" in found[0]) is not joins and all("generate" in each for each in found)
    if not joins:
        assert found[0]["queue"][1] == found[0]["generate"][0] == found[1]["generate"][0]


def test_a_cancelled_group_ends_where_it_stands(worker: Worker) -> None:
    worker.context.cancelled.add(6)
    found = worker.outputs(episode(Echo(sleep_s=0.2)))
    assert sorted(i for output in found for i in output.times) == list(range(8))
    assert [output.cancelled for output in found if output.cancelled] == [{1: found[0].cancelled[1]}]
    assert sorted(i for output in found for i in output.index or ()) == [0, 1, 4, 5, 6, 7]


def test_the_tokens_of_a_turn_that_is_cancelled_are_counted(worker: Worker) -> None:
    run = episode(OneTurn(), turn_tokens=40).setup(worker.context)
    columns, task = {"prompt": ["1"] * 2}, Task(number=1, stage="episode", step=0, groups=(5,), version=0)
    served = worker.shared["engine"].served_version
    drawn: list[int] = []

    def version(*given: Any) -> int:  # asked for once per token
        drawn.append(0)
        if len(drawn) == 4:
            worker.context.cancelled.add(5)
        return int(served(*given))

    worker.shared["engine"].served_version = version
    (output,) = collected(run(columns, task))
    assert output.cancelled == {0: 4}


def test_weights_may_change_within_an_episode_and_the_oldest_decide_its_age(worker: Worker) -> None:
    """Here in the middle of the second turn of both samples."""
    run = episode(Echo()).setup(worker.context)
    backend, columns = worker.shared["engine"], {"prompt": ["1"] * 2}
    served, asked = backend.served_version, Attempts.turn
    turns, drawn = [0], [0]

    async def turn(self: Any, reply: Any) -> Any:
        turns[0] += 1
        return await asked(self, reply)

    def version(*given: Any) -> int:  # asked for once per token
        drawn[0] += turns[0] == 2
        if drawn[0] == 3:
            drawn[0] += 1
            backend.serve(POLICY, shares_of(backend.served_weights(POLICY)), 4)
        return int(served(*given))

    backend.served_version = version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attempts, "turn", turn)
        (output,) = collected(run(columns, Task(number=1, stage="episode", step=4, groups=(5,), version=3)))
    versions: Any = output.columns["token_versions"]
    ends: Any = output.columns["turn_ends"]
    for row, (first, second, _) in zip(versions.rows(), ends.rows(), strict=True):
        of_turns = [set(part.tolist()) - {-1} for part in row.tensor_split([int(first), int(second)])]
        assert of_turns == [{3}, {3, 4}, {4}]
    assert versions_of(versions, (f"{5:08}/0", f"{5:08}/1"))[5].oldest == 3


def test_what_ends_before_its_first_turn_is_no_sample(worker: Worker) -> None:
    slow = episode(Sleeping(5.0), deadlines=replace(FAST, episode_s=0.5))
    assert set(worker.columns(slow, TEXTS[:1])["end"]) == {"lost:open:deadline"}


# Chats.

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] | replace('s','1') | replace('u','2') | replace('t','3') | replace('a','4') }}"
    "{{ m.content }}{% if m.role == 'assistant' %}" + "{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}4{% endif %}"
)


def test_a_chat_is_what_its_template_adds(worker: Worker) -> None:
    stage = episode(Chatty(), chat=True, turns=2)
    stage.setup(worker.context)
    backend = worker.shared["engine"]
    tokenizer = backend.tokenizer(POLICY)
    tokenizer.chat_template = TEMPLATE
    made = worker.columns(stage)
    closed = 0
    for i in range(len(TEXTS) * 2):
        ids, ends = torch.cat([made["prompt_ids"][i], made["response_ids"][i]]), made["turn_ends"][i].tolist()
        messages = json.loads(made["conversation"][i])
        whole = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=False)
        first = ends[0] + len(made["prompt_ids"][i])
        ended = int(ids[first - 1]) == tokenizer.eos_token_id
        closed += ended
        written = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert written.startswith(whole + "3774"), "the tool's answer, and the start of the next turn"
        del ended
    assert closed, "some replies have a closing token, others reached the limit"


def test_a_template_that_changes_earlier_turns_is_refused(worker: Worker) -> None:
    stage = episode(Chatty(), chat=True, turns=3)
    stage.setup(worker.context)
    worker.shared["engine"].tokenizer(POLICY).chat_template = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(StageError, match="the chat template changes what was said: '2"):
        worker.columns(stage)


def test_texts_and_messages_are_not_mixed_up(worker: Worker) -> None:
    with pytest.raises(StageError, match=r"Episode\(..., chat=True\)"):
        worker.columns(episode(Chatty()))


# Faults.


@pytest.mark.parametrize("fault", ["raise", "hang", "exit", "kill", "quit"])
@pytest.mark.parametrize("method", ["open", "turn"])
def test_a_failure_that_does_not_come_again_changes_nothing(fault: str, method: str, tmp_path: Path) -> None:
    found = []
    for once in (False, True):
        worker, mark = Worker(), tmp_path / "failed"
        if not once:
            mark.touch()
        environment = Faulty(fault=fault, method=method, at=1, mark=str(mark), once=True)
        found.append(worker.columns(episode(environment, deadlines=replace(FAST, open_s=4.0, turn_s=4.0))))
        worker.close()
        mark.unlink()
    assert same(*found) and set(found[0]["end"]) == {"answered"}


@pytest.mark.parametrize(
    ("fault", "end"),
    [("raise", "failed:1:OSError"), ("hang", "deadline"), ("exit", "failed:1:died"), ("quit", "failed:1:SystemExit")],
)
def test_a_failure_that_comes_again_at_its_turn_is_the_policys(
    worker: Worker, fault: str, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts._said.clear()
    environment = Faulty(fault=fault, at=1, mark=str(tmp_path / "mark"), of="ab")
    made = worker.columns(episode(environment, deadlines=replace(FAST, turn_s=4.0), environments=4))
    assert made["end"] == ["answered"] * 4 + [end] * 2 + ["answered"] * 2
    assert all(len(made["turn_ends"][i]) == 2 for i in (4, 5)), "what the policy wrote until then is kept"
    kind = end.rpartition(":")[2]
    said = capsys.readouterr().err
    assert said.count(f"an environment has failed twice at turn 1: turn: {kind}: ") == 1
    assert said.count(f"{kind}: ") == 1, "the class of an error is said once"


@pytest.mark.parametrize(
    ("fault", "end"), [("raise", "lost:open:OSError"), ("hang", "lost:open:deadline"), ("kill", "lost:open:died")]
)
def test_what_cannot_be_opened_is_lost(worker: Worker, fault: str, end: str, tmp_path: Path) -> None:
    environment = Faulty(method="open", fault=fault, mark=str(tmp_path / "mark"), of="ab")
    made = worker.columns(episode(environment, deadlines=replace(FAST, open_s=4.0), environments=4))
    assert [made["end"][i] for i in (4, 5)] == [end] * 2 and made["end"].count("answered") >= 4


def test_an_environment_that_answers_otherwise_is_found(worker: Worker, tmp_path: Path) -> None:
    environment = Faulty(fault="differ", at=1, mark=str(tmp_path / "mark"), of="ab", once=True)
    made = worker.columns(episode(environment), ["ab"])
    assert "lost:turn:differed" in made["end"]


@pytest.mark.parametrize(
    ("said", "end"),
    [
        (Saying(""), "answered"),
        (Saying("\x00"), "failed:0:unwritable"),
        (Saying("\ud800"), "failed:0:unsendable"),
        (Saying("1", times=5 << 20), "failed:0:ValueError"),
    ],
    ids=["nothing", "unknown", "surrogate", "large"],
)
def test_what_an_environment_says_may_be_empty_and_must_have_tokens(
    worker: Worker, said: Environment, end: str
) -> None:
    made = worker.columns(episode(said), ["1"])
    assert set(made["end"]) == {end}
    assert {len(ends) for ends in made["turn_ends"]} == ({2} if end == "answered" else {1})


def test_a_character_without_a_token_ends_its_episode(worker: Worker) -> None:
    """Of a text, or of a chat; of what opens it, which is lost, or of an answer. Others go on."""
    made = worker.columns(episode(OneTurn()), ["1", "?", ""])
    assert made["end"] == ["answered"] * 2 + ["lost:open:unwritable"] * 2 + ["lost:open:empty"] * 2
    for text, end in (("7", "turns"), ("?", "failed:0:unwritable")):
        stage = replace(episode(Chatty(text), chat=True, turns=2), model=replace(POLICY, chat_template=TEMPLATE))
        made = worker.columns(stage, ["1", "?"])
        assert made["end"] == [end] * 2 + ["lost:open:unwritable"] * 2


def test_a_prompt_that_the_model_cannot_see_whole_is_lost(worker: Worker) -> None:
    positions = episode(OneTurn()).positions
    made = worker.columns(episode(OneTurn()), ["1" * positions, "1" * (positions - 2)])
    assert made["end"] == ["lost:open:too_long"] * 2 + ["answered"] * 2
    assert all(len(ids) <= 2 for ids in made["response_ids"])


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        *((Lying(value), "TypeError") for value in (None, "x", ("x",))),
        *((Lying(End("answered", reward)), "ValueError") for reward in (float("nan"), 1e39, -(10**400))),
        (Lying(Messages([{"role": "user", "content": "1", "of": 1 << 64}])), "unsendable"),
        (Unreadable(), "UnreadableError"),
    ],
)
def test_what_no_environment_returns_fails(worker: Worker, environment: Environment, kind: str) -> None:
    assert set(worker.columns(episode(environment), TEXTS[:1])["end"]) == {f"failed:0:{kind}"}


def test_what_cannot_be_sent_to_an_environment_is_said_at_once(worker: Worker) -> None:
    """A field of the data opens no episode; what a policy writes is a call that nobody can read."""
    made = worker.columns(episode(OneTurn(), retries=0), ["\ud800"])
    assert set(made["end"]) == {"lost:open:unsendable"}
    arguments = ('{"a": 1000000000000000000000000000000}', '{"a": "\\ud800"}', "[" * 5000)
    texts = [f'<tool_call>{{"name": "f", "arguments": {each}}}</tool_call>' for each in arguments]
    assert [call for text in texts for call in calls_in(text)] == [Call("", None)] * 3
    with pytest.raises(ValueError, match="not a finite number of float32"):
        result_in(f'{{"reward": 1{"0" * 400}}}')
    assert result_in('{"a":' * 5000) == ("answered", 0.0)


def test_each_environment_that_was_opened_is_closed(worker: Worker, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    worker.columns(episode(Faulty(mark=str(mark), once=True)))
    lines = Path(f"{mark}.log").read_text().splitlines()
    opened, closed = (sorted(line.split()[1] for line in lines if line.startswith(word)) for word in ("open", "close"))
    assert opened == closed == sorted(TEXTS * 2)


def test_a_close_that_hangs_ends_at_its_deadline(worker: Worker, tmp_path: Path) -> None:
    environment = Faulty(method="close", fault="hang", mark=str(tmp_path / "mark"), once=True)
    made = worker.columns(episode(environment, deadlines=replace(FAST, close_s=0.5)))
    assert set(made["end"]) == {"answered"}


def test_an_environment_whose_module_is_not_there_says_so(worker: Worker, tmp_path: Path) -> None:
    class Missing(Echo):
        def __reduce__(self) -> Any:
            return (__import__, ("no_module_of_this_name",))

    with pytest.raises(StageError, match="it cannot be loaded in a process of its own: ModuleNotFoundError"):
        worker.columns(episode(Missing()))


def test_processes_end_with_the_one_that_started_them() -> None:
    """Also if that was killed."""
    code = """
import sys, time
from stages.episode.processes import Processes
from tests.unit.environments import Echo
made = Processes(Echo(), count=2, log=None)
print(*(made.place()._process.pid for _ in range(2)), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert all(is_running(pid) for pid in pids)
        time.sleep(1.0)
        os.kill(owner.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 10.0
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_a_place_is_the_one_with_the_fewest_episodes() -> None:
    made = Processes(Echo(), count=2, log=None)
    try:
        one = made.place()
        one.episodes.add(1)
        two = made.place()
        two.episodes |= {2, 3}
        assert one is not two and made.place() is one
        one.kill()
        assert made.place() not in (one, two)
    finally:
        made.close()


def test_what_an_episode_waits_for_is_not_called_once_it_is_closed() -> None:
    made = Processes(Echo(sleep_s=0.2), count=1, log=None)
    place, row, replied = made.place(), {"prompt": "1"}, Reply("1")

    async def run() -> bool:
        for one in (1, 2):
            await place.ask("open", one, 20.0, row=row, seed=(4,))
        first, second = (place.start("turn", one, 20.0, reply=replied) for one in (1, 2))
        place.start("close", 2, 20.0)
        await place.ask("open", 3, 20.0, row=row, seed=(4,))
        return first.done() and not second.done()

    try:
        assert asyncio.run(run())
    finally:
        made.close()


class OnePlace:
    """Where no environment ever closes."""

    closes = True

    def __init__(self) -> None:
        self.episodes: set[int] = set()
        self.killed = False

    def number(self) -> int:
        return 7

    def place(self) -> Any:
        return self

    fresh = place

    async def ask(self, method: str, *given: Any, **named: Any) -> HostAnswer:
        if method == "close":
            await asyncio.sleep(60.0)
        if method == "open" and not self.killed:
            self.killed = True
            raise EnvironmentFailedError("open", "died")
        return HostAnswer(number=0, said="1")

    def start(self, *given: Any, **named: Any) -> None:
        self.killed = True

    def kill(self) -> None:
        self.killed = True


def test_an_episode_that_is_given_up_while_it_closes_leaves_nothing() -> None:
    place = OnePlace()

    async def run() -> None:
        attempts = Attempts(place, {}, (0,), FAST, 1)
        await attempts.open()
        assert place.episodes == {7} and attempts.retried == 1
        place.killed = False
        closing = asyncio.ensure_future(attempts.close())
        await asyncio.sleep(0.01)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)

    asyncio.run(run())
    assert place.episodes == set() and place.killed


# Whole runs.


def run_graph(environment: Environment, *, steps: int = 2, k: int = 0, **settings: Any) -> Graph:
    """The tiny graph with episodes in the place of its rollout."""
    graph = tiny_graph.graph(steps=steps)
    policy = replace(graph.stages[0].model, alphabet="0123456789abcr>")
    sampler, learner = graph.stages[0].on, graph.stages[4].on
    given = {"turns": 3, "tokens": 30, "turn_tokens": 4, "environments": 2, "deadlines": FAST}
    return replace(
        graph,
        stages=(
            Episode(policy, environment, on=sampler, samples_per_prompt=2, **given | settings),
            Filter("complete"),
            Reward(height),
            Advantage("group_relative"),
            Train(policy, on=learner, loss=ClippedLoss(), lr=1e-2, prev="own"),
            Refit(policy, source=learner, target=sampler),
        ),
        schedule=Schedule(steps=steps, max_staleness=k, checkpoint_every=1),
    )


def height(response: str) -> float:
    """A reward that differs within each group."""
    return float(sum(map(ord, response)))


def execute(folder: Path, graph: Graph, executor: Any = None, start: int = 0) -> list[Any]:
    """The events of a run."""
    run_dir = RunDir(folder).create()
    planned = plan(graph)[0]
    run_dir.plan.write_bytes(msgspec.json.encode(planned))  # with it, the record is checked
    Driver(graph, planned, executor or LocalExecutor(), run_dir=run_dir, start=start).execute()
    return [event for _, event in trace.read(folder / "events.jsonl")]


def published(events: list[Any]) -> list[str]:
    return [event.sha256 for event in events if isinstance(event, trace.Published)]


@dataclass(frozen=True)
class Length(Stage):
    """Counts tokens."""

    reads = (RESPONSE_IDS,)
    writes = (Field("tokens", dtype="float32"),)
    per = "group"

    def setup(self, context: StageContext) -> Any:
        return lambda columns, task: {
            "tokens": torch.tensor([float(length) for length in columns["response_ids"].lengths])
        }


@dataclass(frozen=True)
class DrawnLength(Length):
    """Counts those that the policy drew."""

    reads = (RESPONSE_IDS, TOKEN_VERSIONS)


def test_a_stage_that_takes_all_tokens_for_the_policys_is_refused() -> None:
    graph = run_graph(Echo())
    plan(replace(graph, stages=(*graph.stages, DrawnLength())))
    with pytest.raises(GraphError, match="stage 'length' reads 'response_ids' and not 'token_versions'"):
        plan(replace(graph, stages=(*graph.stages, Length())))


def test_a_run_with_lost_episodes_trains_the_others(tmp_path: Path) -> None:
    """The groups of four prompts are lost; others take their place. Nothing that was lost is trained."""
    environment = Faulty(method="open", mark=str(tmp_path / "mark"), of="r1")
    events = execute(tmp_path / "run", run_graph(environment, steps=3, retries=0))
    dropped = [event for event in events if isinstance(event, trace.Dropped)]
    lost = {group for event in dropped for group in event.groups}
    assert lost and {event.reason for event in dropped} == {"lost:open:OSError"}
    trained = [event for event in events if isinstance(event, trace.Trained)]
    assert trained and not lost & {group for event in trained for group in event.groups}
    spent = [event for event in events if isinstance(event, trace.Spent)]
    puts = [event for event in events if isinstance(event, trace.Put) and event.stage == "episode"]
    of_spent, of_puts = (sorted(group for event in each for group in event.groups) for each in (spent, puts))
    assert of_spent == of_puts
    ran = {event.task: event for event in events if isinstance(event, trace.Ran)}
    assert all(ran[one.task].start_s <= one.start_s and one.end_s <= ran[one.task].end_s for one in spent)
    assert {len(event.samples) for event in spent} == {2}


def test_an_evaluation_leaves_lost_episodes_out(worker: Worker, tmp_path: Path) -> None:
    """Its times are recorded, as of one group, and what its environments hold up is time of its worker."""
    graph = run_graph(Echo(), steps=1)
    trained: Any = graph.stages[0]
    faulty = Faulty(method="open", mark=str(tmp_path / "mark"), of="r1", sleep_s=0.02)
    held_out = replace(trained, environment=faulty, retries=0)
    policy, task, sampler = trained.model, Generated("reverse", digits=2, held_out=20), trained.on
    stage = Evaluate(policy, task, on=sampler, episode=held_out, reward=height, every=1, lost=0.9)
    graph = replace(graph, stages=(*graph.stages, stage))
    events = execute(tmp_path / "run", graph)
    lost = [i for i, (prompt, _) in enumerate(task.held_out_pairs(20)) if prompt.startswith("r1")]
    ended = [event.metrics for event in events if isinstance(event, trace.StepEnded)]
    assert len(ended) == 2 and 0 < len(lost) < 20
    for found in ended:
        assert found["eval/end_lost"] == len(lost) / 20 and found["eval/end_answered"] == 1 - len(lost) / 20
        assert found["eval/count"] == 20 - len(lost) and found["eval/height"] > 0 < found["eval/length_mean"]
    tasks = Tasks(events)
    spent = [event for each in tasks.spent.values() for event in each if event.stage == "evaluate"]
    assert [(event.groups, len(event.samples), event.group) for event in spent] == [((), 20, "sampler")] * 2
    assert all(waits_by_task(tasks)[event.task] for event in spent)
    found = gaps(plan(graph)[0], tasks, spent[0].start_s, spent[-1].end_s)
    assert {gap.stage for gap in found if gap.cause == "environment"} >= {"evaluate"}
    always = replace(faulty, of="")
    for environment, most, count in ((faulty, 0.0, 1), (always, 0.2, 5), (always, 1.0, 20)):
        run = replace(stage, lost=most, episode=replace(held_out, environment=environment)).setup(worker.context)
        with pytest.raises(StageError, match=f"has lost {count} of its 20 episodes, {count} of them as lost:open:OSE"):
            run({}, Task(stage="evaluate", step=0))
    run = replace(stage, prompts=2, episode=replace(held_out, environment=always)).setup(worker.context)
    with pytest.raises(StageError, match="has lost 2 of its 2 episodes"):
        run({}, Task(stage="evaluate", step=0))


def test_an_evaluation_gives_its_environment_the_columns_and_its_reward_the_end(worker: Worker, tmp_path: Path) -> None:
    seen = []

    def ended(answer: str, end: str, turn_rewards: Sequence[float], conversation: str, level: int) -> float:
        seen.append((answer, end, turn_rewards, json.loads(conversation)[0], level))
        return 1.0

    graph = run_graph(Echo(), steps=1)
    trained: Any = graph.stages[0]
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "r1>", "answer": "a", "level": 4}\n{"prompt": "r2>", "answer": "b", "level": 5}\n')
    episode = replace(trained, environment=Telling(), turns=1)
    stage = Evaluate(trained.model, path, on=trained.on, episode=episode, reward=ended, extra="level")
    assert [*stage.check(graph)] == []
    stage.setup(worker.context)({}, Task(stage="evaluate", step=0))
    assert [(one[0], one[1], one[4]) for one in seen] == [("a", "a5", 4), ("b", "b6", 5)]
    assert [one[2] for one in seen] == [[0.0], [0.0]]


def test_a_run_that_loses_too_much_ends(tmp_path: Path) -> None:
    environment = Faulty(method="open", mark=str(tmp_path / "mark"))
    with pytest.raises(StageError, match=r"groups sampled for step 1 since something failed: \d \(lost:open:OSError"):
        execute(tmp_path / "run", run_graph(environment, retries=0))


@pytest.mark.journal_expected("I8")  # continues in another folder, with the checkpoint but not the record
def test_a_resumed_run_is_the_whole_one(tmp_path: Path) -> None:
    whole = execute(tmp_path / "whole", run_graph(Echo(), steps=3))
    again = RunDir(tmp_path / "again").create()
    shutil.copytree(RunDir(tmp_path / "whole").checkpoint(1), again.checkpoint(1))
    rest = execute(again.path, run_graph(Echo(), steps=3), start=1)
    assert published(rest) == published(whole)[1:]


def test_the_same_run_is_the_same_bits(tmp_path: Path) -> None:
    runs = [execute(tmp_path / str(n), run_graph(Echo(sleep_s=0.02 * n))) for n in range(2)]
    assert published(runs[0]) == published(runs[1]) and len(published(runs[0])) == 3


def any_number(self: Any, *given: Any) -> End:
    return End()


def with_defaults(self: Any, state: Any, reply: Any = None, more: Any = None) -> End:
    return End()


def without_state(self: Any, reply: Any) -> End:
    return End()


def by_name(self: Any, *, state: Any, reply: Any) -> End:
    return End()


@pytest.mark.parametrize(
    ("turn", "is_called"),
    [(any_number, True), (with_defaults, True), (staticmethod(divmod), True), (staticmethod(print), True),
     (without_state, False), (by_name, False), (without_state(None, None), False)],
)  # fmt: skip
def test_an_environment_can_be_called_as_it_will_be(turn: Any, is_called: bool) -> None:
    environment = type("Asked", (OneTurn,), {"turn": turn})()
    found = [problem.what for problem in episode(environment)._environment_problems("", "")]
    refused = "the environment Asked has a turn() that does not take (state, reply)"
    assert found == ([] if is_called else [refused])
