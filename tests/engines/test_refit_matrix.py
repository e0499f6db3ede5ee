"""The benchmark of refits between real engines: its flags, its rows, and one mapping run for real."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.refit_matrix import (
    WARM,
    Layout,
    Mapping,
    compared,
    described,
    measured,
    parsed,
    policy_of,
    ready_ms,
    run,
)
from ops.refit.share import digest_of
from pipeline.record import trace
from pipeline.rundir import RunDir
from stages.backends.model.experts import of_expert
from stages.backends.model.folder import model_folder
from tests.optional import need
from tests.shares import shares_of


@pytest.mark.parametrize(
    ("text", "trainer", "sampler"),
    [
        ("TP2 PP2 -> TP2 DP3", Layout(TP=2, PP=2), Layout(TP=2, DP=3)),
        ("EP2 DP2->TP1", Layout(EP=2, DP=2), Layout()),
    ],
)
def test_a_mapping_names_the_layouts_of_both_sides(text: str, trainer: Layout, sampler: Layout) -> None:
    assert Mapping.of(text) == Mapping(trainer, sampler)
    assert (Mapping.of(text).trainer.ranks, Mapping.of(text).sampler.ranks) == (4, sampler.TP * sampler.DP)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("TP2", "is not of the form"),
        ("TP2 -> PP2", "'PP2' in 'PP2' is not one of TP, DP with its size, once"),
        ("TP2 TP2 -> TP2", "'TP2' in 'TP2 TP2' is not one of TP, PP, EP, DP"),
        ("TP0 -> TP2", "'TP0' in 'TP0' is not one of"),
        (" -> TP2", "no layout in ' '; write TP1"),
    ],
)
def test_a_mapping_that_is_none_is_refused(text: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=told):
        Mapping.of(text)
    with pytest.raises(SystemExit):
        parsed(["--mappings", text])
    assert "error: --mappings: " in capsys.readouterr().err


def test_only_a_run_whose_versions_all_have_goldens_bytes_is_as_golden() -> None:
    row: dict[str, Any] = {"mapping": "TP2 -> TP2", "path": "golden", "published": ["a", "b"]}
    others = [row | {"path": "pull"}, row | {"path": "gloo", "published": ["a", "c"]}, row | {"mapping": "PP2 -> TP2"}]
    others[2]["path"] = "pull"
    found = [each["as golden"] for each in compared([row, *others])]
    assert found == ["yes", "yes", "NO", "no run with golden"]


def test_new_weights_are_ready_once_the_first_sampler_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ran(stage: str, group: str, end_s: float) -> trace.Ran:
        return trace.Ran(
            task=0, stage=stage, step=0, attempt=0, groups=(), group=group, worker=0, start_s=0.0,
            end_s=end_s, cpu_s=0.0, metrics={},
        )  # fmt: skip

    spans = [
        ran("train", "learner", 4.0), ran("train", "learner", 5.0), ran("refit", "learner", 5.1),
        ran("refit", "sampler", 5.4), ran("refit", "sampler", 5.25),
    ]  # fmt: skip
    monkeypatch.setattr(trace, "read", lambda path: enumerate(spans))
    assert ready_ms(RunDir(tmp_path)) == pytest.approx([250.0])


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's folder, with the experts of a layer stacked."""
    held = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    stacked: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in held if of_expert(name)[1] is not None]:
        fused, expert = of_expert(name)
        stacked.setdefault(fused, {})[expert or 0] = held.pop(name)
    return held | {name: torch.stack([found[i] for i in range(len(found))]) for name, found in stacked.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arrow", ["EP2 -> TP2", *(pytest.param(arrow, marks=pytest.mark.search) for arrow in ("TP2 -> DP2", "PP2 -> TP2"))]
)
def test_a_mapping_between_real_engines_delivers_the_trained_bytes(
    arrow: str, tmp_path: Path, ray_session: Any
) -> None:
    need("vllm", "vllm")
    need("megatron", "megatron.core")
    mapping, steps = Mapping.of(arrow), WARM + 1
    options = parsed(["--steps", str(steps)])
    policy = policy_of(mapping, options, tmp_path)
    run_dir = run(described(mapping, "auto", policy, options), tmp_path / "run")
    row = measured(run_dir)
    folder = model_folder(policy, run_dir.path)
    weights = weights_in(folder)
    assert row["published"][0] == digest_of(shares_of(weights)), "what the model's folder holds"
    assert len(set(row["published"])) == steps + 1
    assert row["path"] == "pull" and row["loader MB"] == 0 and row["lookups"] == 0
    assert row["bulk MB"] > sum(tensor.nbytes for tensor in weights.values()) / 1e6
    assert 0 <= row["mismatch KL"] < 1e-6 and 1 <= row["prob error"] < 1 + 1e-4
    assert 0 < row["move ms"] < row["ready ms"]
