"""The tables of docs/models.md: they are today's, and what they call shown is there."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests import engine_table as table
from tests import images
from tests.optional import need
from tests.unit import test_routes, test_torch_families

need("megatron", "megatron.core")

BY = {column.name: column for column in (*table.TRAINERS, *table.SAMPLERS, *table.FEATURES)}
NAMING = ("tests/engines/test_vllm_refit.py", "tests/engines/test_megatron.py")  # they name families in their cases
FAMILY = {one.kind: one for one in table.FAMILIES}


def says(kind: str, column: str) -> str:
    return table.cell(FAMILY[kind], BY[column], table.Reasons(), table.Reasons())


def test_the_page_has_todays_tables() -> None:
    text = table.PAGE.read_text()
    assert text.count(table.BEGIN) == text.count(table.END) == 1
    assert table.page(text) == text, "python -m tests.engine_table --write"


def test_every_test_and_result_that_shows_a_cell_is_there() -> None:
    named = {
        (place, kind)
        for columns in table.SHOWN.values()
        for by in columns.values()
        for place in by
        for kind in by[place]
    }
    for place, kind in named:
        file, _, part = place.partition("::")
        assert part in (table.ROOT / file).read_text(), place
        assert kind in FAMILY
    assert {column for columns in table.SHOWN.values() for column in columns} <= BY.keys()
    assert {column for column, _ in table.of_cases()} <= BY.keys()


def test_families_are_those_that_a_test_is_run_with() -> None:
    ran: dict[str, Any] = {
        "tests/unit/test_torch_families.py": test_torch_families.FAMILIES,
        "tests/unit/test_routes.py": test_routes.FAMILIES,
        "tests/unit/test_images.py": images.CONFIGS,
        "tests/engines/test_vllm_images.py": images.CONFIGS,
    }
    for place, kinds in ((place, kinds) for by in table.SHOWN["CPU"].values() for place, kinds in by.items()):
        file = place.partition("::")[0]
        text = (table.ROOT / file).read_text()
        wrong = [
            kind for kind in kinds if kind not in ran.get(file, kinds) or (file in NAMING and f'"{kind}"' not in text)
        ]
        assert wrong == [], place


@pytest.mark.parametrize(
    ("kind", "column", "cell"),
    [
        ("qwen3", "megatron TP", "CPU, GPU"),
        ("gpt_oss", "megatron 1 rank", "no"),
        ("nemotron_h", "megatron CP", "no"),
        ("llama", "megatron EP", "-"),
        ("nemotron_h, latent", "vllm 1 rank", "GPU"),  # --check refuses it on a CPU only
        ("qwen3_vl", "torch LoRA", "no"),
    ],
)
def test_a_cell_is_what_the_check_and_the_tests_say(kind: str, column: str, cell: str) -> None:
    assert says(kind, column) == cell


def test_what_is_shown_and_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "shown", lambda: {("CPU", "megatron 1 rank", "gpt_oss")})
    with pytest.raises(ValueError, match=r"gpt-oss .* is shown on a CPU, and refused: "):
        says("gpt_oss", "megatron 1 rank")


def test_reasons_are_told_once_with_all_families() -> None:
    reasons = table.Reasons()
    for kind in ("qwen3_vl", "qwen2_5_vl"):
        for column in ("torch LoRA", "megatron LoRA"):
            table.cell(FAMILY[kind], BY[column], reasons, table.Reasons())
    (line,) = (line for line in reasons.lines() if "adapters" in line)
    assert re.fullmatch(r"- `torch`, `megatron`: adapters .* \(Qwen3-VL, Qwen2.5-VL\)\.", line)


def test_a_family_without_a_part_has_no_answer() -> None:
    dense = replace(FAMILY["qwen3_moe"], kind="qwen3", config=table.PLAIN)
    assert table.cell(dense, BY["torch replay"], table.Reasons(), table.Reasons()) == "-"
