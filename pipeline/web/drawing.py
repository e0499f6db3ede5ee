"""Lays out the graph of a plan: boxes for stages, labels for the fields between them, lines. Pure.

Stages follow the layers of the plan, top to bottom. Between two layers is a row of labels, and a line that passes a
layer gets its own slot there, so nothing overlaps. The order in a row comes from the positions of neighbors
(barycenters, Sugiyama et al., 1981); then neighbors swap if that removes crossings. Lengths are pixels at scale 1; x
grows to the right, y down.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from pipeline.plan.plan import Plan, PlannedStage

BOX_W, BOX_H = 188.0, 64.0
LABEL_H = 20.0
LAYER_GAP = 44.0  # between boxes of two layers; the labels are inside it
GAP = 28.0  # between neighbors in a row
LANE = 22.0  # width of the slot of a line that passes through
MARGIN = 24.0
LETTER_W = 6.4  # width of a letter in a label
SWEEPS = 8
BEGINNINGS = 6
KEEPS = "KeepSamples"  # the stage of every plan that only keeps samples for display


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A stage; `x`, `y` are its upper left corner."""

    stage: str
    x: float
    y: float
    w: float
    h: float


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The fields one stage writes for another. `points` lead from box to box, straight down past labels and other
    boxes; the label is centered at (`label_x`, `label_y`)."""

    writer: str
    reader: str
    fields: tuple[str, ...]
    back: bool
    points: tuple[tuple[float, float], ...]
    label: str
    label_x: float
    label_y: float
    label_w: float


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """A complete drawing of `width` x `height`."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


class _RowPlace:
    """A stage, a label, or a passing line in a row."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.x = 0.0  # its middle
        self.above: list[_RowPlace] = []
        self.below: list[_RowPlace] = []


class _DraftLine:
    """A line during layout."""

    def __init__(self, writer: str, reader: str, fields: tuple[str, ...]) -> None:
        self.writer, self.reader, self.fields = writer, reader, fields
        self.text = label(fields)
        self.places: list[_RowPlace] = []  # one per row, from below the writer to above the reader


def label(fields: Sequence[str]) -> str:
    """Return the label of a line: its fields, shortened."""
    shown = " ".join(fields[:2]) if sum(map(len, fields[:2])) <= 20 else fields[0]
    rest = len(fields) - len(shown.split())
    return f"{shown} +{rest}" if rest else shown


def layout(plan: Plan) -> Drawing:
    """Return the drawing of a plan."""
    drawn = plan.stages
    drafts = [_DraftLine(*pair, tuple(fields)) for pair, fields in _pairs(plan, back=False).items()]
    rows, boxes = _rows(drawn, drafts)
    _settle(rows)
    _spread(rows)
    left = min(place.x - place.width / 2 for row in rows for place in row) - MARGIN
    for row in rows:
        for place in row:
            place.x -= left
    width = max(place.x + place.width / 2 for row in rows for place in row) + MARGIN
    heights = _heights(len(rows))
    placed = tuple(
        Box(stage=stage.name, x=boxes[stage.name].x - BOX_W / 2, y=heights[2 * stage.layer], w=BOX_W, h=BOX_H)
        for stage in drawn
    )
    lines = [_line(draft, boxes, {box.stage: box for box in placed}, heights) for draft in drafts]
    backs, width = _backs(plan, {box.stage: box for box in placed}, width)
    height = heights[-1] + BOX_H + MARGIN
    return Drawing(width=width, height=height, boxes=placed, lines=(*lines, *backs))


def _pairs(plan: Plan, *, back: bool) -> dict[tuple[str, str], list[str]]:
    """Return the fields between each pair of stages. Fields that are only kept for display get no line."""
    keeps = {stage.name for stage in plan.stages if stage.kind == KEEPS}
    pairs: dict[tuple[str, str], list[str]] = defaultdict(list)
    for edge in plan.edges:
        if edge.back == back and edge.reader not in keeps:
            pairs[edge.writer, edge.reader].append(edge.field)
    return pairs


def _rows(
    stages: Iterable[PlannedStage], drafts: list[_DraftLine]
) -> tuple[list[list[_RowPlace]], dict[str, _RowPlace]]:
    """Return rows of stages (even) and labels (odd); every line has a slot in each row it crosses."""
    layer = {stage.name: stage.layer for stage in stages}
    boxes = {name: _RowPlace(BOX_W) for name in layer}
    rows: list[list[_RowPlace]] = [[] for _ in range(2 * max(layer.values(), default=0) + 1)]
    for name, depth in layer.items():
        rows[2 * depth].append(boxes[name])
    for draft in drafts:
        first, last = 2 * layer[draft.writer] + 1, 2 * layer[draft.reader] - 1
        before = boxes[draft.writer]
        for number in range(first, last + 1):
            place = _RowPlace(len(draft.text) * LETTER_W + 16 if number == last else LANE)
            rows[number].append(place)
            draft.places.append(place)
            _join(before, place)
            before = place
        _join(before, boxes[draft.reader])
    return rows, boxes


def _join(above: _RowPlace, below: _RowPlace) -> None:
    above.below.append(below)
    below.above.append(above)


def _settle(rows: list[list[_RowPlace]]) -> None:
    """Set each row to the order with the fewest crossings found from a few starting points."""
    best, least = [list(row) for row in rows], _crossings(rows)
    draw = random.Random(0)
    for beginning in range(BEGINNINGS):
        for row in rows if beginning else ():
            draw.shuffle(row)
        for sweep in range(SWEEPS):
            _order(rows, down=sweep % 2 == 0)
            while _exchange(rows):
                pass
            crossings = _crossings(rows)
            if crossings < least:
                best, least = [list(row) for row in rows], crossings
    for row, order in zip(rows, best):
        row[:] = order
        _pack(row, [place.x for place in row])


def _exchange(rows: list[list[_RowPlace]]) -> bool:
    """Swap neighbors if that helps. Returns whether any swapped."""
    changed = False
    for number, row in enumerate(rows):
        near = rows[max(0, number - 1) : number + 2]
        for n in range(len(row) - 1):
            before = _crossings(near)
            row[n], row[n + 1] = row[n + 1], row[n]
            if _crossings(near) < before:
                changed = True
            else:
                row[n], row[n + 1] = row[n + 1], row[n]
    return changed


def _crossings(rows: Sequence[Sequence[_RowPlace]]) -> int:
    """Return the number of crossing line pairs between adjacent rows."""
    count = 0
    for above, below in pairwise(rows):
        at = {id(place): n for n, place in enumerate(below)}
        ends = [sorted(at[id(place)] for place in upper.below) for upper in above]
        flat = [end for ends_of_one in ends for end in ends_of_one]
        count += sum(a > b for n, a in enumerate(flat) for b in flat[n + 1 :])
    return count


def _order(rows: list[list[_RowPlace]], *, down: bool) -> None:
    """Order each row by the mean position of its neighbors in the previous row."""
    for row in rows:
        _pack(row, [place.x for place in row])
    for row in rows if down else reversed(rows):
        wanted = [_mean(place.above if down else place.below, place.x) for place in row]
        row[:] = [place for _, place in sorted(zip(wanted, row), key=lambda pair: pair[0])]
        _pack(row, sorted(wanted))


def _mean(places: Sequence[_RowPlace], default: float) -> float:
    return sum(place.x for place in places) / len(places) if places else default


def _spread(rows: list[list[_RowPlace]]) -> None:
    """Place each row close to its neighbors, in the final order."""
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            _pack(row, [_mean([*place.above, *place.below], place.x) for place in row])


def _pack(row: list[_RowPlace], wanted: Sequence[float]) -> None:
    """Place slots as close to the desired positions as neighbors allow; touching slots share their shift.

    Pool adjacent violators; minimizes the sum of squared distances.
    """
    runs: list[tuple[float, list[int]]] = []  # (shift, members)
    offset = [0.0] * len(row)
    for n in range(1, len(row)):
        offset[n] = offset[n - 1] + (row[n - 1].width + row[n].width) / 2 + GAP
    for n in range(len(row)):
        runs.append((wanted[n] - offset[n], [n]))
        while len(runs) > 1 and runs[-2][0] > runs[-1][0]:
            (a, members), (b, more) = runs[-2], runs.pop()
            runs[-1] = ((a * len(members) + b * len(more)) / (len(members) + len(more)), members + more)
    for shift, members in runs:
        for n in members:
            row[n].x = shift + offset[n]


def _heights(rows: int) -> list[float]:
    """Return the upper edge of each row."""
    return [
        MARGIN + (row // 2) * (BOX_H + LAYER_GAP) + (row % 2) * (BOX_H + (LAYER_GAP - LABEL_H) / 2)
        for row in range(rows)
    ]


def _line(draft: _DraftLine, boxes: dict[str, _RowPlace], placed: dict[str, Box], heights: list[float]) -> Line:
    writer, reader = placed[draft.writer], placed[draft.reader]
    first = round((writer.y - MARGIN) / (BOX_H + LAYER_GAP)) * 2 + 1
    points = [(_port(boxes[draft.writer].below, draft.places[0], writer), writer.y + writer.h)]
    for number, place in enumerate(draft.places, first):
        points += [(place.x, heights[number]), (place.x, heights[number] + (LABEL_H if number % 2 else BOX_H))]
    points.append((_port(boxes[draft.reader].above, draft.places[-1], reader), reader.y))
    last = draft.places[-1]
    return Line(
        writer=draft.writer,
        reader=draft.reader,
        fields=draft.fields,
        back=False,
        points=tuple(points),
        label=draft.text,
        label_x=last.x,
        label_y=points[-2][1] - LABEL_H / 2,
        label_w=last.width,
    )


def _port(places: list[_RowPlace], of: _RowPlace, box: Box) -> float:
    """Return where a line starts on a box's edge: lines are spread over it in the order of their targets."""
    ordered = sorted(places, key=lambda place: place.x)
    return box.x + box.w * (ordered.index(of) + 1) / (len(ordered) + 1)


def _backs(plan: Plan, placed: dict[str, Box], width: float) -> tuple[list[Line], float]:
    """Route lines to a later step up the right side. Returns them and the new width."""
    lines = []
    for (writer, reader), fields in _pairs(plan, back=True).items():
        start, end = placed[writer], placed[reader]
        text = label(tuple(fields))
        label_w = len(text) * LETTER_W + 16
        x = width - MARGIN + GAP + label_w / 2
        y = (start.y + end.y + BOX_H) / 2
        points = (
            (start.x + start.w, start.y + start.h / 2),
            (x, start.y + start.h / 2),
            (x, end.y + end.h / 2),
            (end.x + end.w, end.y + end.h / 2),
        )
        lines.append(
            Line(
                writer=writer,
                reader=reader,
                fields=tuple(fields),
                back=True,
                points=points,
                label=text,
                label_x=x,
                label_y=y,
                label_w=label_w,
            )
        )
        width = x + label_w / 2 + MARGIN
    return lines, width
