"""The refit kernels under Triton's interpreter, on CPU memory: python -m tests.refit_kernels

Runs in its own process because Triton reads TRITON_INTERPRET on import. The result of a kernel on a table is compared
with that of the CPU path on the same copies and places.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.refit import sums, tiles
from ops.refit.kernel import add, move
from ops.refit.layout import Layout
from ops.refit.plan import build
from ops.refit.sums import SEEDS, Sums
from tests.examples import few
from tests.unit.refit_layouts import buffers, filled, moves, on, shifted, sides

SIGNED = tuple(int(np.uint64(seed).view(np.int64)) for seed in SEEDS)


@given(sides())
@settings(max_examples=few(25), deadline=None)
def moved(pair: tuple[Layout, Layout]) -> None:
    source, destination = pair
    plan, given_ = build(source, destination, segment_bytes=32), [on("cpu", memory) for memory in filled(source)]
    for rank, memory in enumerate(buffers(destination)):
        made, wanted = on("cpu", {name: array.copy() for name, array in memory.items()}), on("cpu", memory)
        ways = [moves(plan, rank, given_, own) for own in (made, wanted)]
        for word, table in ways[0].described(rank) if plan.copies(rank) else ():
            move(table, word)
        ways[1].run()
        assert all(torch.equal(made[name], wanted[name]) for name in wanted)


@given(sides())
@settings(max_examples=few(25), deadline=None)
def summed(pair: tuple[Layout, Layout]) -> None:
    layout = pair[0]
    for places, memory in zip(layout.ranks, filled(layout)):
        held = on("cpu", memory)
        ours = Sums(layout.tensors, places, held.__getitem__)
        made = torch.zeros((len(places), 2), dtype=torch.int64)
        for word, table in ours.described(layout.tensors, places):
            add(torch.from_numpy(np.ascontiguousarray(table)), word, made, SIGNED, sums.BLOCK)
        assert made.numpy().tobytes() == ours.now().sums


@given(sides(), st.integers(0, 8))
@settings(max_examples=few(25), deadline=None)
def summed_and_copied(pair: tuple[Layout, Layout], shift: int) -> None:
    layout = pair[0]
    for places, memory, empty in zip(layout.ranks, filled(layout), buffers(layout)):
        held = {name: shifted(array, shift) for name, array in memory.items()}
        copies = [on("cpu", {name: array.copy() for name, array in empty.items()}) for _ in range(2)]
        ways = [Sums(layout.tensors, places, copy.__getitem__, held.__getitem__) for copy in copies]
        made = torch.zeros((len(places), 2), dtype=torch.int64)
        for word, table in ways[0].described(layout.tensors, places):
            add(torch.from_numpy(np.ascontiguousarray(table)), word, made, SIGNED, sums.BLOCK)
        assert made.numpy().tobytes() == ways[1].now().sums
        assert all(torch.equal(copies[0][name], copies[1][name]) for name in held)


def main() -> None:
    tiles.TILE_BYTES, sums.BLOCK = 24, 2  # so that small tensors have many tiles and blocks
    moved()
    summed()
    summed_and_copied()


if __name__ == "__main__":
    main()
