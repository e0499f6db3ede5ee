"""Prompts with images: from rows of a data set to what the torch backend samples, scores and trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import Model, StageError
from pipeline.declare.columns import Ragged
from pipeline.declare.sharding import Packed, Plain, Sharding
from stages import ClippedLoss
from stages.backends import Batch, Draws, Optimization, Sampling, one_shard
from stages.backends.model.weights import weights
from stages.backends.torch.engine import TorchEngine
from stages.images import files_of, framed
from stages.prompts import Prompts
from tests import images
from tests.doors import forgotten, metrics, snippet, user_folder
from tests.errors.harness import command
from tests.optional import need
from tests.unit.test_prompts import draw, problem, problems, write

need("vision", "PIL")
torch.set_num_threads(1)
NEAR = 1e-4
WORDS = Ragged(torch.tensor([5, 3, 9, 7, 8, 9, 10, 4, 3]), (4, 2, 3))


@pytest.fixture(scope="module", params=images.CONFIGS)
def seeing(request: pytest.FixtureRequest) -> tuple[TorchEngine, Model, Any]:
    """An engine, a tiny model and its network, which sampler and trainer share."""
    engine, model = TorchEngine(torch.device("cpu"), torch.float32), images.tiny(request.param)
    network: Any = engine.network(model, "trained")
    images.sharpen(network)
    engine._networks[model, "served"] = network
    return engine, model, network


def prompts(engine: TorchEngine, model: Model) -> tuple[Ragged, Ragged]:
    """Return the tokens of the prompts, and their images."""
    column = images.column()
    return engine.encode(model, images.TEXTS, images=column), column


def alone(seeing: tuple[TorchEngine, Model, Any], prompt_ids: Ragged, column: Ragged) -> list[torch.Tensor]:
    """Return the logprobs of `WORDS` from transformers' own forward pass of each sample alone."""
    engine, model, network = seeing
    wanted, token = [], engine.vision(model).image_token
    for prompt, response, frame in zip(prompt_ids.rows(), WORDS.rows(), column.rows()):
        ids, given = torch.cat([prompt, response])[None], {}
        if files := files_of(frame.numpy().tobytes()):
            pictures = engine.vision(model).pictures(framed(files))
            given = {"pixel_values": pictures.patches_QD, "image_grid_thw": pictures.grids_I3}
            given["mm_token_type_ids"] = (ids == token).int()
        with torch.no_grad():
            logits_TV = network(input_ids=ids, **given).logits[0, len(prompt) - 1 : -1]
        network.model.rope_deltas = None
        wanted.append(logits_TV.log_softmax(-1).gather(-1, response[:, None])[:, 0])
    return wanted


def test_files_are_framed_and_found_again() -> None:
    for files in ([], [b""], [b"a", b"", b"bcd"]):
        assert files_of(framed(files)) == files
    for broken in (b"", b"\0", framed([b"abc"])[:-1], framed([b"abc"]) + b"d"):
        with pytest.raises(ValueError, match="frame"):
            files_of(broken)


def test_rows_have_an_image_several_or_none(tmp_path: Path) -> None:
    files = {name: images.png(i, 16, 16) for i, name in enumerate(("a.png", "b.png"))}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    rows = [
        {"prompt": f"q{i}", "answer": "", "seen": seen} for i, seen in enumerate(("a.png", ["b.png", "a.png"], None))
    ]
    stage = Prompts(write(tmp_path / "d.jsonl", rows), images="seen", shuffle=False)
    assert problems(stage) == [] and [field.name for field in stage.writes] == ["prompt", "answer", "images"]
    found = draw(stage, [0, 1, 2], group_size=2)["images"]
    of_row = [files_of(row.numpy().tobytes()) for row in found.rows()]
    assert of_row[::2] == of_row[1::2] == [[files["a.png"]], [files["b.png"], files["a.png"]], []]


def test_a_missing_file_is_named_with_its_row_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(images.png(0, 16, 16))
    rows = [{"prompt": f"q{i}", "answer": "", "images": ["a.png" if i < 20 else "b.png"]} for i in range(21)]
    stage = Prompts(write(tmp_path / "d.jsonl", rows), images="images")
    assert problems(stage) == []  # reads the first rows only
    with pytest.raises(StageError, match=r"d.jsonl:21: column 'images' names the missing file 'b.png'"):
        draw(stage, [0])
    assert (
        "names the missing file 'b.png'"
        in problem(Prompts(write(tmp_path / "e.jsonl", rows[20:]), images="images")).what
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"junk!", "whose 5 bytes are no image"), (images.png(0, 16, 16)[:-20], "which is damaged: ")],
)
def test_a_file_that_is_no_image_is_named_with_its_row(tmp_path: Path, content: bytes, reason: str) -> None:
    """By the check, of the first rows; or else when its row is drawn."""
    (tmp_path / "a.png").write_bytes(images.png(0, 16, 16))
    (tmp_path / "b.png").write_bytes(content)
    rows = [{"prompt": f"q{i}", "answer": "", "images": ["a.png", "a.png" if i < 20 else "b.png"]} for i in range(21)]
    stage = Prompts(write(tmp_path / "d.jsonl", rows), images="images", shuffle=False)
    assert problems(stage) == [] and draw(stage, range(20))
    with pytest.raises(StageError, match=rf"d.jsonl:21: column 'images' has 'b.png', {reason}"):
        draw(stage, [20])
    assert reason in problem(Prompts(write(tmp_path / "e.jsonl", rows[20:]), images="images")).what


def test_tokens_of_images_are_where_the_prompt_has_them(seeing: tuple[TorchEngine, Model, Any]) -> None:
    engine, model, _ = seeing
    prompt_ids, column = prompts(engine, model)
    tokenizer, vision = engine.tokenizer(model), engine.vision(model)
    first, second, third = (tokenizer.convert_ids_to_tokens(row.tolist()) for row in prompt_ids.rows())
    image = ["<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>"]  # 48 x 32 in squares of 16
    assert first == [*image, *"what is 7?"] and third == list("plain")
    assert [token if len(token) == 1 else token[2:-2] for token in second if "pad" not in token] == [
        "a", "vision_start", "vision_end", "b", "vision_start", "vision_end", "c",
    ]  # fmt: skip
    pictures = engine.pictures(model, column)
    assert pictures is not None
    assert [*vision.runs(prompt_ids.rows()[1].tolist(), pictures[1])] == [(2, 2), (7, 4)]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for before, last, text in (("b", "a", "b<image>a"), ("<image>b", "a", "<image>ba")):
        chat = json.dumps([{"role": "user", "content": before}, {"role": "user", "content": last}])
        of_chat = engine.encode(model, [chat], chat=True, images=images.column([[(48, 32)]]))
        assert of_chat.values.equal(engine.encode(model, [text], images=images.column([[(48, 32)]])).values)
    with pytest.raises(StageError, match="1 place for images and 2 images"):
        engine.encode(model, ["a<image>"], images=images.column([[(16, 16), (16, 16)]]))
    with pytest.raises(StageError, match="image 0 of a prompt, of 4 bytes: it cannot be read"):
        engine.encode(
            model, ["a"], images=Ragged.of([torch.frombuffer(bytearray(framed([b"text"])), dtype=torch.uint8)])
        )


def test_scores_are_those_of_transformers_in_rectangles_and_in_packed_rows(
    seeing: tuple[TorchEngine, Model, Any],
) -> None:
    engine, model, _ = seeing
    prompt_ids, column = prompts(engine, model)
    wanted = torch.cat(alone(seeing, prompt_ids, column))
    for cut in (Plain(), Plain(1), Packed(64)):
        shard = one_shard(prompt_ids, WORDS, Sharding.of(cut))
        scored = engine.score(model, prompt_ids, WORDS, shard, temperature=1.0, images=column)
        torch.testing.assert_close(scored.values, wanted, atol=NEAR, rtol=0)


def test_samples_have_the_logprobs_of_the_trainer_also_with_tokens_of_images(
    seeing: tuple[TorchEngine, Model, Any],
) -> None:
    """A random model samples the token of an image, which is then no image."""
    engine, model, _ = seeing
    prompt_ids, column = prompts(engine, model)
    made = engine.generate(model, prompt_ids, Sampling(max_tokens=40), Draws(3, (0, 1, 2), (0, 0, 0)), images=column)
    token = engine.vision(model).image_token
    forced = made.response_ids.values.clone()
    forced[1] = token
    for responses, logprobs in (
        (made.response_ids, made.logprobs.values),
        (Ragged(forced, made.response_ids.lengths), None),
    ):
        for cut in (Plain(), Packed(96)):
            shard = one_shard(prompt_ids, responses, Sharding.of(cut))
            scored = engine.score(model, prompt_ids, responses, shard, temperature=1.0, images=column)
            logprobs = scored.values if logprobs is None else logprobs
            torch.testing.assert_close(scored.values, logprobs, atol=NEAR, rtol=0)


def updated(
    seeing: tuple[TorchEngine, Model, Any], samples: list[int]
) -> tuple[set[str], dict[str, torch.Tensor | None]]:
    """Return the names that an update of these samples changes, and the gradients of a pass over them."""
    engine, model, network = seeing
    prompt_ids, column = prompts(engine, model)
    old = Ragged(torch.full((9,), -2.3), WORDS.lengths)
    batch = Batch(prompt_ids, WORDS, torch.tensor([1.0, -1.0, 0.5]), old, old, images=column).at(samples)
    learner = engine._new_learner(model, Optimization(lr=1e-3))
    gradients: dict[str, torch.Tensor | None] = {}
    step = learner._step

    def kept(*given: Any) -> None:
        gradients.update({name: parameter.grad for name, parameter in network.named_parameters()})
        step(*given)

    learner._step = kept  # type: ignore[method-assign]
    before = weights(network)
    (update,) = one_shard(batch.prompt_ids, batch.response_ids).updates
    learner.update(batch, ClippedLoss(), temperature=1.0, update=update)
    after = weights(network)
    return {name for name in after if not torch.equal(after[name], before[name])}, gradients


def test_an_update_trains_what_sees_and_without_images_gives_it_gradients_of_zero(
    seeing: tuple[TorchEngine, Model, Any],
) -> None:
    """All ranks have the same gradients to sum, whichever of them has images."""
    seen, _ = updated(seeing, [0, 1, 2])
    assert {name.split(".")[1] for name in seen if name.startswith("model.")} == {"visual", "language_model"}
    plain, gradients = updated(seeing, [2])
    assert not [name for name in plain if ".visual." in name] and plain
    towers = [gradient for name, gradient in gradients.items() if ".visual." in name]
    assert len(towers) > 20 and all(each is not None and not each.any() for each in towers)


def run(folder: Path, steps: int, *changes: tuple[str, str]) -> list[dict[str, Any]]:
    """Run the graph of the page, with pieces of text replaced. Returns the metrics of each step."""
    text = snippet("vision.md", 1)
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    user_folder(folder, {"colors.py": text})
    with forgotten(folder):
        namespace: dict[str, Any] = {"__name__": "colors"}
        exec(text, namespace)
        namespace["make"](folder / "colors")
        flags = ("--steps", str(steps), "--executor", "local", "--run-dir", "RUN", "--plain")
        code, _, err = command(folder, "colors.py", *flags)
    assert code == 0, err
    return metrics(folder / "RUN")


def test_the_graph_of_the_page_learns_from_images(tmp_path: Path) -> None:
    found = run(tmp_path, 24)
    rewards = [line["reward/mean"] for line in found]
    assert max(rewards[:5]) < 0.3 and min(rewards[-3:]) > 0.5
    assert found[-1]["eval/exact_match"] > 0.5 and found[-1]["eval/count"] == 16


def test_samples_after_the_first_update_are_scored_with_their_images(tmp_path: Path) -> None:
    """Logprobs of the updates' own pass, in packed rows, and of a stage give the same updates."""
    folders = [tmp_path / name for name in ("stage", "own")]
    for folder in folders:
        folder.mkdir()
    by_stage = run(folders[0], 2, ("lr=3e-3", "lr=3e-3, minibatches=2"))
    own = run(
        folders[1],
        2,
        ("import Advantage", "import Packed, Advantage"),
        ("            PrevLogprobs(policy, on=learner),\n", ""),
        ("lr=3e-3", 'lr=3e-3, minibatches=2, prev="own", microbatch=Packed(96)'),
    )
    for name in ("train/loss", "train/grad_norm", "train/ratio_max"):
        assert [line[name] for line in own] == pytest.approx([line[name] for line in by_stage], abs=1e-4)
