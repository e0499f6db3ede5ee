"""Exports match the record: each task once, no overlap on a track, all starts of a resumed run."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pipeline import export
from pipeline.analysis.findings import find
from pipeline.analysis.perfetto import PIECE, perfetto
from pipeline.errors import GraphError
from pipeline.record import trace
from pipeline.record.runs import open_run
from tests.unit.test_findings import printed, write

pytestmark = pytest.mark.journal_expected  # records cut off on purpose


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose streams overlap and whose weights are swapped in flight."""
    schedule = {"max_staleness": 2, "refit": "in_flight", "checkpoint_every": 3}
    return write(tmp_path_factory.mktemp("export") / "ahead", steps=9, **schedule)


@pytest.fixture(scope="module")
def resumed(run, tmp_path_factory) -> Path:
    """The same run, killed in the middle and resumed an hour later on a restarted machine."""
    folder = tmp_path_factory.mktemp("resumed") / "again"
    folder.mkdir()
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    start = msgspec.json.decode(lines[0], type=trace.Started)
    again = msgspec.json.encode(msgspec.structs.replace(start, wall_s=start.wall_s + 3600, start=3)) + b"\n"
    (folder / "events.jsonl").write_bytes(b"".join([*lines[: len(lines) // 2], again, *lines[1:]]))
    (folder / "plan.json").write_bytes((run / "plan.json").read_bytes())
    return folder


def spans(folder: Path) -> list[trace.Ran]:
    return [event for _, event in trace.read(folder / "events.jsonl") if isinstance(event, trace.Ran)]


def slices(folder: Path) -> list[dict]:
    return [event for event in json.loads("".join(perfetto(folder)))["traceEvents"] if event["ph"] == "X"]


def test_no_file_is_overwritten_and_none_written_beside_one_that_would_be(run, tmp_path, capsys):
    files = [tmp_path / name for name in ("data.jsonl", "tables/metrics.csv", "tables/gaps.csv")]
    (tmp_path / "tables").mkdir()
    for file in files:
        file.write_text("mine")
    events, new, record = run / "events.jsonl", tmp_path / "new.pt", (run / "events.jsonl").read_bytes()
    asked = ("--html", files[0], "--perfetto", events, "--samples", new, "--csv", tmp_path / "tables")
    code, out, err = printed(capsys, export, run, *asked)
    assert (code, out) == (2, "") and re.findall(r"(--\w+) \S+: (\S+) already exists; an export never", err) == [
        ("--html", str(files[0])), ("--perfetto", str(events)), *(("--csv", str(file)) for file in files[1:]),
    ]  # fmt: skip
    assert [file.read_text() for file in files] == ["mine"] * 3 and events.read_bytes() == record
    assert not new.exists() and len(list((tmp_path / "tables").iterdir())) == 2
    code, out, err = printed(capsys, export, run, "--html", new, "--perfetto", new)
    assert code == 2 and f"--perfetto {new}: --html writes that file" in err and not new.exists()
    assert printed(capsys, export, run, "--html", "/dev/null", "--perfetto", "/dev/null")[0] == 0


@pytest.mark.parametrize("which", ["run", "resumed"])
def test_every_task_is_one_slice_on_a_track_without_overlap(which, request):
    folder = request.getfixturevalue(which)
    tracks = defaultdict(list)
    for one in slices(folder):
        tracks[one["pid"], one["tid"]].append(one)
    own = [one for (process, _), found in tracks.items() if process > 1 for one in found]
    assert Counter((o["name"], o["args"]["task"]) for o in own) == Counter((s.stage, s.task) for s in spans(folder))
    for found in tracks.values():
        found.sort(key=lambda one: one["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(found))
    assert len({track for track in tracks if track[0] == 2}) > 1  # the sampler's streams
    assert min(one["ts"] for one in own) >= 0


def test_the_slices_have_the_times_of_the_record(run):
    told = {(s.task, s.group): (1e6 * s.start_s, 1e6 * (s.end_s - s.start_s)) for s in spans(run)}
    events = json.loads("".join(perfetto(run)))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for one in slices(run):
        if one["pid"] > 1:
            assert (one["ts"], one["dur"]) == pytest.approx(told[one["args"]["task"], named[one["pid"]]], abs=2e-3)
    assert {"sampler", "learner", "host", "ahead"} == set(named.values())


def test_the_critical_path_tiles_every_step(run):
    path = [one for one in slices(run) if (one["pid"], one["tid"]) == (1, 1)]
    expected = [span for step in find(open_run(run)).paths for span in step.spans]
    assert [one["name"] for one in path] == [span.stage for span in expected]
    assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"], abs=2e-3) for a, b in pairwise(path))


def test_counters(run):
    events = json.loads("".join(perfetto(run)))["traceEvents"]
    counted = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counted[event["name"]].append(event["args"]["value"])
    assert counted["policy version"] == list(range(10))
    assert counted["groups present"][-1] == 0 and max(counted["groups present"]) <= 16
    assert max(counted["staleness, versions"]) == 2


def test_a_resumed_run_goes_on_by_the_wall_clock(resumed):
    starts = [one["ts"] for one in json.loads("".join(perfetto(resumed)))["traceEvents"] if one["name"] == "resumed"]
    assert starts == [3600e6]
    rows = list(csv.DictReader("".join(export.tables(resumed)["spans.csv"]).splitlines()))
    assert {row["start"] for row in rows} == {"0", "1"} and max(float(row["start_s"]) for row in rows) > 3600
    assert all(float(row["start_s"]) >= 3600 for row in rows if row["start"] == "1")


def test_pieces_are_small(tmp_path):
    long = write(tmp_path / "long", steps=150)
    sizes = [len(piece) for piece in perfetto(long)]
    assert len(sizes) > 4 and max(sizes) < 2 * PIECE
    assert all(len(piece) < 2 * trace.BLOCK for piece in export.spans_csv(long))


def test_tables(run):
    tables = {name: list(csv.DictReader("".join(table).splitlines())) for name, table in export.tables(run).items()}
    assert [(int(r["task"]), r["group"], float(r["end_s"])) for r in tables["spans.csv"]] == [
        (s.task, s.group, s.end_s) for s in spans(run)
    ]
    found = find(open_run(run))
    summed = Counter()
    for row in tables["gaps.csv"]:
        summed[row["group"]] += float(row["end_s"]) - float(row["start_s"])
    assert summed == pytest.approx({one.group: one.idle_s for one in found.groups})
    assert [row["stage"] for row in tables["path.csv"]] == [span.stage for path in found.paths for span in path.spans]
    assert [int(row["step"]) for row in tables["metrics.csv"]] == [line["step"] for line in open_run(run).metrics]


def test_metrics_that_come_late_have_a_column(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "eval/a, b": 0.5}\n{"step"')
    assert "".join(export.metrics_csv(tmp_path)) == 'step,"eval/a, b"\n1,\n2,0.5\n'


def test_the_command_writes_all_of_them(run, tmp_path, capsys):
    asked = ("--html", tmp_path / "run.html", "--perfetto", tmp_path / "new" / "t.json", "--csv", tmp_path / "tables")
    code, out, _ = printed(capsys, export, run, *asked)
    assert code == 0 and out.count("bytes") == 6
    page = (tmp_path / "run.html").read_text()
    packed = re.search(r'id="packed">([^<]*)<', page)
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert data["run"] == run.name and data["events"][-1][0] == "now" and "://" not in page.partition("<body>")[2]
    assert (tmp_path / "new" / "t.json").read_text() == "".join(perfetto(run))
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == [
        "gaps.csv", "metrics.csv", "path.csv", "spans.csv",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "no run is named"),
        (["--nope"], "--nope: there is no such flag"),
        (["RUN"], "no format is named"),
        (["nowhere", "--csv", "FILE/x"], "plan.json does not exist"),
        (["RUN", "--html", "FILE/x"], "cannot be written: File exists"),
        (["nowhere", "--html", "FILE/x"], "plan.json does not exist"),
        (["RUN", "--csv", "FILE/x"], "cannot be written: Not a directory"),
        (["RUN", "--perfeto", "x"], "did you mean --perfetto?"),
    ],
)
def test_what_is_wrong_is_one_line(run, tmp_path, capsys, argv, told):
    (tmp_path / "file").touch()
    argv = [str(run) if part == "RUN" else part.replace("FILE", str(tmp_path / "file")) for part in argv]
    code, out, err = printed(capsys, export, *argv)
    assert (code, out) == (2, "") and told in err and "Traceback" not in err and err.count("\n") == 1


def test_no_run_no_piece(tmp_path):
    with pytest.raises(GraphError, match="name a run directory"):
        perfetto(tmp_path)


def test_an_export_that_fails_leaves_no_file(tmp_path):
    def pieces():
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(GraphError, match=r"trace\.json cannot be written: No space left on device"):
        export._write(tmp_path / "trace.json", pieces(), "--perfetto")
    assert not list(tmp_path.iterdir())
