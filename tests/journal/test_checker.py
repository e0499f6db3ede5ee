"""The checker itself: valid runs pass, and each planted fault is found under its own invariant and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journal.__main__ import main
from tests.journal.checker import audit, check
from tests.journal.faults import AHEAD, DIES, DROP, FAULTS, GATE, RANKS, SYNC
from tests.journal.mutations import shares, survey
from tests.journal.plugin import assert_sound, run_dirs
from tests.journal.setups import Setup
from tests.journal.world import MadeUp

pytestmark = pytest.mark.journal_expected  # runs broken on purpose

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).resolve().parents[2]
SETUPS = {
    "sync": SYNC,
    "wait": AHEAD,
    "depth": Setup(max_staleness=2, pipeline_depth=1),
    "wait, in flight": Setup(max_staleness=1, in_flight=True),
    "drop": DROP,
    "drop, drained": Setup(max_staleness=1, drop=True, steps=8),
    "gate": GATE,
    "gate, wait": Setup(gate=True, max_staleness=1, steps=5),
    "gate, drop": Setup(gate=True, drop=True, max_staleness=2, steps=6),
    "ranks": RANKS,
    "runs": Setup(run_groups=2, max_staleness=1),
    "dies": DIES,
    "dies, gate, drop": Setup(dies=0.1, max_staleness=1, drop=True, in_flight=True, gate=True),
}


def texts(run: MadeUp, folder: Path) -> list[str]:
    """Return the checker's violations of a made-up run, as texts."""
    return [str(violation) for violation in check(run.write(folder))]


@pytest.mark.parametrize("name", SETUPS)
def test_sound_runs_pass(name, tmp_path):
    for seed in range(3):
        run = MadeUp(SETUPS[name], seed)
        run.segment()
        report = audit(run.write(tmp_path / str(seed)))
        assert report.violations == []
        assert report.clean
        assert sum(report.staleness.values()) >= run.setup.steps * run.setup.batch


def test_the_made_up_runs_show_what_they_are_for(tmp_path):
    """Empty runs would pass too: groups must be dropped and cancelled, attempts lost and fenced, tokens old."""
    kinds, reasons, ages = set(), set(), set()
    for number, setup in enumerate((DROP, SETUPS["drop, drained"], SETUPS["dies, gate, drop"])):
        for seed in range(5):
            run = MadeUp(setup, seed)
            run.segment()
            kinds |= {event["type"] for event in run.events}
            reasons |= {event["reason"] for event in run.events if event["type"] == "dropped"}
            ages |= set(audit(run.write(tmp_path / f"{number}-{seed}")).staleness)
    assert {"dropped", "retried", "fenced", "checkpointed"} <= kinds
    assert {"stale", "cancelled", "all samples have the same reward"} <= reasons
    assert ages == {0, 1, 2}


@pytest.mark.parametrize("name", SETUPS)
def test_a_killed_run_and_its_resume_pass(name, tmp_path):
    for seed in range(3):
        run = MadeUp(SETUPS[name], seed)
        run.segment(stop=lambda run: bool(run.manifests) and run.random.random() < 0.05)
        assert texts(run, tmp_path / f"{seed}-killed") == []
        start = max(run.manifests)
        if start < run.setup.steps:
            run.segment(start)
            assert texts(run, tmp_path / f"{seed}-resumed") == []


def test_a_resume_from_an_earlier_checkpoint_passes(tmp_path):
    """The later checkpoint is written again and cannot be checked against its first time."""
    run = MadeUp(SETUPS["drop, drained"], 3)
    run.segment(stop=lambda run: len(run.manifests) == 2)
    run.segment(2, stop=lambda run: len(run.saved) == 2)
    run.segment(4)
    assert texts(run, tmp_path) == []


def test_a_run_that_is_resumed_after_its_end_passes(tmp_path):
    run = MadeUp(AHEAD, 0)
    run.segment(stop=lambda run: len(run.manifests) == 2)
    run.segment(2)
    assert texts(run, tmp_path) == []


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_under_its_invariant_only(name, seed, tmp_path):
    fault = FAULTS[name]
    violations = check(fault.run(seed).write(tmp_path))
    assert {violation.invariant for violation in violations} == {fault.invariant}, [*map(str, violations)]


def test_a_batch_that_passes_over_a_group_is_found_where_none_may_be_too_old(tmp_path):
    run = MadeUp(SETUPS["gate, drop"], 0)
    run.segment()
    folder = run.write(tmp_path)
    plan = folder / "plan.json"
    plan.write_text(plan.read_text().replace('"on_stale": "drop"', '"on_stale": "wait"'))
    assert any("were admitted before its last one" in str(violation) for violation in check(folder))


def test_every_invariant_has_a_fault():
    assert {fault.invariant for fault in FAULTS.values()} == {f"I{number}" for number in range(1, 11)}


def test_a_stall_is_found(tmp_path):
    run = MadeUp(SYNC, 0)
    run.segment()
    for event in run.events[len(run.events) // 2 :]:
        if "at_s" in event:
            event["at_s"] += 30.0
    folder = run.write(tmp_path)
    assert check(folder) == check(folder, stall_s=60.0) == []
    (stall,) = check(folder, stall_s=10.0)
    assert stall.invariant == "I5" and "nothing happened for 30" in stall.text


def test_lines_that_cannot_be_read_are_told_with_their_number(tmp_path):
    run = MadeUp(SYNC, 0)
    run.segment()
    folder = run.write(tmp_path)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if '"placed"' in line or '"ran"' in line)
    (folder / "events.jsonl").write_text("".join([*lines[:place], '{"type": "ran", "task"\n', *lines[place:]]))
    assert [str(one) for one in check(folder)] == [f"events.jsonl:{place + 1}: record: the line is no event"]
    lines[place] = lines[place].replace('"cpu_s": 0.1', '"cpu_s": "much"')
    (folder / "events.jsonl").write_text("".join(lines))
    assert f"events.jsonl:{place + 1}: record: ran has cpu_s='much'" in map(str, check(folder))


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    run = MadeUp(SYNC, 0)
    run.segment(stop=lambda run: len(run.events) > 100)
    folder = run.write(tmp_path)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"type": "ackno')
    assert check(folder) == []


def test_metrics_say_what_the_events_say(tmp_path):
    run = MadeUp(SYNC, 0)
    run.segment()
    run.metrics[2] = {**run.metrics[2], "loss": 0.25}
    run.metrics[3] = run.metrics[4]
    assert [text.split(": ", 2)[::2] for text in texts(run, tmp_path)] == [
        ["metrics.jsonl:3", f"it differs from events.jsonl:{_line_of(run, step=1)}"],
        ["metrics.jsonl:5", "a second line for step 4"],
        [f"events.jsonl:{_line_of(run, step=2)}", "metrics.jsonl has no line for step 3"],
    ]


def _line_of(run: MadeUp, *, step: int) -> int:
    return 1 + next(i for i, one in enumerate(run.events) if one["type"] == "step_ended" and one["step"] == step)


def test_blind_changes_are_noticed():
    """The rest cannot be noticed: a missing Ended looks like a killed run, and a Fenced has no consequences."""
    noticed = shares(*survey(each=30))
    assert noticed["delete"] > 0.75 and noticed["repeat"] > 0.85 and noticed["edit"] > 0.85, noticed


def test_the_command(tmp_path, capsys):
    run = MadeUp(SYNC, 0)
    run.segment()
    folder = run.write(tmp_path)
    assert main([str(folder)]) == 0
    assert "16 \nended; 0 violations" in capsys.readouterr().out.replace("0: 16\n", "16 \n")
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(line for line in events if '"published"' not in line))
    assert main([str(folder)]) == 1
    assert "I4: refit of step 0 was acknowledged and nothing was published" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nowhere")])
    assert "there is no events.jsonl; name the directory of a run" in capsys.readouterr().err


def test_the_checker_loads_nothing_of_the_engine():
    code = "import sys, tests.journal.checker; print({'pipeline', 'msgspec'} & {m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == "set()"


def test_the_plugin_fails_a_test_whose_run_is_broken(pytester, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY))
    for name in ("sound", "broken"):
        run = MadeUp(SYNC, 0)
        run.segment()
        if name == "broken":
            del run.events[next(i for i, one in enumerate(run.events) if one["type"] == "claimed")]
        run.write(tmp_path.parent / "made" / name)
    made = json.dumps(str(tmp_path.parent / "made"))
    pytester.makepyfile(
        f"""
        import shutil, pytest

        def leave(name, tmp_path):
            shutil.copytree({made} + "/" + name, tmp_path / "runs" / name)

        def test_sound(tmp_path): leave("sound", tmp_path)
        def test_broken(tmp_path): leave("broken", tmp_path)
        def test_without_runs(): pass
        @pytest.mark.journal_expected("I2", "I5", "I6", "I7", "I8")
        def test_expected(tmp_path): leave("broken", tmp_path)
        @pytest.mark.journal_expected("I9")
        def test_not_expected(tmp_path): leave("broken", tmp_path)
        @pytest.mark.journal_expected
        def test_not_judged(tmp_path): leave("broken", tmp_path)
        """
    )
    result = pytester.runpytest_inprocess("-p", "tests.journal.plugin", "-p", "no:cacheprovider", "--strict-markers")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(["*I2: group 0 was trained at step 1 and was never claimed*"])


def test_run_directories_are_found_below_a_folder(tmp_path):
    run = MadeUp(SYNC, 1)
    run.segment()
    run.write(tmp_path / "a" / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "events.jsonl").write_text("")
    assert run_dirs(tmp_path) == [tmp_path / "a" / "b"]
    assert_sound(tmp_path / "a" / "b")
