"""Following a record: the rows are the same whenever and from whatever position it is read."""

import os
import socket
import subprocess

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.record import trace
from pipeline.web import pages, tail
from pipeline.web.page_rows import PageRows
from pipeline.web.tail import Record
from tests.examples import few
from tests.unit.records import records, resumed, simulated
from tests.web.folders import append, episodes_of, written

pytestmark = pytest.mark.journal_expected  # simulated records without the files of a real run


def joined(blocks) -> dict[str, list]:
    found: dict[str, list] = {name: [] for name in PageRows.__struct_fields__}
    for block in blocks:
        for name, rows in msgspec.structs.asdict(block.rows).items():
            found[name] += rows
    return found


def blocks_from(record: Record, offset: int):
    while block := record.block(offset):
        offset = block.offset
        yield block


def advanced(record: Record):
    while block := record.advance():
        yield block


@settings(max_examples=few(50), deadline=None)
@given(seed=st.integers(0, 20), at=st.floats(0, 1), size=st.sampled_from([3, 17, 2000]), again=st.booleans())
def test_a_page_that_comes_back_has_what_one_has_that_stayed(tmp_path_factory, seed, at, size, again):
    plan, events = simulated(steps=3, seed=seed)
    if again:
        events = resumed(events, len(events) // 2, events)
    run_dir = written(tmp_path_factory.mktemp("run") / "run", plan, events)
    before, tail.EVENTS = tail.EVENTS, size
    try:
        record = Record(run_dir.path)
        stayed = list(advanced(record))
        here = stayed[int(at * (len(stayed) - 1))].offset
        early = [block for block in stayed if block.offset <= here]
        assert joined([*early, *blocks_from(record, here)]) == joined(stayed) == joined(blocks_from(record, 0))
    finally:
        tail.EVENTS = before


@settings(max_examples=few(50), deadline=None)
@given(record=records(), recent=st.sampled_from([0, 3000, 1 << 20]), size=st.sampled_from([500, 4000, 1 << 20]))
def test_the_state_is_the_same_if_what_is_long_ago_is_only_skimmed(tmp_path_factory, record, recent, size):
    """Only its time may be earlier, if nothing that is decoded is as late as the last task that is not."""
    run_dir = written(tmp_path_factory.mktemp("run") / "run", *record)
    whole = Record(run_dir.path)
    stayed = joined(advanced(whole))
    before = tail.RECENT_BYTES, trace.SKIMMED_BYTES
    tail.RECENT_BYTES, trace.SKIMMED_BYTES = recent, size
    try:
        skimmed = Record.read(run_dir.path)
    finally:
        tail.RECENT_BYTES, trace.SKIMMED_BYTES = before
    now, then = skimmed.picture(), whole.picture()
    assert skimmed.offset == whole.offset and now.last <= then.last
    assert msgspec.structs.replace(now, last=then.last) == then
    assert joined(blocks_from(skimmed, 0)) == stayed


@pytest.mark.parametrize("stuck", [1, None])
def test_what_began_long_ago_and_what_was_last_seen_long_ago_are_shown(tmp_path, monkeypatch, stuck):
    """A group that stays in flight from the first step on, a stage that ran once, and rows in many blocks."""
    plan, events = simulated(steps=30)
    events = [one for one in events[:-1] if not (getattr(one, "stage", "") == "evaluate" and one.step > 0)]
    for at, event in enumerate(events):
        if isinstance(event, trace.Cleared | trace.Dropped):
            events[at] = msgspec.structs.replace(event, groups=tuple(group for group in event.groups if group != stuck))
    run_dir = written(tmp_path / "run", plan, events)
    whole = Record(run_dir.path)
    stayed = joined(advanced(whole))
    assert whole.picture().in_flight == (stuck is not None) and whole.picture().stages["evaluate"].step == -1
    for module, name, value in ((tail, "RECENT_BYTES", 3000), (trace, "SKIMMED_BYTES", 500), (tail, "EVENTS", 5)):
        monkeypatch.setattr(module, name, value)
    skimmed = Record.read(run_dir.path)
    assert msgspec.structs.replace(skimmed.picture(), last=whole.picture().last) == whole.picture()
    monkeypatch.setattr(tail, "SPANS", 10)
    blocks = [*blocks_from(skimmed, 0)]
    shown = joined(blocks)
    assert 10 <= len(shown["spans"]) < len(stayed["spans"]) and max(len(one.rows.steps) for one in blocks) < 5
    assert shown | {"spans": []} == stayed | {"spans": []}
    with run_dir.events.open("rb") as file:
        for block in blocks:  # a page comes back with the beginning of a line
            file.seek(block.offset - 1)
            assert file.read(1) == b"\n"


def test_what_is_written_later_is_seen_and_half_a_line_is_not(tmp_path):
    plan, events = simulated(steps=2)
    run_dir = written(tmp_path / "run", plan, events[:20])
    record = Record(run_dir.path)
    early = joined(advanced(record))
    with run_dir.events.open("ab") as file:
        file.write(b'{"type":"ran","task"')
    assert record.advance() is None
    append(run_dir, events[20:])
    late = joined(advanced(record))
    assert {name: early[name] + late[name] for name in early} == joined(blocks_from(record, 0))
    assert record.picture().ended


def test_spans_and_episodes_that_are_long_ago_are_left_out(tmp_path, monkeypatch):
    run_dir = episodes_of(tmp_path / "run", steps=6)  # of four groups of two
    monkeypatch.setattr(tail, "EVENTS", 10)
    monkeypatch.setattr(tail, "SPANS", 30)
    monkeypatch.setattr(tail, "EPISODES", 16)
    record = Record(run_dir.path)
    everything, shown = joined(advanced(record)), joined(blocks_from(record, 0))
    assert 30 <= len(shown["spans"]) <= 50 < len(everything["spans"])
    assert 8 <= len(shown["spent"]) <= 12 < len(everything["spent"]) == 24
    for name in ("spans", "spent"):
        assert shown[name] == everything[name][-len(shown[name]) :]
    assert shown["steps"] == everything["steps"]


def test_a_run_whose_processes_are_gone_is_told_from_one_that_is_slow(tmp_path):
    plan, events = simulated(steps=2)
    child = subprocess.Popen(["true"])
    child.wait()
    for pid, node, gone in (
        (os.getpid(), "127.0.0.2", False),
        (child.pid, "127.0.0.2", True),
        (child.pid, "10.0.0.7", False),
    ):
        placed = trace.Placed(group="sampler", worker=0, node=node, pid=pid)
        begun = [event for event in events[:20] if not isinstance(event, trace.Placed)]
        run_dir = written(tmp_path / f"run-{pid}-{node.replace('.', '-')}", plan, [begun[0], placed, *begun[1:]])
        record = Record(run_dir.path)
        list(advanced(record))
        assert record.gone() == gone
        assert any(stage["state"] == "running" for stage in states(record)) != gone
        run_dir.lock.write_text(f'{{"pid": {pid}, "host": "{socket.gethostname() if "127" in node else node}"}}')
        told = {(False, "127"): "running", (True, "127"): "killed"}.get((gone, node[:3]), "unfinished")
        assert [run["state"] for run in pages.runs(tmp_path) if run["name"] == run_dir.path.name] == [told]
    run_dir.lock.unlink()
    assert "unfinished" in {run["state"] for run in pages.runs(tmp_path)}


def states(record):
    return [msgspec.structs.asdict(stage) for stage in record.now()["stages"].values()]
