"""A stage that returns a row of another length than those of the fields that it read ends the run, at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.errors.harness import command

GRAPH = """
from dataclasses import dataclass, replace
from graphs import quickstart
from pipeline import Field, Stage
from pipeline.declare.columns import Ragged
from stages.vocabulary import RESPONSE_IDS

@dataclass(frozen=True)
class Weigh(Stage):
    name = "weigh"
    per = "group"
    reads = (RESPONSE_IDS,)
    writes = (Field("weight", dtype="float32", dims="N T"),)

    def setup(self, context):
        def run(columns, task):
            rows = [row.float() for row in columns["response_ids"].rows()]
            rows[3] = {row}
            return {{"weight": Ragged.of(rows)}}
        return run

def graph(steps: int = 1):
    made = quickstart.graph(steps=steps, prompts_per_step=4, samples_per_prompt=4, warm_start_steps=0)
    return replace(made, stages=(*made.stages, Weigh()))
"""


@pytest.mark.parametrize("row", ["rows[3][:-1]", "rows[3].repeat(2)"], ids=["short", "long"])
def test_a_row_of_another_length_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "graph.py").write_text(GRAPH.format(row=row))
    code, _, err = command(tmp_path, "graph.py", "--executor", "local", "--run-dir", "run", "--plain")
    assert code == 3, err
    assert "stage 'weigh' returned a field 'weight' of length" in err
    assert "for key 00000000_g003, whose 'response_ids' has the length" in err


def test_one_of_the_same_length_passes(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(GRAPH.format(row="rows[3]"))
    code, _, err = command(tmp_path, "graph.py", "--executor", "local", "--run-dir", "run", "--plain")
    assert code == 0, err
