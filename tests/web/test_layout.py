"""The drawing of a graph: dagre's layers, and the lines and boxes that the page makes of them."""

import re
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest

import pipeline.web
from pipeline.cli.load import load
from pipeline.plan.plan import PlacedGroup
from pipeline.plan.planner import plan
from tests.unit import toy
from tests.unit.records import simulated

GRAPHS = Path(__file__).parents[2] / "graphs"
ROOM = 1200  # what a page of 1280 pixels has for it
DRAW = "async ([plan, room]) => (await import('/static/layout.js')).drawn(plan, room)"


def recipe(name):
    return plan(load(GRAPHS / f"{name}.py").build({}))[0]


def served():
    """A plan with a group that runs no stage and serves one."""
    made = simulated(steps=1)[0]
    group = msgspec.structs.replace(made.groups[0], name="envs", stages=(), serves=("rollout",), workers=3, cpus=2.0)
    return msgspec.structs.replace(made, servers=(group,))


def chain():
    """Twelve stages in ten layers."""
    made = recipe("dapo")
    last = next(stage for stage in made.stages if stage.name == "evaluate")
    more = [msgspec.structs.replace(last, name=f"evaluate_{n}", layer=last.layer + n, writes=()) for n in (1, 2)]
    edge = made.edges[0]
    names = [last.name, *(stage.name for stage in more)]
    edges = [msgspec.structs.replace(edge, field="scores", writer=a, reader=b, back=False) for a, b in pairwise(names)]
    return msgspec.structs.replace(made, stages=(*made.stages, *more), edges=(*made.edges, *edges))


PLANS = {
    "toys": lambda: simulated(steps=1)[0],
    "toy": lambda: plan(toy.graph())[0],
    "quickstart": lambda: recipe("quickstart"),
    "dapo": lambda: recipe("dapo"),
    "served": served,
    "chain": chain,
}


@pytest.fixture(scope="module")
def draw(browser):
    """Draws a plan with the module of the page, in a browser."""
    static = pipeline.web.STATIC

    def answer(route):
        path = static / re.sub(r"^.*/static/", "", route.request.url)
        route.fulfill(path=path) if path.is_file() else route.fulfill(body="<!doctype html>", content_type="text/html")

    tab = browser.new_page()
    tab.route("**/*", answer)
    tab.goto("http://127.0.0.1:9/")
    yield lambda made, room=ROOM: tab.evaluate(DRAW, [msgspec.to_builtins(made), room])
    tab.close()


def area(box):
    return box["x"], box["y"], box["x"] + box["w"], box["y"] + box["h"]


def meet(a, b) -> bool:
    """Return whether two rectangles (left, top, right, bottom) share a point inside both."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def pieces(line):
    """Return the pieces of a line as thin rectangles; each is horizontal or vertical."""
    for (x0, y0), (x1, y1) in pairwise(line["points"]):
        assert abs(x0 - x1) < 0.6 or abs(y0 - y1) < 0.6, (line["writer"], line["reader"])
        yield min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1


@pytest.mark.parametrize("name", PLANS)
def test_nothing_lies_on_anything_else(draw, name):
    made = PLANS[name]()
    drawn = draw(made)
    nodes = {node["stage"]: area(node) for node in drawn["nodes"]}
    boxes = nodes | {f"server {server['name']}": area(server) for server in drawn["servers"]}
    for one, other in combinations(boxes, 2):
        assert not meet(boxes[one], boxes[other]), (one, other)
    for left, top, right, bottom in boxes.values():
        assert left >= 0 and top >= 0 and right <= drawn["width"] and bottom <= drawn["height"]
    for line in drawn["lines"]:
        (start, *_), (*_, end) = line["points"], line["points"]
        for (x, y), box in ((start, boxes[line["writer"]]), (end, boxes[line["reader"]])):
            assert min(abs(x - box[0]), abs(x - box[2])) < 1 and box[1] <= y <= box[3], line
        for piece in pieces(line):
            inside = [piece[0] + 2, piece[1], piece[2] - 2, piece[3]]
            assert not [box for box, where in boxes.items() if meet(inside, where)], line
    for one, other in combinations(drawn["lines"], 2):
        for p in pieces(one):
            for q in pieces(other):
                along = min(p[2], q[2]) - max(p[0], q[0]), min(p[3], q[3]) - max(p[1], q[1])
                assert min(along) <= 0 or max(along) < 12, (one, other)


@pytest.mark.parametrize("name", PLANS)
def test_groups_hold_their_stages_and_no_others(draw, name):
    made = PLANS[name]()
    drawn = draw(made)
    for group in drawn["groups"]:
        box = area(group)
        for node in drawn["nodes"]:
            on = made.stage(node["stage"]).groups == (group["name"],)
            inside = meet(box, area(node))
            assert inside == on, (group["name"], node["stage"])


@pytest.mark.parametrize("name", PLANS)
def test_it_fits_a_page_and_its_text_keeps_its_size(draw, name):
    drawn = draw(PLANS[name]())
    assert drawn["width"] <= ROOM and drawn["height"] <= 640
    narrow = draw(PLANS[name](), 360)
    assert narrow["height"] <= 640 and narrow["wide"] >= 100  # wider than a phone: it scrolls sideways only


def test_every_line_has_the_fields_of_its_edges_and_servers_are_joined(draw):
    made = served()
    drawn = draw(made)
    fields = {(line["writer"], line["reader"], field) for line in drawn["lines"] for field in line["fields"]}
    assert fields == {(e.writer, e.reader, e.field) for e in made.edges if e.reader != "samples"}
    assert [line["reader"] for line in drawn["lines"] if line["writer"] == "refit" and line["back"]] == ["rollout"]
    assert [line["writer"] for line in drawn["lines"] if line["reader"] == "server envs"] == ["rollout"]
    (server,) = drawn["servers"]
    assert server["title"] == "envs · 3 workers, 6 CPUs"


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"gpus": 8, "workers": 8}, "a · 8 workers, 8 GPUs"),
        ({"gpus": 1}, "a · 1 GPU"),
        ({"gpus": 4, "workers": 4, "colocated": "b"}, "a · 4 workers, 4 GPUs of b"),
        ({"cpus": 1.5, "workers": 2}, "a · 2 workers, 3 CPUs"),
    ],
)
def test_a_group_names_its_devices(draw, changes, title):
    made = simulated(steps=1)[0]
    (first, *others) = made.groups
    assert isinstance(first, PlacedGroup)
    first = msgspec.structs.replace(first, name="a", **changes)
    stages = tuple(
        msgspec.structs.replace(stage, groups=tuple("a" if g == made.groups[0].name else g for g in stage.groups))
        for stage in made.stages
    )
    made = msgspec.structs.replace(made, groups=(first, *others), stages=stages)
    assert title in [group["title"] for group in draw(made)["groups"]]
