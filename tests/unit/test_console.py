"""Console output: problems, the plan, progress and the summary, at a fixed width."""

import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pipeline.cli.console import Progress, drawing, print_plan, print_problems, print_summary
from pipeline.cli.start_line import StartLine
from pipeline.declare.fields import Field
from pipeline.declare.sharding import Packed, Sharding
from pipeline.errors import Problem
from pipeline.plan.planner import plan
from tests.unit import toy
from tests.waiting import until

DRAWING = """\
[ prompts ] on host
        |
        v
[ rollout ] on sampler  <-  prompts(prompt)
        |
        v
[ reward ] on host  <-  prompts(prompt)  rollout(response)
[ logprobs ] on learner  <-  rollout(response)
        |
        v
[ train ] on learner  <-  reward(reward)  logprobs(logprobs)
[ samples ] on host  <-  prompts(prompt)  rollout(response)  reward(reward)
        |
        v
[ refit ] on learner -> sampler  <-  train(trained_weights)
        |
        v
[ evaluate ] on sampler  <-  refit(served_weights)
        ^ served_weights: refit -> rollout of a later step
"""
TABLES = """\
worker group  backend  actors     GPUs  stages
sampler       torch    sampler.0  0     rollout refit evaluate
learner       torch    learner.0  0     logprobs train refit
host          python   host.0     0     prompts reward samples
An actor is one process; the stages of a worker group share its actors. The view shows their nodes.

field            from      bytes per step  read by                  partition
prompt           prompts   256 B           rollout reward samples   samples
response         rollout   256 B           reward logprobs samples  logprobs+samples
reward           reward    32 B            train samples            train+samples
logprobs         logprobs  8 x 4 B x T     train                    train
trained_weights  train     -               refit                    -
served_weights   refit     -               rollout evaluate         -

partition             cleared after         most bytes per group
toy.samples           samples               prompt
toy.logprobs+samples  logprobs and samples  response
toy.train+samples     train and samples     8 B
toy.train             train                 logprobs
At most 8 groups are in flight: 64 B, and prompt, response, logprobs.

logprobs waits for train of the previous step: uses the weights of the step before
train waits for logprobs of the same step: the weights must not change while it runs
train waits for refit of the previous step: the weights must not change while sent
refit waits for evaluate of the previous step: uses the weights served so far
"""


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (10**6, "At most 8 groups are in flight: 64 B, and prompt, response, logprobs; capacity_bytes is 976.6 KiB."),
        (48, "At most 6 groups are in flight: 48 B, and prompt, response, logprobs; capacity_bytes is 48 B."),
        (8, "At most 4 groups are in flight: 32 B, and prompt, response, logprobs; capacity_bytes is 8 B."),  # a batch
    ],
)
def test_a_limit_of_bytes_lowers_the_number_of_groups(limit, said, capsys):
    graph = toy.graph()
    print_plan(plan(replace(graph, schedule=replace(graph.schedule, capacity_bytes=limit)))[0])
    assert said in lines(capsys.readouterr().out)


def made(**changes):
    return plan(toy.graph(**changes))[0]


def lines(text):
    """Return the text without the blanks that pad tables."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def test_the_plan_is_drawn_from_top_to_bottom(capsys):
    assert "\n".join(drawing(made())) + "\n" == DRAWING
    print_plan(made())
    assert lines(capsys.readouterr().out) == f"toy  3 steps of 4 prompts x 2 samples\n\n{DRAWING}\n{TABLES}"


def test_the_plan_says_which_stages_share_prompts(capsys):
    planned = made()
    print_plan(planned)
    assert "packed row" not in capsys.readouterr().out
    sharing = Sharding.of(Packed(64), shares=True)
    stages = [
        msgspec.structs.replace(stage, sharding=sharing) if stage.name == "train" else stage for stage in planned.stages
    ]
    print_plan(msgspec.structs.replace(planned, stages=tuple(stages)))
    assert "A packed row computes the prompt of a group once, where that pays: train\n" in capsys.readouterr().out


def test_large_fields_are_shown_in_kib_and_unread_ones_as_such(capsys):
    wide = Field("wide", dtype="float64", dims="N 100")
    print_plan(made(reward={"writes": (toy.REWARD, wide)}, logprobs={"reads": (toy.RESPONSE, wide)}))
    assert "wide             reward    6.2 KiB         logprobs                 logprobs\n" in lines(
        capsys.readouterr().out
    )
    print_plan(made(reward={"writes": (toy.REWARD, wide)}))
    assert "wide             reward    -               nobody                   reward\n" in lines(
        capsys.readouterr().out
    )


def test_a_problem_is_one_line_and_its_path_is_relative(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    known = {"why": "c", "fix": "d"}
    print_problems(
        [
            Problem(where=f"{tmp_path}/graph.py:3", what="two\nlines", **known),
            Problem(where="/elsewhere/graph.py:3", what=f"odd in {tmp_path}/x", warning=True, **known),
        ]
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "graph.py:3: two lines; c. Fix: d\n/elsewhere/graph.py:3: warning: odd in x; c. Fix: d\n"


def test_paths_are_left_alone_in_the_root_folder(capsys, monkeypatch):
    monkeypatch.chdir("/")
    print_problems([Problem(where="/a/graph.py:3", what="b", why="c", fix="d")])
    assert capsys.readouterr().err == "/a/graph.py:3: b; c. Fix: d\n"


METRICS = {"time/step_s": 2.0, "time/rollout_s": 1.5, "time/train_s": 0.25, "reward/mean": 0.5}


def test_a_line_a_step_where_there_is_no_terminal(capsys):
    progress = Progress(made(), 0)
    progress.step(-1, {"eval/exact_match": 0.125})
    for step in range(3):
        progress.step(step, METRICS | {"rollout/length_mean": 5.0} | ({"eval/exact_match": 0.75} if step == 2 else {}))
    progress.end()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "before training  exact match 0.125"
    stable = [line.rpartition("  ")[0] for line in shown[1:]]
    assert stable == [
        "step 1/3  reward 0.500  exact match 0.125  20 tok/s  2.00 s/step, slowest rollout 1.50 s",
        "step 2/3  reward 0.500  exact match 0.125  20 tok/s  2.00 s/step, slowest rollout 1.50 s",
        "step 3/3  reward 0.500  exact match 0.750  20 tok/s  2.00 s/step, slowest rollout 1.50 s",
    ]
    assert shown[-1].endswith("  0 s left")
    assert progress.evaluations == [(0, 0.125), (3, 0.75)]


def test_environments_that_fail_are_said_once(capsys):
    progress = Progress(made(), 0)
    for step, part in enumerate((0.4, 0.9, 0.9)):
        progress.step(step, METRICS | {"play/end_failed": part})
    said = capsys.readouterr().err
    assert said.count("warning: 90% of the episodes of 'play' ended since their environment failed") == 1
    assert said.startswith("step 2: ")


def test_a_long_run_without_a_terminal_prints_every_tenth_step(capsys):
    progress = Progress(made(schedule=toy.Schedule(steps=30)), 0)
    for step in range(30):
        progress.step(step, {})
    steps = [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert steps == ["step 10/30", "step 20/30", "step 30/30"]


def test_on_a_terminal_the_line_is_rewritten_unless_plain_lines_are_asked_for(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for plain, start in ((False, "\r\x1b[2Kstep 1/3"), (True, "step 1/3")):
        Progress(made(), 0, plain=plain).step(0, {})
        assert capsys.readouterr().out.startswith(start)


@pytest.mark.parametrize("live", [True, False])
def test_a_start_says_what_it_waits_for_although_nothing_happens(capsys, monkeypatch, live):
    """Each second on a terminal, and elsewhere after ten seconds without a line. The test takes the part of the clock
    and of the thread."""
    now, threads = [100.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("threading.Thread.start", lambda thread: threads.append(thread))
    monkeypatch.setattr("sys.stdout.isatty", lambda: live, raising=False)
    with Progress(made(), 0) as progress:
        line = progress._start_line
        for what, seconds in (("Ray", 5), ("sampler (vllm)", 30), ("the first step", 2)):
            progress.starting(what)
            for _ in range(seconds):
                now[0] += 1
                line.show()
        progress.step(0, {})
        line.show()
        progress.starting("Ray")  # again, after a worker was lost
    line.show()
    assert len(threads) == 2 and all(thread.daemon for thread in threads)
    shown = [part.strip() for part in capsys.readouterr().out.replace("\x1b[2K", "").replace("\r", "\n").splitlines()]
    said = [line for line in shown if line.startswith("starting ")]
    if live:
        every = [f"{name}  {at} s" for name, first, last in (("Ray", 0, 5), ("sampler (vllm)", 5, 35),
                 ("the first step", 35, 37)) for at in range(first, last + 1)]  # fmt: skip
        assert said == [f"starting {each}" for each in (*every, "Ray  0 s")]
    else:
        assert said == [f"starting sampler (vllm)  {at} s" for at in (10, 20, 30)]


ON_A_TERMINAL = """
import fcntl, struct, sys, termios
from pathlib import Path
from pipeline import screen
from pipeline.cli.console import Progress
from tests.unit.test_console import METRICS, SIZES, made, toy

with Progress(made(schedule=toy.Schedule(steps=4)), 0) as progress:
    for step, size in enumerate((*SIZES, (10, 30))):
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        with screen.aside(Path(sys.argv[1])):
            progress.starting("sampler (vllm, policy-of-a-long-name, and-its-reference-of-a-longer-name)")
        progress.step(step, METRICS | {"rollout/length_mean": 5000.0})
"""
SIZES = {
    (24, 200): [
        "starting sampler (vllm, policy-of-a-long-name, and-its-reference-of-a-longer-name)  # s",
        "step 1/4  reward 0.500  20,000 tok/s  2.00 s/step, slowest rollout 1.50 s  # s left",
    ],
    (24, 80): [
        "starting sampler (vllm, policy-of-a-long-name, and-its-reference-of-a-l...  # s",
        "step 2/4  reward 0.500  20,000 tok/s  2.00 s/step  # s left",
    ],
    (10, 30): ["starting sampler (vll...  # s", "step 3/4  reward 0.500"],
}


def test_a_line_that_is_rewritten_has_one_row_of_the_terminal_as_it_is_now(tmp_path):
    """One that stays is whole."""
    mine, its = os.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL, tmp_path / "log"], stdout=its, env=environment) as run:
        os.close(its)
        shown = b""
        with suppress(OSError):  # once nothing writes there
            while part := os.read(mine, 65536):
                shown += part
        os.close(mine)
    said = [re.sub(r"\b\d+ s( left)?$", r"# s\1", part.strip()) for part in shown.decode().split("\r\x1b[2K")[1:]]
    assert (run.returncode, said[:6]) == (0, [line for lines in SIZES.values() for line in lines])
    assert said[-1] == "step 4/4  reward 0.500  20,000 tok/s  2.00 s/step, slowest rollout 1.50 s  # s left"


def test_the_line_about_a_start_comes_from_a_thread_that_ends_with_the_start(capsys, monkeypatch):
    monkeypatch.setattr("pipeline.cli.start_line.EVERY_S", 0.01)
    monkeypatch.setattr("pipeline.cli.start_line.SILENCE_S", 0.0)
    with StartLine(live=False) as line:
        line.says("Ray")
        until(lambda: capsys.readouterr().out.startswith("starting Ray  "))
        threads = [each for each in threading.enumerate() if getattr(each, "_target", None) == line._run]
    for thread in threads:
        thread.join(30.0)
    assert len(threads) == 1 and not threads[0].is_alive()


def test_a_start_names_the_backend_and_the_models_of_a_group():
    stages = made().stages
    named = [msgspec.structs.replace(stage, uses=("owner/policy", "owner/policy (frozen)")) for stage in stages]
    planned = msgspec.structs.replace(made(), stages=tuple(named))
    assert planned.loading(["sampler"]) == "sampler (torch, policy, policy (frozen))"
    assert planned.loading(["learner", "host"]).startswith("learner (torch, policy, policy (frozen)), host (python")


def test_the_summary_of_a_resumed_run_begins_with_the_first_evaluation_in_its_record(capsys, tmp_path):
    def said(metrics, step, name="eval/close"):
        progress = Progress(made(), step, metrics=metrics)
        progress.step(step, METRICS | {name: 0.75})
        print_summary(made(), progress, run_dir="runs/toy", wall_s=1.0, commands=[])
        return capsys.readouterr().out.partition(" on held-out prompts  ")[2].splitlines()[0]

    record = tmp_path / "metrics.jsonl"
    assert said(record, 2) == "0.750 at step 3"
    record.write_text('{"step":0,"eval/close":"high"}\n')
    assert said(record, 2) == "0.750 at step 3"
    record.write_text('{"step":0,"eval/count":9.0,"eval/close":0.125}\n{"step":1}\n{"step":2,"eval/close":0.5}\n')
    assert said(record, 2) == "0.125 at step 0, 0.750 at step 3 (+0.625)"
    assert said(record, 2, "eval/exact_match") == "0.750 at step 3", "another measure than before"


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_summary_says_what_was_reached_and_what_to_do_next(capsys, evaluated):
    progress = Progress(made(), 0)
    progress.last = METRICS
    progress.evaluations, progress.measure = [(0, 0.125), (3, 0.75)] if evaluated else [], "exact match"
    print_summary(
        made(), progress, run_dir="runs/toy", wall_s=12.34, commands=[("inspect", "head runs/toy/metrics.jsonl")]
    )
    rows = dict(line.split("  ", 1) for line in lines(capsys.readouterr().out).splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    reached = {"exact match on held-out prompts": "0.125 at step 0, 0.750 at step 3 (+0.625)"} if evaluated else {}
    assert rows == reached | {
        "reward of the last step": "0.500",
        "steps": "3, last one 2.000 s",
        "wall time": "12.3 s, start-up included",
        "run directory": "runs/toy",
        "inspect": "head runs/toy/metrics.jsonl",
    }
