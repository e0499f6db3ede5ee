"""A user's own loss and correction in a folder outside the repository: checked, and run with the quickstart."""

import pytest

from tests.doors import FEW_STEPS, forgotten, metrics, quickstart, snippet, user_folder
from tests.errors.harness import command

OURS = "ClippedLoss(correction=TruncatedIS(cap=2.0) if max_staleness else None)"
PAGE = snippet("your-own-loss.md")
BY_AGE = snippet("your-own-loss.md", 1)
TRAINED = [
    ("TrustRegion()", {"train/clip_fraction": 0.0}),
    ("ClippedLoss(correction=Fading())", {"train/is_changed": 0.0}),
    ("TrustRegion(penalty=0.2, correction=Fading(strength=2.0))", {"train/is_changed": 0.0}),
]
FURTHER = '''"""A correction that reads a further column, one value per token, and a loss that reads one per sample."""
from dataclasses import dataclass

from stages import Correction, PolicyLoss
from stages.vocabulary import TOKEN_VERSIONS, TRUNCATED


@dataclass(frozen=True, kw_only=True)
class ByAge(Correction):
    reads = (TOKEN_VERSIONS,)

    def weights(self, scored):
        versions_NT = scored.columns["token_versions"]
        assert versions_NT.shape == scored.mask_NT.shape
        return 0.5 + 0.0 * versions_NT, versions_NT >= 0


@dataclass(frozen=True, kw_only=True)
class Whole(PolicyLoss):
    reads = (TRUNCATED,)

    def policy_loss(self, scored, weight_NT):
        kept_N = (~scored.columns["truncated"]).float()
        return -weight_NT * (kept_N * scored.advantage_N)[:, None] * scored.logprobs_NT
'''


def run(folder, *args):
    with forgotten(folder):
        return command(folder, "graph.py", *args)


def with_loss(folder, loss, module=PAGE, names="Fading, TrustRegion"):
    graph = quickstart(f"from losses import {names}", (OURS, loss))
    return user_folder(folder, {"losses.py": module, "graph.py": graph})


@pytest.mark.parametrize(("loss", "expected"), TRAINED)
def test_the_loss_and_the_correction_of_the_page_train(tmp_path, loss, expected):
    folder = with_loss(tmp_path, loss)
    assert run(folder, "--check")[0] == 0
    code, _, err = run(folder, *FEW_STEPS, "--executor", "local", "--run-dir", "RUN", "--plain")
    assert code == 0, err
    found = metrics(folder / "RUN")
    assert len(found) == 2
    assert all(line["train/updates"] == 2 and line["train/grad_norm"] > 0 for line in found)
    assert {name: found[-1][name] for name in expected} == expected
    if "Fading" in loss:
        assert 0 < found[-1]["train/is_weight"] <= 1


def test_the_correction_of_the_page_that_reads_a_column_trains(tmp_path):
    """With several versions in a sample, its weights depend on the sample alone: `--check` tries that."""
    folder = with_loss(tmp_path, "ClippedLoss(correction=ByAge())", BY_AGE, "ByAge")
    assert run(folder, "--check")[0] == 0
    code, _, err = run(folder, *FEW_STEPS, "--executor", "local", "--run-dir", "RUN", "--plain")
    assert code == 0, err
    assert [line["train/is_weight"] for line in metrics(folder / "RUN")] == [1.0, 1.0]  # nothing is stale


def test_a_formula_reads_further_columns_per_token_and_per_sample(tmp_path):
    folder = with_loss(tmp_path, "Whole(correction=ByAge())", FURTHER, "ByAge, Whole")
    code, _, err = run(folder, *FEW_STEPS, "--executor", "local", "--run-dir", "RUN", "--plain", "--minibatches", "4")
    assert code == 0, err
    for line in metrics(folder / "RUN"):
        assert line["train/is_weight"] == pytest.approx(0.5)
        assert line["train/is_changed"] == pytest.approx(1.0)


def test_a_user_loss_equal_to_ours_trains_the_same_weights(tmp_path):
    """Bit for bit: results depend on the formula only, not on the class it comes from."""
    same = "from stages import ClippedLoss\n\n\nclass Mine(ClippedLoss):\n    pass\n"
    found = []
    for name, loss in (("ours", "ClippedLoss()"), ("own", "Mine()")):
        folder = with_loss(tmp_path / name, loss, same, "Mine")
        code, _, err = run(folder, *FEW_STEPS, "--executor", "local", "--run-dir", "RUN", "--plain")
        assert code == 0, err
        found.append(
            [
                {k: v for k, v in line.items() if k.startswith("train/") and "flops" not in k and "util" not in k}
                for line in metrics(folder / "RUN")
            ]
        )
    assert found[0] == found[1]
