"""Open doors: a user's file, outside the repository, adds a loss and a correction. The code is that of the docs."""

import json

import pytest

from tests.doors import command, page_code, write

TOP = """from dataclasses import dataclass, replace
from graphs import quickstart
from pipeline import Graph
from stages import ClippedLoss, Correction, PolicyLoss, Scored, Train

def graph(steps: int = 2) -> Graph:
    made = quickstart.graph(steps=steps)
    stages = [replace(stage, loss=LOSS) if isinstance(stage, Train) else stage for stage in made.stages]
    return replace(made, stages=tuple(stages))

"""


def test_the_loss_and_the_correction_of_the_docs_train(tmp_path):
    file = write(tmp_path, page_code("your-own-loss.md"))
    done = command(file, "--executor", "local", "--steps", "3", "--run-dir", "run", "--plain")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["train/clip_fraction"] == 0 for line in lines), "it has no clip"
    assert all(line["train/is_changed"] == 0 and line["train/is_weight"] > 0.9 for line in lines), [
        line["train/is_weight"] for line in lines
    ]
    assert lines[-1]["train/grad_norm"] > 0


LOSS = "class Mine(PolicyLoss):\n    {}\nLOSS = Mine()\n"
FORMULA = "def policy_loss(self, scored): return {}"
WEIGHTS = "class Mine(Correction):\n    {}\nLOSS = ClippedLoss(correction=Mine())\n"
BROKEN = {  # what it is, and what the check says
    "no_formula": (LOSS.format("pass"), "Mine does not define policy_loss()"),
    "no_weights": (WEIGHTS.format("pass"), "Mine does not define weights()"),
    "raises": (LOSS.format(FORMULA.format("scored.logits")), "raised AttributeError: 'Scored' object has no attribute"),
    "shape": (
        LOSS.format(FORMULA.format("scored.logprobs_NT.sum()")),
        "Mine returns a tensor of shape [] for columns of shape [2, 2]",
    ),
    "no_gradient": (LOSS.format(FORMULA.format("-scored.logprobs_NT.detach()")), "Mine has no gradient"),
    "not_finite": (LOSS.format(FORMULA.format("(scored.logprobs_NT * 0 - 1).log()")), "Mine is nan for finite columns"),
    "padding": (
        LOSS.format(
            "masks_padding = True\n    "
            + FORMULA.format("scored.logprobs_NT * scored.logprobs_NT.detach().sum(-1, keepdim=True)")
        ),
        "Mine changes with what padding holds",
    ),
    "weights_alone": (
        WEIGHTS.format("def weights(self, scored): return scored.mask_NT.float()"),
        "Mine returns a tensor of shape [2, 2] from weights(), not a pair",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_formula_that_cannot_train_is_refused_before_anything_starts(name, tmp_path, monkeypatch, capsys):
    from pipeline.run import main

    code, says = BROKEN[name]
    file = write(tmp_path, TOP + code, f"{name}.py")
    assert main([str(file), "--check"]) == 2
    told = capsys.readouterr().err
    assert says in told and f"{file.name}:8" in told, told
