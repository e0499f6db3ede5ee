"""Divides numbers evenly: into shares of equal count, or into rows of bounded size. Does not know what they measure.

    spread(["a", "b", "c", "d"], costs=[9, 7, 3, 1], shares=2)                    # [["a", "d"], ["b", "c"]]
    rows_within(10, [0, 1, 2], size=[6, 5, 4], cost=[6, 5, 4])                    # [[0], [1, 2]]

Shares are built by differencing: blocks with one item per share are joined, the two with the widest spread first, so
that they even out (Karmarkar and Karp, 1982; with equal counts: Yakir, Mathematics of Operations Research 21(1), 1996).
Rows are filled evenly if few enough rows suffice for that, else by the best of best fit, first fit and modified first
fit decreasing (Johnson and Garey, Journal of Complexity 1(1), 1985: 71/60 of the fewest rows plus 31/6), then leveled.
The search over the number of rows is MULTIFIT (Coffman, Garey and Johnson, SIAM Journal on Computing 7(1), 1978) with
rows in place of capacity.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
_Fill: TypeAlias = Callable[[Sequence[int], Sequence[float], int], list[list[int]]]  # items, their costs, rows


def spread(items: Sequence[T], costs: Sequence[float], shares: int) -> list[list[T]]:
    """Divide `items` into shares of similar total cost: each share gets one item of every block of `shares` neighbors.

    Each share keeps the order of `items`, so the i-th items of all shares come from the i-th block. If the last block
    is not full, only some shares get one of its items.
    """
    if shares == 1:
        return [list(items)]
    # One node per block: its loads in descending order, and the items of each load, as indices into `items`.
    heap: list[tuple[float, int, list[float], list[list[int]]]] = []
    for start in range(0, len(items), shares):
        block = sorted(range(start, min(start + shares, len(items))), key=costs.__getitem__, reverse=True)
        empty = shares - len(block)
        loads = [float(costs[i]) for i in block] + [0.0] * empty
        heap.append((loads[-1] - loads[0], start, loads, [[i] for i in block] + [[] for _ in range(empty)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, loads, held = heapq.heappop(heap)
        _, _, others, theirs = heap[0]
        # Pair the largest load with the smallest. Append to the longer list, so that joining is cheap.
        loads = [a + b for a, b in zip(loads, reversed(others))]
        for i, j in zip(range(shares), reversed(range(shares))):
            long, short = (held[i], theirs[j]) if len(held[i]) >= len(theirs[j]) else (theirs[j], held[i])
            long.extend(short)
            held[i] = long
        order = sorted(range(shares), key=loads.__getitem__, reverse=True)
        loads = [loads[i] for i in order]
        heapq.heapreplace(heap, (loads[-1] - loads[0], number, loads, [held[i] for i in order]))
    return [[items[i] for i in sorted(held)] for held in heap[0][3]]


def exchanged(shares: Sequence[Sequence[int]], cost: Sequence[float], slack: float = 2**-10) -> list[list[int]]:
    """Reduce the cost of the costliest share by exchanging single items between shares; their counts do not change.

    Stops when no share exceeds the mean by more than the fraction `slack`, or when no exchange helps. `cost` is indexed
    by item.
    """
    held = [list(share) for share in shares]
    loads = [float(sum(map(cost.__getitem__, share))) for share in held]
    mean = sum(loads) / len(loads)
    least = mean * 2**-20  # a smaller gain may be a rounding error, and the items would be exchanged back
    while max(loads) > mean * (1 + slack):
        top = loads.index(max(loads))
        for other in sorted(range(len(held)), key=loads.__getitem__):
            gap = loads[top] - loads[other]
            given, taken = _closest(held[top], held[other], cost, gap / 2)
            moved = cost[held[top][given]] - cost[held[other][taken]]
            if least < moved < gap - least:
                held[top][given], held[other][taken] = held[other][taken], held[top][given]
                loads[top], loads[other] = loads[top] - moved, loads[other] + moved
                break
        else:
            break
    return held


def _closest(ours: Sequence[int], theirs: Sequence[int], cost: Sequence[float], difference: float) -> tuple[int, int]:
    """Return the indices of the two items, one from each side, whose costs differ by `difference` most nearly."""
    sought = sorted((cost[i], at) for at, i in enumerate(theirs))
    best: tuple[float, int, int] | None = None
    for at, i in enumerate(ours):
        place = bisect_left(sought, (cost[i] - difference, 0))
        for their_cost, their_at in sought[max(place - 1, 0) : place + 1]:
            found = abs(cost[i] - their_cost - difference), at, their_at
            best = found if best is None or found < best else best
    assert best is not None  # no share is empty
    return best[1:]


def rows_within(
    capacity: int, items: Sequence[int], size: Sequence[int], cost: Sequence[float], multiple: int = 1
) -> list[list[int]]:
    """Divide `items` into rows of at most `capacity` total size, none empty and all of about the same cost.

    The number of rows is a multiple of `multiple` if there are enough items for that. Before it is rounded up, it never
    exceeds that of first fit decreasing. `size` and `cost` are indexed by item; no size exceeds `capacity`.
    """
    order = sorted(items, key=size.__getitem__, reverse=True)
    large = sum(2 * size[i] > capacity for i in order)  # no two of these share a row
    fewest = _multiple(max(1, large, -(-sum(size[i] for i in order) // capacity)), multiple)
    for fill in (_emptiest_first, spread):
        if even := _even(order, size, cost, fewest, capacity, fill):
            return even
    rows = _best_fit(order, size, capacity)
    if len(rows) > fewest:
        rows = _first_fit(order, size, capacity, len(rows) - 1) or rows
    if len(rows) > fewest:
        rows = min(rows, _modified_first_fit(order, size, capacity), key=len)
    count = _multiple(len(rows), multiple)
    low, high = fewest // multiple + 1, count // multiple
    while high - low > high // 64:  # a narrower search is not worth the time
        middle = (low + high) // 2
        if found := _even(order, size, cost, middle * multiple, capacity, spread):
            even, high = found, middle
        else:
            low = middle + 1
    if even := even or _even(order, size, cost, count, capacity, _emptiest_first):
        return even
    return rows if count > len(items) else _level(rows, size, count)


def _multiple(number: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `number`."""
    return -(-number // of) * of


def _even(
    order: Sequence[int], size: Sequence[int], cost: Sequence[float], count: int, capacity: int, fill: _Fill
) -> list[list[int]]:
    """Return `count` rows of about the same cost, none empty; no rows if `fill` exceeds the capacity."""
    if count > len(order):
        return []
    rows = fill(order, [cost[i] for i in order], count)
    return rows if all(sum(map(size.__getitem__, row)) <= capacity for row in rows) else []


def _emptiest_first(order: Sequence[int], costs: Sequence[float], count: int) -> list[list[int]]:
    """Return `count` rows: each item goes into the row with the lowest cost so far."""
    rows: list[list[int]] = [[] for _ in range(count)]
    heap: list[tuple[float, int, int]] = [(0, 0, row) for row in range(count)]  # cost, items, row
    for i, cost in zip(order, costs):
        load, held, row = heap[0]
        rows[row].append(i)
        heapq.heapreplace(heap, (load + cost, held + 1, row))
    return rows


def _best_fit(order: Sequence[int], size: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each item into the fullest row that has room for it."""
    rows: list[list[int]] = []
    left: list[tuple[int, int]] = []  # capacity left and row, ascending
    for i in order:
        at = bisect_left(left, (size[i], 0))
        if at == len(left):
            insort(left, (capacity - size[i], len(rows)))
            rows.append([i])
        else:
            room, row = left.pop(at)
            insort(left, (room - size[i], row))
            rows[row].append(i)
    return rows


def _first_fit(order: Sequence[int], size: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """Put each item into the first row that has room for it. Returns no rows if more than `most` are needed."""
    width = 1 << max(most - 1, 0).bit_length()
    room = [0] * width + [capacity] * most + [0] * (width - most)  # leaf width + row; node n: the maximum of 2n, 2n + 1
    for node in reversed(range(1, width)):
        room[node] = max(room[2 * node], room[2 * node + 1])
    rows: list[list[int]] = [[] for _ in range(most)]
    for i in order:
        node, need = 1, size[i]
        if room[1] < need:
            return []
        while node < width:
            node *= 2
            if room[node] < need:
                node += 1
        rows[node - width].append(i)
        room[node] -= need
        while node > 1:
            node //= 2
            larger = max(room[2 * node], room[2 * node + 1])
            if room[node] == larger:
                break
            room[node] = larger
    return [row for row in rows if row]


def _modified_first_fit(order: Sequence[int], size: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill the rows of large items (above 1/2 of the capacity) first, then put the rest by first fit decreasing.

    A row of a large item takes the largest medium item (above 1/3) that fits; else two small ones (above 1/6) if any
    two fit, the smallest one and the largest that still fits; then whatever fits, largest first.
    """
    large, medium, small, tiny = _by_class(order, size, capacity)
    rows, left = [[i] for i in large], [capacity - size[i] for i in large]
    for n in range(len(rows)):
        _put_largest(medium, size, rows, left, n)
    for n in reversed(range(len(rows))):
        if len(small) > 1 and size[small[-1]] + size[small[-2]] <= left[n]:
            rows[n].append(small.pop())
            left[n] -= size[rows[n][-1]]
            _put_largest(small, size, rows, left, n)
    rest = [*medium, *small, *tiny]
    for n in range(len(rows)):
        while _put_largest(rest, size, rows, left, n):
            pass
    return [*rows, *_first_fit(rest, size, capacity, len(rest))]


def _by_class(order: Sequence[int], size: Sequence[int], capacity: int) -> tuple[list[int], ...]:
    """Divide items in descending order into large, medium, small and tiny ones; none is larger than the capacity."""
    classes: tuple[list[int], ...] = ([], [], [], [])
    for i in order:
        fit = capacity // size[i] if size[i] else 6  # how many items of this size share a row
        classes[bisect_left((1, 2, 5), fit)].append(i)
    return classes


def _put_largest(items: list[int], size: Sequence[int], rows: list[list[int]], left: list[int], row: int) -> bool:
    """Move the largest of the descending `items` that fits into a row; returns whether one fits."""
    at = bisect_left(items, -left[row], key=lambda i: -size[i])
    if at == len(items):
        return False
    rows[row].append(items.pop(at))
    left[row] -= size[rows[row][-1]]
    return True


def _level(rows: Sequence[Sequence[int]], size: Sequence[int], count: int) -> list[list[int]]:
    """Return `count` rows, none empty, from at most `count`: move items from the fullest to the emptiest row while that
    evens them out."""
    level = [list(row) for row in rows] + [[] for _ in range(count - len(rows))]
    open_rows = sorted((sum(map(size.__getitem__, row)), len(row), number) for number, row in enumerate(level))
    while len(open_rows) > 1:
        (low, held, to), (high, many, source) = open_rows[0], open_rows[-1]
        moved = min(level[source], key=lambda i: abs(2 * size[i] - (high - low)))
        if many == 1 or (held and not 0 < size[moved] < high - low):
            open_rows.pop()  # moving an item of this row would not help
            continue
        del open_rows[-1], open_rows[0]
        level[source].remove(moved)
        level[to].append(moved)
        insort(open_rows, (high - size[moved], many - 1, source))
        insort(open_rows, (low + size[moved], held + 1, to))
    return level
