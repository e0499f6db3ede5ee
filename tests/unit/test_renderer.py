"""Chats that the library renderers writes: the tokens of the chat template where that changes no earlier turn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import Model, StageError
from stages import End, Endpoint, Environment, Episode, Messages, Reply, Tool
from stages.backends.model.build import byte_tokenizer
from stages.backends.model.text import Tokenizers
from stages.episode.conversation import Conversations
from stages.episode.renderer import ChatRenderer
from tests.integration.test_foreign_clients import Spied
from tests.optional import need
from tests.unit.test_endpoint import command
from tests.unit.test_episode import FAST, SAMPLER, Worker, execute, published, run_graph
from tests.unit.tiny import QWEN3

need("renderers", "renderers")
TEMPLATES = Path(need("trl", "trl").__file__).parent / "chat_templates"
CLOSE = "<|im_end|>"
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TOOLS = (Tool("add", {"a": int}),)
SAID = [{"role": "system", "content": "brief"}, {"role": "user", "content": "1 + 1 ✓?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER, TOOL = {"role": "user", "content": "and 2?"}, {"role": "tool", "content": "4"}


def tokenizer(template: str = "qwen3") -> Any:
    """Bytes, and the special tokens and template of Qwen3."""
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", CLOSE]})
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    made.eos_token = CLOSE
    made.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with this tokenizer."""
    made, place = tokenizer(), tmp_path_factory.mktemp("qwen3")
    given = {**QWEN3, "vocab_size": len(made), "max_position_embeddings": 1024, "eos_token_id": made.eos_token_id}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**given)).save_pretrained(place)
    made.save_pretrained(place)
    return place


def conversations(folder: Path, template: str, renderer: str | None) -> tuple[Conversations, Any]:
    backend, model = Tokenizers(), Model(str(folder))
    backend.tokenizer(model).chat_template = tokenizer(template).chat_template
    return Conversations(backend, model, chat=True, tools=TOOLS, renderer=renderer), backend.tokenizer(model)


def written(folder: Path, template: str, renderer: str | None, reply: str, said: list[Any]) -> tuple[list[int], Any]:
    """The tokens of a prompt, and those that follow a reply; None if there is no way on."""
    made, of = conversations(folder, template, renderer)
    so_far, prompt = made.begin(SAID)
    ids = torch.tensor(of(reply, add_special_tokens=False).input_ids)
    made.reply(so_far, ids, truncated=not reply.endswith(CLOSE))
    added = made.answer(so_far, ids, said)
    return prompt.tolist(), None if added is None else added.tolist()


@pytest.mark.parametrize(
    ("template", "reply", "said"),
    [
        ("qwen3", f"two{CLOSE}", [USER]),
        ("qwen3", f"<think>\nhm\n</think>\n\n{CALL}{CLOSE}", [TOOL]),
        ("qwen3", "<think>\nhm\n</think>\n\ncut", [TOOL, TOOL]),
        ("qwen3_training", f"<think>\nhm\n</think>\n\ntwo{CLOSE}", [TOOL, USER]),
        ("qwen3_training", "<think>\nhm\n</think>\n\ncut", [USER]),
    ],
)
def test_it_writes_what_a_template_writes_that_keeps_earlier_turns(
    folder: Path, template: str, reply: str, said: list[Any]
) -> None:
    assert written(folder, template, "qwen3", reply, said) == written(folder, template, None, reply, said)


def test_it_goes_on_where_the_template_drops_earlier_thoughts(folder: Path) -> None:
    reply = f"<think>\nhm\n</think>\n\ntwo{CLOSE}"
    with pytest.raises(StageError, match="the chat template changes what was said"):
        written(folder, "qwen3", None, reply, [USER])
    _, added = written(folder, "qwen3", "qwen3", reply, [USER])
    assert tokenizer().decode(added) == f"\n<|im_start|>user\nand 2?{CLOSE}\n<|im_start|>assistant\n"


class Thrice(Environment):
    """Says two messages, and ends."""

    def open(self, row: Any, draw: Random) -> Any:
        return [], [{"role": "user", "content": row["prompt"]}]

    def turn(self, state: Any, reply: Reply) -> Messages | End:
        state.append(reply.text)
        return End() if len(state) == 3 else Messages([USER if len(state) == 1 else TOOL])


def test_what_was_drawn_is_trained_and_what_follows_is_written_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that draws anything: thoughts that never end, half a call, the marks of turns."""
    worker, seen, added = Worker(), [], ChatRenderer.added

    def spied(renderer: ChatRenderer, before: list[int], drawn: list[int], *said: Any) -> Any:
        seen.append([*before, *drawn])
        return added(renderer, before, drawn, *said)

    monkeypatch.setattr(ChatRenderer, "added", spied)
    stage = Episode(
        Model(str(folder)), Thrice(), on=SAMPLER, samples_per_prompt=2, chat=True, renderer="qwen3",
        turns=4, tokens=400, turn_tokens=40, temperature=2.0, environments=1, deadlines=FAST, retries=1,
    )  # fmt: skip
    try:
        made = worker.columns(stage)
    finally:
        worker.close()
    of = tokenizer()
    follows = [
        f"\n<|im_start|>user\n{USER['content']}",
        f"\n<|im_start|>user\n<tool_response>\n{TOOL['content']}\n</tool_response>",
    ]
    kinds = set()
    for prompt, ids, versions, ends, end in zip(
        made["prompt_ids"], made["response_ids"], made["token_versions"], made["turn_ends"], made["end"], strict=True
    ):
        kinds.add(end.partition(":")[0])
        assert of.decode(prompt).endswith(f"{CLOSE}\n<|im_start|>assistant\n")
        places, start = ends.tolist(), 0
        for turn, place in enumerate(places):
            assert (versions[start:place] >= 0).all(), "the turn"
            assert turn == 2 or [*prompt.tolist(), *ids[:place].tolist()] in seen, "what it is written after"
            after = (versions[place:] >= 0).tolist()
            start = place + (after.index(True) if True in after else len(after))
            if start == place:
                continue
            closed = of.decode(ids[:place]).endswith((CLOSE, "<|endoftext|>"))
            text = of.decode(ids[place:start]).removeprefix("</think>")
            assert text == ("" if closed else CLOSE) + follows[turn] + f"{CLOSE}\n<|im_start|>assistant\n"
    assert kinds == {"answered", "failed"}, "some reply had no way on"


def test_a_run_trains_what_was_drawn(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spied, graph, policy = Spied(monkeypatch), run_graph(Thrice(), steps=3), Model(str(folder))
    given = {"turns": 4, "tokens": 400, "turn_tokens": 20, "environments": 1, "deadlines": FAST}
    first = Episode(policy, Thrice(), on=graph.stages[0].on, samples_per_prompt=2, chat=True, renderer="qwen3", **given)
    rest = [replace(one, model=policy) if hasattr(one, "model") else one for one in graph.stages[1:]]
    assert len(published(execute(tmp_path / "run", replace(graph, stages=(first, *rest))))) == 4
    assert spied.drawn == spied.trained and max(map(len, spied.trained.values())) == 3


def test_it_writes_for_a_program_that_talks_to_an_endpoint(folder: Path) -> None:
    """Which gets the thoughts as text, and sends them back."""
    worker = Worker()
    stage = Endpoint(
        Model(str(folder)), command=command("talk"), on=SAMPLER, samples_per_prompt=2, renderer="qwen3",
        turns=4, tokens=400, turn_tokens=6, commands=2, deadlines=FAST, retries=1,
    )  # fmt: skip
    try:
        made = worker.columns(stage, ["1"])
    finally:
        worker.close()
    assert set(made["end"]) == {"done"}
    for ids, versions in zip(made["response_ids"], made["token_versions"], strict=True):
        said = tokenizer().decode(ids[versions < 0])
        assert said.count("\n<|im_start|>user\n") == said.count(f"{CLOSE}\n<|im_start|>assistant\n") == 2


@pytest.mark.parametrize(
    ("family", "said", "text"),
    [
        ("qwen3", [{"role": "assistant", "content": "1"}], "a message of the role 'assistant'"),
        ("nosuch", [], "No renderer config registered"),
        ("default", [], "stands for no family"),
        ("glm-4.5", [], "glm-4.5"),
    ],
)
def test_what_it_cannot_write_is_refused(family: str, said: list[Any], text: str) -> None:
    with pytest.raises(StageError, match=text):
        ChatRenderer(family, tokenizer(), "graph.py:3").added([1], [2], said, ())


def test_without_the_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(StageError, match=r"pip install 'sluice-rl\[renderers\]'"):
        ChatRenderer("qwen3", tokenizer(), "graph.py:3")


@pytest.mark.parametrize("reply", [f"<think>\nhm{CLOSE}", "one<|endoftext|>two"])
def test_a_reply_without_a_way_on(folder: Path, reply: str) -> None:
    assert written(folder, "qwen3", "qwen3", reply, [USER])[1] is None
