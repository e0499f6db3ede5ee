"""The on-device table of logprobs: each request reads back its own values, once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.backends.vllm.logprobs import ROWS, LogprobTable

CPU = torch.device("cpu")


def write(table: LogprobTable, rows: list[int], places: list[int], values: list[float]) -> None:
    table.write(torch.tensor(rows), torch.tensor(places), torch.tensor(values))


def read(table: LogprobTable, lengths: dict[str, int]) -> list[list[float]]:
    return [np.frombuffer(row, np.float32).tolist() for row in table.take(lengths)]


def test_a_request_keeps_its_row_and_comes_out_as_long_as_it_is():
    table = LogprobTable()
    first, second = table.row("a", 4, CPU), table.row("b", 4, CPU)
    write(table, [first, second], [0, 0], [-1.0, -2.0])
    assert table.row("a", 4, CPU) == first  # it was preempted and is scheduled again
    write(table, [second, first], [1, 1], [-4.0, -3.0])
    assert read(table, {"b": 2, "a": 1}) == [[-2.0, -4.0], [-1.0]]


def test_rows_are_free_when_they_were_read_or_forgotten():
    table = LogprobTable()
    rows = [table.row(str(i), 2, CPU) for i in range(ROWS)]
    table.forget(["1", "2", "never there"])
    read(table, {"3": 1})
    assert {table.row(name, 2, CPU) for name in ("x", "y", "z")} == {rows[1], rows[2], rows[3]}
    with pytest.raises(KeyError):
        table.take({"3": 1})


@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "write", "read", "forget"]), st.integers(0, 199), st.integers(1, 9)),
        max_size=300,
    )
)
def test_whatever_comes_and_goes_nobody_reads_anothers(steps):
    table, held = LogprobTable(), {}
    for number, (what, request, tokens) in enumerate(steps):
        name = str(request)
        if what == "write":
            values = held.setdefault(name, [float(number + place) for place in range(tokens)])
            row = table.row(name, len(values), CPU)
            for place, value in enumerate(values):
                write(table, [row], [place], [value])
        elif name in held:
            values = held.pop(name)
            if what == "read":
                assert read(table, {name: len(values)}) == [values]
            else:
                table.forget([name])
    assert read(table, {name: len(values) for name, values in held.items()}) == list(held.values())
