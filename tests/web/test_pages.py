"""The pages in a real browser: content, themes and sizes, keyboard use, and hostile model output."""

import os
import re
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote, urlsplit

import msgspec
import pytest

from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.unit.records import simulated
from tests.web.folders import append, episodes_of, run_of, written
from tests.web.hostile import HOSTILE
from tests.web.serving import serving

pytestmark = pytest.mark.journal_expected
PAGES = ("graph", "timeline", "staleness", "metrics", "samples", "compare")
SIZES = {
    "desk": {"width": 1280, "height": 720},
    "phone": {"width": 390, "height": 844},
    "tablet": {"width": 820, "height": 1180},
}
WAIT_MS = 60_000
ODD = """.lr 0.001 \u00e9%41&?'"+<b>#~"""  # a name that a folder may have


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_of(folder / "ahead", steps=12, sampler=2, max_staleness=2, on_stale="drop", refit="in_flight")
    run_of(folder / "plain", steps=6)
    episodes_of(folder / "episodes", steps=6)
    plan, events = simulated(steps=6)
    failed = trace.Failed(stage="train", step=1, error="it broke", problems=("train: it broke",), at_s=1e3)
    written(folder / "broken", plan, [*events[:60], failed])
    exploded = trace.Diverged(
        step=1, kind="loss", metric="train/loss", value=9e9, before=0.1, problem="train/loss is 9e+09", at_s=4.0
    )
    written(folder / "diverged", plan, [*events[:60], exploded, *events[60:]])
    run_of(folder / ODD, steps=2)
    written(folder / "hostile", *simulated(steps=2), texts=["<script>window.hit=1</script>", *HOSTILE])
    return folder


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as made:
        yield made


@pytest.fixture
def opened(browser, served):
    """Opens a page of a run; requests to other hosts and browser errors fail the test."""
    contexts, wrong = [], []

    def open_(run, page="graph", size="desk", theme="light", **options):
        context = browser.new_context(viewport=SIZES[size], color_scheme=theme, **options)
        contexts.append(context)
        context.route(re.compile(".*"), lambda route: judge(route, wrong))
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        tab.on("dialog", lambda dialog: wrong.append(dialog.message))
        tab.goto(served.address)
        tab.goto(f"{served.address.partition('?')[0]}#/{run}/{page}")
        tab.wait_for_selector(f".tabs a[href='#/{run}/{page}'][aria-current=page]", timeout=WAIT_MS)
        tab.wait_for_selector("main[aria-busy=false] :is(.card, table)", timeout=WAIT_MS)
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert not wrong


def test_a_run_may_have_any_name_of_a_folder(opened, served, tmp_path):
    tab = opened("plain", "metrics")
    tab.evaluate("odd => { location.hash = `#/plain/metrics?with=${encodeURIComponent(odd)}` }", ODD)
    tab.wait_for_selector(f"ul[aria-label=Runs] >> text={ODD}", timeout=WAIT_MS)
    tab.click("header >> text=Sluice")
    tab.click(f"text={ODD}")
    for page in ("timeline", "metrics", "samples", "compare", "graph"):
        tab.click(f".tabs >> text={page}")
        tab.wait_for_selector("main[aria-busy=false] :is(.card, table, select)", timeout=WAIT_MS)
        assert not tab.locator("[role=alert]").count(), page
        tab.reload()
        tab.wait_for_selector("main[aria-busy=false] :is(.card, table, select)", timeout=WAIT_MS)
    tab.click("text=Export")
    with tab.expect_download() as kept:
        tab.click("text=Spans, CSV")
    assert kept.value.suggested_filename.endswith(".csv") and Path(kept.value.path()).read_text().count("\n") > 9
    file = tmp_path / "run.html"
    file.write_bytes(served.ask(f"/api/runs/{quote(ODD, safe='')}/export/html")[2])
    tab.goto(file.as_uri())
    tab.wait_for_selector("main[aria-busy=false] .legend", timeout=WAIT_MS)
    tab.click(".tabs >> text=samples")
    tab.wait_for_selector("main[aria-busy=false] :is(.card, table)", timeout=WAIT_MS)
    assert not tab.locator("[role=alert]").count()


def judge(route, wrong):
    url = urlsplit(route.request.url)
    if url.scheme in ("data", "file") or url.hostname == "127.0.0.1":
        return route.continue_()
    wrong.append(f"asked for {route.request.url}")
    return route.abort()


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        ("desk", "light"),
        ("phone", "dark"),
        pytest.param("desk", "dark", marks=pytest.mark.search),
        pytest.param("phone", "light", marks=pytest.mark.search),
        pytest.param("tablet", "light", marks=pytest.mark.search),
        pytest.param("tablet", "dark", marks=pytest.mark.search),
    ],
)
def test_every_page_is_accessible_and_fits(opened, size, theme):
    from axe_playwright_python.sync_playwright import Axe

    tab = opened("ahead", size=size, theme=theme)
    more = (("episodes", "timeline"), ("episodes", "samples"), ("plain", "graph"))
    for run, page in (*(("ahead", page) for page in PAGES), *more):
        tab.evaluate(f"location.hash = '#/{run}/{page}'")
        tab.wait_for_selector(f".tabs a[href='#/{run}/{page}'][aria-current=page]", timeout=WAIT_MS)
        tab.wait_for_timeout(400)
        tab.wait_for_selector("main[aria-busy=false] :is(.card, table, select)", timeout=WAIT_MS)
        if page == "compare":
            tab.select_option("#other", "plain")
            tab.wait_for_selector(".metric canvas", timeout=WAIT_MS)
        if page == "samples":
            tab.click("text=Shade unlikely tokens")
        if page == "samples" and run == "ahead":
            tab.select_option("#against", label="with step 5")
            tab.wait_for_selector(".differences", timeout=WAIT_MS)
        if page == "metrics":
            tab.evaluate("location.hash += '?smooth=0.6&with=plain'")
            tab.wait_for_selector("ul[aria-label=Runs]", timeout=WAIT_MS)
        if page == "graph":
            tab.wait_for_selector(".hints, .legend", timeout=WAIT_MS)
        if (run, page) == ("plain", "graph"):
            tab.evaluate("location.hash += '?stage=rollout'")
            tab.wait_for_selector(".panel", timeout=WAIT_MS)
        if kept := os.environ.get("SLUICE_ARTEFACTS"):
            tab.screenshot(path=Path(kept) / f"{page}-{size}-{theme}.png", full_page=True)
        found = Axe().run(tab)
        assert not found.response["violations"], (page, found.generate_report())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), page
        assert tab.evaluate(SMALL) == [], page
        if size == "phone":
            assert tab.locator("header.top").bounding_box()["height"] < 80
            assert tab.evaluate("document.querySelector('.tabs').scrollWidth <= innerWidth"), page
        if page == "graph":
            graph = tab.locator(".drawing")
            assert graph.evaluate("one => one.scrollHeight <= one.clientHeight"), size  # it scrolls sideways only
            if size == "desk":
                assert graph.evaluate("one => one.scrollWidth <= one.clientWidth")


SMALL = """[...document.querySelectorAll('body *')].filter((one) => parseFloat(getComputedStyle(one).fontSize) < 12
  && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim())).map((one) => one.outerHTML)"""


def test_a_chart_says_the_values_under_the_pointer_of_several_runs(opened):
    tab = opened("ahead", "metrics")
    card = tab.locator("article", has=tab.locator("code", has_text=re.compile("^reward/mean$")))
    readout = card.locator(".readout")
    says = "([one, words]) => one.innerText.split(/\\s+/).join(' ') === words"

    def said(words):
        tab.wait_for_function(says, arg=[readout.element_handle(), words], timeout=WAIT_MS)

    said("step 12 1.100")
    over = card.locator(".u-over")
    wide = over.bounding_box()["width"]
    over.hover(position={"x": wide * 6 / 12, "y": 20})
    said("step 6 0.500")
    tab.click("text=Other runs")
    tab.check("label:has-text('plain') input")
    tab.wait_for_selector("ul[aria-label=Runs] >> text=plain", timeout=WAIT_MS)
    tab.keyboard.press("Escape")
    over.hover(position={"x": wide - 1, "y": 20})
    said("step 12 ahead 1.100 plain \u2013")
    tab.mouse.move(0, 0)
    said("last ahead 1.100 plain 0.500")
    tab.fill("#smooth", "0.5")
    tab.wait_for_function("() => location.hash.includes('smooth=0.5')")
    tab.reload()
    said("last smoothed ahead 1.000 plain 0.410")  # the steps before weigh half as much each


def test_ticks_and_smoothing(opened):
    chart = "async ([name, ...given]) => (await import('/static/chart.js'))[name](...given)"
    tab = opened("plain", "metrics")

    def texts(values, each, unit=""):
        return tab.evaluate(chart, ["tickTexts", values, each, unit])

    assert texts([0, 0.05, 0.1], 0.05) == ["0", "0.05", "0.10"]
    assert texts([0.25, 0.5], 0.25) == ["0.25", "0.50"]
    assert texts([0, 20, 40], 20) == ["0", "20", "40"]
    assert texts([0.995, 0.9955], 0.0005) == ["0.9950", "0.9955"]
    assert texts([0, 2e-5], 1e-5) == ["0", "2.0e-5"]
    assert texts([0, 0.005, 0.01], 0.005, "%") == ["0.0 %", "0.5 %", "1.0 %"]
    assert texts([0, 1 << 21], 1 << 20, "bytes") == ["0 B", "2.0 MiB"]
    assert texts([0, 0.5], 0.5, "s") == ["0 s", "0.5 s"]
    assert tab.evaluate(chart, ["smoothed", [1, None, 3], 0]) == [1, None, 3]
    assert tab.evaluate(chart, ["smoothed", [1, None, 4], 0.5]) == [1, None, 3]
    for low, high, unit, axis in (
        (0, 0, "", [0, 1]),
        (0, 0, "%", [0, 0.01]),
        (0, 0, "bytes", [0, 1024]),
        (1000, 1000, "", [900, 1100]),
        (-2, -2, "", [-2.2, -1.8]),
        (None, None, "", [0, 1]),
    ):
        assert tab.evaluate(chart, ["ends", low, high, unit]) == axis
    low, high = tab.evaluate(chart, ["ends", 3, 7, ""])
    assert 2 < low <= 3 and 7 <= high < 8
    runs = [{"steps": [1, 3], "values": [1, 3]}, {"steps": [2, 3], "values": [20, 30]}]
    assert tab.evaluate(chart, ["joined", runs]) == [[1, 2, 3], [[1, None, 3], [None, 20, 30]]]


@pytest.mark.parametrize(
    ("page", "question", "answer"),
    [
        ("graph", "Why is a step as slow as it is?", r"-bound: \d+ % of the step"),
        ("graph", "What would make it faster?", r"\d\.\d\d .|No single change|there are no hints"),
        ("graph", "What do workers wait for?", r"idle \d+"),
        (
            "staleness",
            "How stale were the samples?",
            r"versions old on average and \d at most, none above the bound of 2",
        ),
        ("staleness", "What was dropped?", r"\d+ groups were sampled and never trained"),
        ("staleness", "Dropped, step by step", r"Steps 1 to 12"),
        ("metrics", "Is it learning?", r"It learns: mean reward 0\.\d+ at first"),
    ],
)
def test_pages_answer_in_words(opened, page, question, answer):
    card = opened("ahead", page).locator("section.card", has_text=question).first
    card.get_by_text(re.compile(answer)).first.wait_for(timeout=WAIT_MS)


def test_the_graph_marks_the_critical_path_and_its_share(opened, served):
    """A line is on the path if its stages follow each other in at least half of the steps; a node has a share."""
    found = msgspec.json.decode(served.ask("/api/runs/ahead/findings")[2])
    stages = [span[0] for path in found["paths"] for span in path["spans"] if span[0] != "no stage"]
    pairs = Counter(f"{a}>{b}" for a, b in pairwise(stages) if a != b)
    often = {pair for pair, count in pairs.items() if count >= len(found["paths"]) / 2}
    tab = opened("ahead")
    tab.wait_for_selector(".edge.on", state="attached", timeout=WAIT_MS)
    lines = tab.locator(".edge[data-line]").evaluate_all("all => all.map(one => one.dataset.line)")
    drawn = tab.locator(".edge.on").evaluate_all("all => all.map(one => one.dataset.line)")
    assert sorted(drawn) == sorted(often & set(lines)) and "train>refit" in drawn
    width = "one => getComputedStyle(one.querySelector('path')).strokeWidth"
    assert tab.locator(".edge.on").first.evaluate(width) == "3px"
    assert tab.locator(".edge:not(.on)").first.evaluate(width) == "1.5px"
    by_stage = found["report"]["critical_path"]["by_stage"]
    share = 100 * by_stage["rollout"] / sum(by_stage.values())
    assert tab.inner_text(".node[data-stage=rollout] .spent b") == f"{share:.0f} %"
    shown = tab.locator(".node.on").evaluate_all("all => all.map(one => one.dataset.stage)")
    least = 0.005 * sum(by_stage.values())
    assert sorted(shown) == sorted(name for name, spent in by_stage.items() if spent >= least and name != "no stage")
    edge = "one => getComputedStyle(one).borderColor"
    assert tab.locator(".node.on").first.evaluate(edge) != tab.locator(".node:not(.on)").first.evaluate(edge)


def test_a_node_opens_its_parts_and_they_lead_to_other_pages_and_back(opened, served):
    tab = opened("plain")
    panel = tab.locator("section[aria-label='Stage rollout']")
    node = tab.locator(".node[data-stage=rollout]")
    node.focus()
    tab.keyboard.press("Enter")
    panel.wait_for()
    assert tab.url.endswith("#/plain/graph?stage=rollout")
    assert "toy.py" in panel.inner_text() and "prompt from prompts" in panel.inner_text()
    tab.keyboard.press("Escape")
    panel.wait_for(state="detached")
    assert node.evaluate("one => one === document.activeElement")
    for key, stage in (
        ("ArrowRight", "ref"),
        ("ArrowUp", "logprobs"),
        ("ArrowRight", "train"),
        ("ArrowRight", "refit"),
    ):
        tab.keyboard.press(key)
        assert tab.evaluate("document.activeElement.dataset.stage") == stage, key
    node.click()
    panel.wait_for()
    tab.mouse.click(900, 705)
    panel.wait_for(state="detached")
    node.click()
    tab.reload()
    panel.wait_for(timeout=WAIT_MS)
    panel.get_by_role("link", name="prompts").click()
    tab.locator("section[aria-label='Stage prompts']").wait_for()
    tab.go_back()
    panel.wait_for()
    panel.get_by_role("link", name="step 6", exact=True).first.click()
    tab.wait_for_selector("p[aria-live]:has-text('rollout, step 6, ')")
    tab.reload()
    tab.wait_for_selector("p[aria-live]:has-text('rollout, step 6, ')", timeout=WAIT_MS)
    tab.click("p[aria-live] >> text=Samples of step 6")
    tab.wait_for_selector("#step >> nth=0", timeout=WAIT_MS)
    assert tab.locator("#step").input_value() == "5"
    tab.locator(".response").first.get_by_role("link", name="Link").click()
    assert re.search(r"#/plain/samples\?step=6&sample=0+5_g000$", tab.url)
    tab.reload()
    tab.wait_for_selector(".response.chosen", timeout=WAIT_MS)
    tab.locator(".response.chosen").get_by_role("link", name="Timeline").click()
    tab.wait_for_selector("canvas", timeout=WAIT_MS)
    assert tab.url.endswith("#/plain/timeline?step=6&find=00000005_g000")
    assert re.match(r"[1-9]\d* tasks; Enter", tab.inner_text("#seek ~ [role=status]"))
    ran = [event for _, event in trace.read(served.folder / "plain" / "events.jsonl") if isinstance(event, trace.Ran)]
    group = next(event.groups[0] for event in ran if event.step == 5)
    here = [event for event in ran if event.step == 5 and group in event.groups]
    each = (max(event.end_s for event in here) - min(event.start_s for event in here)) / 10
    matched = [min(event.start_s for event in here) - each, max(event.end_s for event in here) + each]
    tab.evaluate("group => { location.hash = `#/plain/timeline?step=6&find=${group}` }", group)
    tab.reload()
    tab.wait_for_selector("canvas", timeout=WAIT_MS)
    assert view_of(tab) == pytest.approx(matched, abs=0.02)


def view_of(tab):
    """Return the start and end of the timeline in seconds."""
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1}
    found = re.search(r", ([\d.]+) (\S+) to ([\d.]+) (\w+)\. Arrows", tab.get_attribute("canvas", "aria-label"))
    return [float(found[1]) * units[found[2]], float(found[3]) * units[found[4]]]


def test_what_a_page_shows_is_in_its_address(opened):
    tab = opened("ahead", "samples")
    length = tab.evaluate("history.length")
    tab.click("text=Shade unlikely tokens")
    tab.click("text=Look through all kept samples")
    tab.reload()
    tab.wait_for_selector("text=never got any", timeout=WAIT_MS)
    assert tab.get_attribute("text=Shade unlikely tokens", "aria-pressed") == "true"
    tab.goto(f"{tab.url.partition('#')[0]}#/ahead/timeline")
    tab.wait_for_selector("canvas")
    before = view_of(tab)
    tab.evaluate("window.wrote = 0; addEventListener('hashchange', () => { window.wrote += 1; })")
    tab.click("text=Whole run")
    for _ in range(5):
        tab.click("button[aria-label='Zoom in']")
    tab.wait_for_function("() => location.hash.includes('from=')")
    moved = view_of(tab)
    assert moved != before and tab.evaluate("window.wrote") < 5
    tab.reload()
    tab.wait_for_selector("canvas", timeout=WAIT_MS)
    assert view_of(tab) == moved
    assert tab.evaluate("history.length") == length + 1  # one page, no step for what was turned and moved
    tab.evaluate("location.hash = '#/ahead/timeline?from=1&to=x'")
    tab.evaluate("location.hash = '#/ahead/timeline?from=2&to=3'")
    tab.wait_for_selector("canvas[aria-label*=' 2.00 s to 3.00 s']")
    tab.evaluate("location.hash = '#/ahead/compare'")
    tab.select_option("#other", "plain")
    tab.wait_for_function("() => location.hash.endsWith('compare?other=plain')")
    tab.reload()
    tab.wait_for_selector("text=What is different?", timeout=WAIT_MS)
    assert tab.input_value("#other") == "plain"


def test_a_step_that_is_none_shows_the_last_one_and_says_so(opened):
    tab = opened("hostile", "samples")
    for step in ("abc", "0", "2.5", "1e400", "-1"):
        tab.evaluate("step => { location.hash = `#/hostile/samples?step=${step}&against=x` }", step)
        said = f"There is no step “{step}”: these are the samples of step 2, the last one that has any."
        tab.wait_for_selector(f"main [role=alert]:has-text('{said}')")
        assert tab.locator("#step").input_value() == "1" and tab.locator(".response").count()


def test_menus_and_what_is_chosen_close_at_esc_and_elsewhere(opened):
    tab = opened("ahead", "metrics")
    for menu in ("Export", "Other runs"):
        for close in (lambda: tab.keyboard.press("Escape"), lambda: tab.mouse.click(1270, 700)):
            tab.click(f"button:text('{menu}')")
            tab.wait_for_selector(".menu > ul")
            tab.evaluate("document.activeElement.blur()")
            close()
            tab.wait_for_selector(".menu > ul", state="detached")
    tab.evaluate("location.hash = '#/ahead/timeline'")
    for close in (lambda: tab.keyboard.press("Escape"), lambda: tab.click("text=What happened?")):
        tab.focus("canvas")
        tab.keyboard.press("]")
        tab.wait_for_function("() => location.hash.includes('span=')")
        tab.evaluate("document.activeElement.blur()")
        close()
        tab.wait_for_function("() => !location.hash.includes('span=')")


def test_the_timeline_stays_in_the_run_and_finds_stages_and_samples(opened, served):
    tab = opened("plain", "timeline")
    whole = re.compile(r" 0 µs to .*")
    tab.focus("canvas")
    tab.keyboard.press("Home")
    tab.wait_for_function("() => document.querySelector('canvas').ariaLabel.includes(' 0 µs to ')")
    (run,) = whole.findall(tab.get_attribute("canvas", "aria-label"))
    for key in ("-", "-", "ArrowLeft", "ArrowRight"):
        tab.keyboard.press(key)
    tab.wait_for_timeout(100)
    assert whole.findall(tab.get_attribute("canvas", "aria-label")) == [run]
    view = "async ([view, clock]) => (await import('/static/lanes.js')).bounded(view, clock)"
    assert tab.evaluate(view, [[-5, 25], 10]) == [0, 10]
    assert tab.evaluate(view, [[8, 12], 10]) == [6, 10]
    start, end = tab.evaluate(view, [[5, 5.0001], 10])
    assert 0.00099 < end - start < 0.00101 and start < 5 < end
    shows = "p[aria-live]:has-text('{}, step')"
    events = trace.read(served.folder / "plain" / "events.jsonl")
    ran = [event for _, event in events if isinstance(event, trace.Ran)]
    tasks = sum("refi" in event.stage for event in ran)
    tab.fill("#seek", "refi")
    tab.wait_for_selector(f"#seek ~ [role=status]:has-text('{tasks} tasks')")
    tab.press("#seek", "Enter")
    tab.wait_for_selector(shows.format("refit"))
    tab.reload()
    tab.wait_for_selector(shows.format("refit"), timeout=WAIT_MS)
    assert tab.input_value("#seek") == "refi"
    tasks = sum(7 in event.groups for event in ran)
    tab.fill("#seek", "00000007_g001")
    tab.wait_for_selector(f"#seek ~ [role=status]:has-text('{tasks} tasks')")
    tab.fill("#seek", "nothing")
    tab.wait_for_selector("#seek ~ [role=status]:has-text('0 tasks')")
    tab.press("#seek", "Enter")


def test_samples_are_chosen_by_reward_and_compared_with_another_step(opened):
    tab = opened("hostile", "samples")
    tab.wait_for_selector(".response", timeout=WAIT_MS)
    every = tab.locator(".response").count()
    tab.select_option("#reward", "some")
    tab.wait_for_function("every => document.querySelectorAll('.response').length < every", arg=every)
    rewards = tab.locator(".response footer b").all_inner_texts()
    assert rewards and set(rewards) == {"1"}
    tab.reload()
    tab.wait_for_selector(".response", timeout=WAIT_MS)
    assert tab.locator(".response").count() == len(rewards) and tab.input_value("#reward") == "some"
    tab.select_option("#against", label="with step 1")
    card = tab.locator("section.card", has_text="From step 1 to step 2")
    card.get_by_text("1 prompt in both: mean reward is higher for 0, lower for 0.").wait_for(timeout=WAIT_MS)
    assert tab.evaluate("window.hit") is None
    words = "async texts => (await import('/static/difference.js')).compared(...texts)"
    assert tab.evaluate(words, ["the sum is 4", "the sum is <b>5"]) == [
        ["both", "the sum is "], ["first", "4"], ["second", "<b>5"],
    ]  # fmt: skip
    rows = [{"prompt": "p", "reward": reward, "response": str(reward)} for reward in (0, 1)]
    both = "async ([a, b]) => (await import('/static/difference.js')).pairs(a, b)"
    assert tab.evaluate(both, [rows, [rows[1], {"prompt": "q", "reward": 1}]]) == [
        {"prompt": "p", "before": {"mean": 0.5, "text": "1"}, "after": {"mean": 1, "text": "1"}}
    ]


def test_samples_show_what_a_stage_wrote(opened):
    tab = opened("plain", "samples")
    tab.wait_for_selector(".response footer", timeout=WAIT_MS)
    assert tab.locator(".response .text").count() > 0 and "reward" in tab.inner_text(".response footer >> nth=0")
    tab.select_option("#stage", "reward")
    tab.wait_for_selector(".response .text", state="detached", timeout=WAIT_MS)
    assert "reward" in tab.inner_text(".response footer >> nth=0") and "stage=reward" in tab.url
    tab.select_option("#stage", "rollout")
    tab.wait_for_selector(".response .text", timeout=WAIT_MS)
    assert "reward" not in tab.inner_text(".response footer >> nth=0")
    assert "prompts" in tab.inner_text("#stage") and "refit" not in tab.inner_text("#stage")


def test_refits_samples_and_prompts_are_found_where_the_readme_says(opened):
    tab = opened("ahead")
    tab.click(".node >> text=refit")
    assert re.search(r"version 12, .* ago", tab.inner_text("section[aria-label='Stage refit']"))
    tab.click("text=Samples")
    tab.click("text=Look through all kept samples")
    tab.wait_for_selector("text=never got any", timeout=WAIT_MS)


def test_unlikely_tokens_are_marked(opened):
    """Each token here is 0.25 nats less likely than the previous one."""
    tab = opened("hostile", "samples")
    tab.click("text=Shade unlikely tokens")
    tab.wait_for_selector(".response .token", timeout=WAIT_MS)
    found = "all => all.map(one => [one.textContent, one.title, getComputedStyle(one).backgroundColor])"
    tokens = tab.eval_on_selector_all(".response:first-child .token", found)
    (strongest,) = tab.eval_on_selector_all(".legendline .token", found)
    assert "".join(text for text, _, _ in tokens) == HOSTILE[0]
    assert [title for _, title, _ in tokens[:2]] == ["100 % (0 nats)", "78 % (-0.25 nats)"]
    colours = [colour for _, _, colour in tokens]
    assert len(set(colours[:19])) == 19 and colours[0].endswith("/ 0)")
    assert colours[19] == colours[20] == strongest[2]


def test_episodes_show_what_they_wait_for(opened):
    """Where the strip is full, both are sampled; later, one is sampled and the other's environment works; then none."""
    tab = opened("episodes")
    card = tab.locator("section.card", has_text="How do episodes spend their time?")
    card.get_by_text(re.compile(r"for 2\d(\.\d)? % of the time, all wait for environments")).wait_for(timeout=WAIT_MS)
    tab.get_by_text("environments, for which all episodes of rollout wait").wait_for(timeout=WAIT_MS)
    path = tab.locator("section.card", has_text="Why is a step as slow as it is?")
    assert re.search(r"rollout\n.*\n.*\n(generate|environment)\n", path.inner_text())
    tab.click("text=Timeline")
    tab.wait_for_selector("ul[aria-label=Episodes]")
    tab.click("text=Whole run")
    box = tab.locator("canvas").bounding_box()
    told = set()
    for x in range(130, int(box["width"]), 4):
        tab.locator("canvas").hover(position={"x": x, "y": 26 + 20 + 30})
        told |= {tip.partition("\n")[2] for tip in tab.locator(".tip").all_inner_texts()}
    assert told == {"8 generate", "4 generate\n4 environment", "4 environment\n4 process"}


def test_turns_are_folded_and_what_the_policy_did_not_draw_is_grey(opened):
    tab = opened("episodes", "samples")
    first = tab.locator(".response").first
    first.wait_for(timeout=WAIT_MS)
    assert first.locator("details").evaluate_all("all => all.map(one => one.open)") == [False, True]
    texts = first.locator("details .text").evaluate_all("all => all.map(one => one.textContent)")
    assert texts == ["17*23=", "391><b>391</b>"]
    grey = first.locator(".inserted").evaluate_all("all => all.map(one => one.textContent)")
    assert "".join(grey) == "391>" and "end answered" in first.inner_text().replace("\n", " ")
    assert "reward -0.5" in first.locator("summary").first.inner_text()
    tab.select_option("#end", "failed")
    assert tab.locator(".response").count() == 1
    assert "failed:0:ValueError" in tab.locator(".response footer").inner_text()
    tab.click("text=Shade unlikely tokens")
    assert tab.locator(".response .token").count() == 4


def test_odd_rows_are_shown_as_far_as_they_go_and_a_page_that_breaks_stops_no_other(opened, served):
    file = served.folder / "plain" / "samples" / "step_000002.jsonl"
    row = msgspec.json.decode(file.read_bytes().splitlines()[0])
    odd = {"turn_ends": "abc", "turn_rewards": 1, "tokens": 3, "reward": "nan", "group": 7, "key": [1], "response": {}}
    file.write_bytes(b"".join(msgspec.json.encode(row | {name: value}) + b"\n" for name, value in odd.items()))
    tab = opened("plain", "samples")
    tab.evaluate("location.hash += '?step=2'")
    tab.wait_for_function("count => document.querySelectorAll('.response').length === count", arg=len(odd))
    rewards = tab.locator(".response footer b").all_inner_texts()
    assert rewards.count("nan") == 1 and len(set(rewards)) == 2
    tab.route("**/samples?step=2", lambda route: route.fulfill(json={"steps": [2], "step": 2, "rows": [None]}))
    tab.evaluate("location.hash = '#/plain/samples?step=3'")
    tab.wait_for_selector("main [role=alert]:has-text('This page cannot be drawn: ')")
    tab.click("text=Graph")
    tab.wait_for_selector(".node")
    assert tab.locator("main [role=alert]").count() == 0


def test_a_failed_run_says_what_failed(opened, served):
    tab = opened("broken")
    assert "train: it broke" in tab.inner_text("[role=alert]")
    assert tab.locator(".node.failed").count() == 1
    assert f"--run-dir {served.folder}/broken --resume" in tab.inner_text("[role=alert]")
    assert "Resume from the start: no checkpoint was written yet" in tab.inner_text("[role=alert]")
    RunDir(served.folder / "broken").checkpoint(3).mkdir()
    tab.reload()
    tab.wait_for_selector("[role=alert] >> text=Resume from step 3", timeout=WAIT_MS)
    tab.click("text=Timeline")
    assert "it broke" in tab.inner_text("section[aria-label='What happened?']")


def test_a_run_that_diverges_says_so_above_every_page(opened):
    tab = opened("diverged")
    assert "train/loss is 9e+09" in tab.inner_text(".alert")
    tab.click("text=Timeline")
    assert "train/loss is 9e+09" in tab.inner_text(".alert")
    assert "diverged train/loss is 9e+09" in tab.inner_text("section[aria-label='What happened?']")


def test_whatever_a_model_wrote_is_text(opened):
    tab = opened("hostile", "samples")
    tab.wait_for_selector(".response", timeout=WAIT_MS)
    shown = tab.eval_on_selector_all(".response .text", "all => all.map(one => one.textContent)")
    assert shown == HOSTILE and len(HOSTILE) >= 100
    tab.click("text=Shade unlikely tokens")
    tab.wait_for_selector(".response .token", timeout=WAIT_MS)
    assert tab.eval_on_selector_all(".response .text", "all => all.map(one => one.textContent)") == HOSTILE
    tab.wait_for_timeout(300)
    assert tab.evaluate("window.hit") is None
    assert tab.url.startswith("http://127.0.0.1")


def test_the_keyboard_is_enough(opened):
    tab = opened("ahead")
    for _ in range(30):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.classList.contains('node')"):
            break
    name = tab.evaluate("document.activeElement.getAttribute('aria-label')").partition(":")[0]
    tab.keyboard.press("Enter")
    tab.wait_for_selector(f"section[aria-label='Stage {name}']")
    tab.evaluate("location.hash = '#/ahead/timeline'")
    tab.focus("canvas")
    before = tab.get_attribute("canvas", "aria-label")
    tab.keyboard.press("Home")
    tab.wait_for_function("before => document.querySelector('canvas').ariaLabel !== before", arg=before)
    tab.keyboard.press("]")
    tab.wait_for_selector("text=/, step \\d+, .* groups, /")


EARLY = """new MutationObserver((_, watch) => {
  if (document.querySelector("header.top")) { watch.disconnect(); location.hash = "#/plain/graph"; }
}).observe(document, { childList: true, subtree: true });"""


def test_an_address_that_changes_while_the_page_is_being_built_is_not_missed(browser, served):
    tab = browser.new_page()
    tab.add_init_script(EARLY)
    tab.goto(served.address)
    tab.wait_for_selector(".node", timeout=WAIT_MS)
    tab.close()


def test_an_address_that_cannot_be_shows_the_runs_and_says_so(opened):
    tab = opened("plain")
    tab.evaluate("location.hash = '#/%'")
    tab.wait_for_selector("main [role=alert]:has-text('There is no page at #/%')")
    tab.wait_for_selector("main table >> text=plain")
    tab.click("main table >> text=plain")
    tab.wait_for_selector(".node")
    assert tab.locator("main [role=alert]").count() == 0
    tab.evaluate("location.hash = '#/plain/nosuchpage'")
    tab.wait_for_selector("main [role=alert]:has-text('There is no page “nosuchpage”: this is the graph.') ~ .graph")


def test_a_live_run_is_followed_through_a_reload_to_its_end(browser, tmp_path):
    plan, events = simulated(steps=5)
    third = len(events) // 3
    run_dir = written(tmp_path / "live", plan, events[:third])
    with serving(tmp_path) as served:
        tab = browser.new_page()
        tab.goto(served.address)
        tab.goto(f"{served.address.partition('?')[0]}#/live/graph")
        tab.wait_for_selector(".pill.running", timeout=WAIT_MS)
        append(run_dir, events[third : 2 * third])
        steps = sum(isinstance(event, trace.StepEnded) and event.step >= 0 for event in events[: 2 * third])
        tab.wait_for_selector(f".status b >> text='{steps}'", timeout=WAIT_MS)
        tab.reload()
        tab.wait_for_selector(f".status b >> text='{steps}'", timeout=WAIT_MS)
        append(run_dir, events[2 * third :])
        tab.wait_for_selector(".pill.finished", timeout=WAIT_MS)
        with run_dir.events.open("a") as file:
            file.write("garbage\n")
        damaged = "main[aria-busy=false] [role=alert]:has-text('events.jsonl: it cannot be read')"
        tab.wait_for_selector(damaged, timeout=WAIT_MS)
        assert tab.locator(".node").count() > 5  # what was read stays
        tab.reload()
        tab.wait_for_selector(damaged, timeout=WAIT_MS)
        assert "Reading" not in tab.inner_text("main") and not tab.locator(".status").count()
        tab.close()


def test_a_node_says_what_its_open_episodes_wait_for(browser, tmp_path):
    plan, events = simulated(steps=2)
    begun = 1 + next(n for n, one in enumerate(events) if isinstance(one, trace.Submitted) and one.stage == "rollout")
    counts = {"environment": 30, "process": 11, "generate": 23}
    run_dir = written(tmp_path / "live", plan, events[:begun])
    with serving(tmp_path) as served:
        tab = browser.new_page()
        tab.goto(served.address)
        tab.goto(f"{served.address.partition('?')[0]}#/live/graph")
        node = tab.locator(".node", has_text="rollout")
        node.locator("text=▶ step 1").wait_for(timeout=WAIT_MS)
        append(run_dir, [trace.OpenSamples(stage="rollout", parts=counts, at_s=1.0)])
        tab.wait_for_selector("[aria-label='rollout: 41 of 64 episodes wait for their environment']", timeout=WAIT_MS)
        assert node.locator(".why").inner_text() == "▶ 41 of 64 episodes wait for their environment"
        whole = "all => all.every(one => one.scrollHeight <= one.clientHeight && one.scrollWidth <= one.clientWidth)"
        assert node.locator(".name, .why").evaluate_all(whole)  # nothing is cut off
        body = node.bounding_box()
        for line in node.locator(".name, .why").all():
            box = line.bounding_box()
            assert body["x"] < box["x"] and box["x"] + box["width"] < body["x"] + body["width"]
            assert body["y"] < box["y"] and box["y"] + box["height"] < body["y"] + body["height"]
        node.click()
        card = tab.locator("section[aria-label='Stage rollout']")
        assert tab.locator(".depth[title='8 groups from prompts not yet taken by reward']").inner_text() == "8"
        assert "11 process: waits for a process of its environment" in card.inner_text()
        append(run_dir, events[begun:])
        tab.wait_for_selector("[aria-label='rollout: done']", timeout=WAIT_MS)
        tab.close()


def test_a_server_that_comes_back_is_found_again(browser, tmp_path):
    run_of(tmp_path / "run", steps=2)
    with serving(tmp_path) as served:
        tab = browser.new_page()
        tab.goto(served.address)
        tab.goto(f"{served.address.partition('?')[0]}#/run/graph")
        tab.wait_for_selector(".pill.finished", timeout=WAIT_MS)
    tab.wait_for_selector("text=No connection", timeout=WAIT_MS)
    assert tab.locator(".node").count() > 5
    tab.close()


def test_a_run_in_one_file_opens_without_a_server(browser, served, tmp_path):
    file = tmp_path / "run.html"
    file.write_bytes(served.ask("/api/runs/hostile/export/html")[2])
    wrong = []
    context = browser.new_context(offline=True)
    context.route(re.compile(".*"), lambda route: judge(route, wrong))
    tab = context.new_page()
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(file.as_uri())
    tab.wait_for_selector(".node", timeout=WAIT_MS)
    tab.click("text=Samples")
    tab.wait_for_selector(".response", timeout=WAIT_MS)
    assert tab.eval_on_selector_all(".response .text", "all => all.map(one => one.textContent)") == HOSTILE
    tab.click("text=Timeline")
    tab.wait_for_selector("canvas")
    assert tab.evaluate("window.hit") is None and not wrong
    context.close()


def test_a_hundred_thousand_spans_are_drawn_and_moved_through(browser, tmp_path):
    plan, events = simulated(steps=3)
    spans = [event for event in events if isinstance(event, trace.Ran)]
    base = max(span.end_s for span in spans)
    more = [
        trace.Ran(
            task=10_000 + n, stage=span.stage, step=2, attempt=0, groups=(0,), group=span.group, worker=span.worker,
            start_s=base + n * 1e-3, end_s=base + n * 1e-3 + 9e-4, cpu_s=0.0, metrics={},
        )
        for n in range(100_000)
        for span in (spans[n % len(spans)],)
    ]  # fmt: skip
    written(tmp_path / "many", plan, [*events[:-1], *more, events[-1]])
    with serving(tmp_path) as served:
        tab = browser.new_page()
        tab.goto(served.address)
        tab.goto(f"{served.address.partition('?')[0]}#/many/timeline")
        tab.wait_for_selector("canvas[aria-label^='100,']", timeout=60_000)
        tab.focus("canvas")
        for key in ("Home", "+", "ArrowRight", "+", "ArrowLeft", "-", "]", "]"):
            tab.keyboard.press(key)
        tab.wait_for_selector("text=/, step \\d+, .* groups, /", timeout=WAIT_MS)
        tab.close()


def test_hundreds_of_workers_fit_and_are_told_apart(browser, tmp_path):
    plan, events = simulated(steps=3)
    first = next(event for event in events if isinstance(event, trace.Ran) and event.group == plan.groups[0].name)
    wide = msgspec.structs.replace(plan.groups[0], workers=400)
    plan = msgspec.structs.replace(plan, groups=(wide, *plan.groups[1:]))
    ends = [event.end_s for event in events if isinstance(event, trace.Ran)]
    whole = {"start_s": min(ends), "end_s": max(ends)}
    more = [msgspec.structs.replace(first, task=10_000 + n, worker=n, **whole) for n in range(400)]
    written(tmp_path / "wide", plan, [*events[:-1], *more, events[-1]])
    with serving(tmp_path) as served:
        tab = browser.new_page()
        tab.goto(served.address)
        tab.goto(f"{served.address.partition('?')[0]}#/wide/timeline")
        tab.wait_for_selector("canvas")
        tab.click("text=Whole run")
        box = tab.locator("canvas").bounding_box()
        assert 400 * 3 < box["height"] < 2600
        told = set()
        for y in range(int(box["height"]) - 200, int(box["height"]), 3):
            tab.locator("canvas").hover(position={"x": (128 + box["width"]) / 2, "y": y})
            told |= set(tab.locator(".tip").all_inner_texts())
        assert {worker for worker in range(390, 400) if any(f" {worker}, " in tip for tip in told)} == set(
            range(390, 400)
        )
        tab.close()


def test_pages_that_go_away_leave_the_server_alone(served):
    """Dropped connections are forgotten: more than the cap, one after the other, are all served."""
    import socket

    def once():
        with socket.create_connection(("127.0.0.1", served.port), 10) as stream:
            lines = [
                "GET /api/runs/plain/events HTTP/1.1",
                f"Host: 127.0.0.1:{served.port}",
                f"Cookie: {served.cookie}",
            ]
            stream.sendall("\r\n".join([*lines, "", ""]).encode())
            return stream.recv(100)

    threads = [threading.Thread(target=once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + 120
    while b"200" not in once() and time.monotonic() < until:
        time.sleep(0.1)
    assert b"200" in once()
