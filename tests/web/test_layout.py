"""No overlaps in the drawing of a graph."""

from itertools import combinations, pairwise
from pathlib import Path

import pytest

from pipeline.cli.load import load
from pipeline.plan.planner import plan
from pipeline.web.drawing import LABEL_H, Box, Drawing, layout
from tests.unit import toy
from tests.unit.records import simulated

GRAPHS = Path(__file__).parents[2] / "graphs"


def plans():
    yield pytest.param(simulated(steps=1)[0], id="toys")
    yield pytest.param(plan(toy.graph())[0], id="toy")
    yield pytest.param(plan(load(GRAPHS / "quickstart.py").build({}))[0], id="quickstart")


def areas(drawn: Drawing):
    """Return the rectangle of each box and label by name: (left, top, right, bottom)."""
    found = {box.stage: (box.x, box.y, box.x + box.w, box.y + box.h) for box in drawn.boxes}
    for line in drawn.lines:
        x, y, half = line.label_x, line.label_y, line.label_w / 2
        found[f"{line.writer}>{line.reader}"] = (x - half, y - LABEL_H / 2, x + half, y + LABEL_H / 2)
    return found


@pytest.mark.parametrize("planned", plans())
def test_boxes_and_labels_lie_apart_and_inside(planned):
    drawn = layout(planned)
    for (one, a), (other, b) in combinations(areas(drawn).items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, other)
    for left, top, right, bottom in areas(drawn).values():
        assert left >= 0 and top >= 0 and right <= drawn.width and bottom <= drawn.height


@pytest.mark.parametrize("planned", plans())
def test_lines_lead_from_writer_to_reader_and_through_no_other_box(planned):
    drawn = layout(planned)
    boxes = {box.stage: box for box in drawn.boxes}
    for line in drawn.lines:
        assert touches(boxes[line.writer], line.points[0]) and touches(boxes[line.reader], line.points[-1])
        for box in boxes.values():
            if box.stage not in (line.writer, line.reader):
                assert not any(crosses(box, a, b) for a, b in pairwise(line.points)), (line.label, box.stage)


def touches(box: Box, point: tuple[float, float]) -> bool:
    return box.x <= point[0] <= box.x + box.w and box.y <= point[1] <= box.y + box.h


def crosses(box: Box, a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Return whether a piece of a line, straight or curved between its ends, can cross the inside of a box."""
    (left, right), (top, bottom) = sorted((a[0], b[0])), sorted((a[1], b[1]))
    return left < box.x + box.w and right > box.x and top < box.y + box.h and bottom > box.y


def test_every_line_has_the_fields_of_its_edges():
    planned = plan(toy.graph())[0]
    drawn = {(line.writer, line.reader, field) for line in layout(planned).lines for field in line.fields}
    assert drawn == {(e.writer, e.reader, e.field) for e in planned.edges if e.reader != "samples"}


def test_the_quickstart_is_drawn_without_a_crossing():
    lines = [line for line in layout(plan(load(GRAPHS / "quickstart.py").build({}))[0]).lines if not line.back]
    for one, other in combinations(lines, 2):
        assert not any(meet(*p, *q) for p in pairwise(one.points) for q in pairwise(other.points)), (one, other)


def meet(a, b, c, d) -> bool:
    """Return whether two pieces cross between their ends."""

    def side(p, q, r) -> float:
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0
