"""math-verify in its own processes: verdicts, deadlines, crashes, and no process left running."""

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ops.rewards import MathVerify, SampleError, exact_match, symbolic_worker
from ops.rewards.workers import Lost, Workers
from pipeline import Graph, Schedule, StageContext, StageError, Task, WorkerGroup
from stages.prompts import Prompts
from stages.reward import Reward
from stages.tasks import Generated
from tests.optional import need

torch.set_num_threads(1)
MONSTER = r"\boxed{9^{9^{9^{9}}}}"
RAISES = r"$x > 2$"  # against $x \ne 2$, math-verify 0.9.0 raises KeyError


@pytest.fixture(scope="module")
def opened():
    need("math", "math_verify")
    made = MathVerify(processes=1, timeout_s=30.0).open()
    yield made
    made.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pids):
    deadline = time.monotonic() + 20
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def script(tmp_path, body):
    """Return the command of a worker process that runs `body` per `question` and replies with `answer()`."""
    path = tmp_path / "worker.py"
    path.write_text(
        "import json, os, sys, time\n"
        "def answer(value):\n    print(json.dumps(value), flush=True)\n"
        'answer(["ready"])\n'
        "for line in sys.stdin:\n    question = json.loads(line)\n" + body
    )
    return [sys.executable, "-P", str(path)]


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"so \boxed{42}", "42", 1), (r"\boxed{43}", "42", 0), ("no idea", "42", 0), ("", "42", 0),
        (r"$\frac{2}{4}$", r"\frac{1}{2}", 1), ("it is 0.5", "1/2", 1), ("1000", "1,000", 1), ("10000", "10 000", 1),
        (r"$2\sqrt{3}$", r"2\sqrt{3}", 1), (r"$2$", r"2\sqrt{3}", 0), (r"$(x+1)^2$", "x^2+2x+1", 1),
        (r"$50\%$", "50%", 1), (r"the set $\{2, 1\}$", r"\{1,2\}", 1), ("-3", "-3", 1), ("3", "-3", 0),
        (r"$\{1, 2\}$", "$1$ and $2$", 1), ("$7$", "so $x=5$ and then 7", 1),
        ("7" * 5000, "42", 0), ("\u0000\u2028\n", "42", 0),
    ],
)  # fmt: skip
def test_verdicts(opened, response, answer, score):
    assert opened([response], [answer]) == [score]


def test_many_samples_keep_their_order_and_equal_pairs_are_asked_once(opened):
    asked = []
    ask, opened._workers.ask = (
        opened._workers.ask,
        lambda questions, limit: asked.extend(questions) or ask(questions, limit),
    )
    try:
        answers = [str(i % 5) for i in range(40)]
        assert opened([rf"\boxed{{{i % 3}}}" for i in range(40)], answers) == [float(i % 3 == i % 5) for i in range(40)]
    finally:
        del opened._workers.ask
    assert len(asked) == 15


def test_an_answer_that_cannot_be_read_names_its_sample(opened):
    for answer in ("", "  ", r"\boxed{}"):
        with pytest.raises(
            SampleError, match=r"the answer cannot be read: .*correct this row, or filter it out"
        ) as error:
            opened(["1", "2"], ["42", answer])
        assert error.value.index == 1


def test_it_works_in_any_thread(opened):
    made = []
    thread = threading.Thread(target=lambda: made.extend(opened([r"\boxed{42}"], ["42"])))
    thread.start()
    thread.join(60)
    assert made == [1.0]


def run(stage, response, answer, group_size=1):
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=group_size, run_dir=None, shared={})
    return stage.setup(context)({"response": response, "answer": answer}, Task(stage="reward", step=0, groups=(7, 9)))


def test_a_late_sample_is_counted_and_its_process_replaced():
    need("math", "math_verify")
    out = run(Reward(MathVerify(timeout_s=1.0, processes=1, on_timeout=-0.5)), [MONSTER, r"\boxed{2}"], ["1", "2"])
    assert out.columns["reward"].tolist() == [-0.5, 1.0]
    assert out.metrics["math_verify_timeouts"] == 0.5
    assert out.metrics["math_verify_errors"] == 0.0


def test_a_late_sample_is_an_error_where_the_user_says_so():
    need("math", "math_verify")
    with pytest.raises(StageError) as error:
        run(Reward(MathVerify(timeout_s=0.5, processes=1, on_timeout=None)), ["1", MONSTER], ["1", "2"])
    text = str(error.value)
    assert (
        "reward math_verify raised SampleError: no verdict in 0.5 s and 4 GiB (on_timeout=0.0 counts it as wrong)"
        in text
    )
    assert (
        "for sample 1 of step 1 (group 9, member 0), called with response='\\\\boxed{9^{9^{9^{9}}}}', answer='2'"
        in text
    )


def test_what_the_library_raises_is_an_error():
    need("math", "math_verify")
    text = r"math-verify failed \(on_error=0.0 counts it as wrong\): KeyError: .* sample 0"
    with pytest.raises(StageError, match=text):
        run(Reward(MathVerify(processes=1)), [RAISES], [r"$x \ne 2$"])


def test_errors_are_counted_where_the_user_says_so(opened, monkeypatch):
    monkeypatch.setattr(opened, "_description", MathVerify(on_error=-1.0))
    assert opened([RAISES, "$1$"], [r"$x \ne 2$", "1"]) == [-1.0, 1.0]
    assert opened.metrics() == {"timeouts": 0.0, "errors": 0.5}


def test_a_sample_that_needs_too_much_memory_counts_as_late(opened, monkeypatch):
    monkeypatch.setattr(symbolic_worker, "verdict", lambda *pair: bytearray(1 << 60))
    assert symbolic_worker.reply("1", "1") == ["memory"]
    monkeypatch.setattr(opened._workers, "ask", lambda questions, limit: [["memory"], ["right"]])
    assert opened(["1", "2"], ["1", "2"]) == [0.0, 1.0]
    assert opened.metrics() == {"timeouts": 0.5, "errors": 0.0}


def test_only_what_follows_the_mark_is_the_answer():
    need("math", "math_verify")
    stage = Reward(MathVerify(processes=1, answer_after="####"))
    out = run(stage, [r"\boxed{18}", "16"], ["16 + 2 = 18\n#### 18"] * 2)
    assert out.columns["reward"].tolist() == [1.0, 0.0]
    with pytest.raises(StageError, match=r"the answer has no '####', the mark of .* for sample 1"):
        run(stage, ["1", "1"], ["#### 1", "1"])


def test_processes_end_with_the_stage_that_opened_them():
    need("math", "math_verify")
    opened = MathVerify(processes=2).open()
    pids = opened._workers.pids
    assert all(map(alive, pids))
    assert opened(["1"], ["1"]) == [1.0]
    del opened
    gc.collect()
    assert gone(pids)


def test_processes_end_when_their_parent_is_killed(tmp_path):
    command = script(tmp_path, "    pass\n")
    code = (
        "import sys, time\nfrom ops.rewards.workers import Workers\n"
        f"workers = Workers({command!r}, 2)\nprint(*workers.pids, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert gone(pids)


def test_a_process_that_dies_is_its_sample_s_fault_and_the_others_get_their_replies(tmp_path):
    workers = Workers(script(tmp_path, "    os._exit(7) if question == 3 else answer([question])\n"), 2)
    replies = workers.ask(range(6), deadline_s=60.0)
    assert replies.pop(3) == Lost(late=False, text="the process ended with status 7")
    assert replies == [[0], [1], [2], [4], [5]]
    workers.close()


def test_a_process_that_died_while_it_was_idle_is_nobody_s_fault(tmp_path):
    workers = Workers(script(tmp_path, "    answer(question)\n    time.sleep(0.05) or os._exit(0)\n"), 1)
    assert workers.ask(["a"], 60.0) == ["a"]
    assert gone(workers.pids)
    assert workers.ask(["b"], 60.0) == ["b"]
    workers.close()


def test_a_late_process_is_killed(tmp_path):
    workers = Workers(script(tmp_path, "    time.sleep(60) if question else answer(question)\n"), 1)
    assert workers.ask([0], 60.0) == [0]
    before = workers.pids
    assert workers.ask([1, 0], 0.3)[0] == Lost(late=True, text="")
    assert gone(before)
    workers.close()
    assert gone(workers.pids)


def test_replies_of_a_call_that_was_broken_off_go_to_nobody(tmp_path):
    workers = Workers(script(tmp_path, "    time.sleep(question[0])\n    answer(question[1])\n"), 1)
    wait = workers._wait

    def interrupted():
        wait()
        if workers._processes[0].question == 1:
            raise KeyboardInterrupt

    workers._wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        workers.ask([[0.0, "old"], [0.0, "older"]], 60.0)
    workers._wait = wait
    assert workers.ask([[0.0, "new"]], 60.0) == ["new"]
    workers.close()


def test_large_questions_and_replies(tmp_path):
    workers = Workers(script(tmp_path, "    answer(question + question)\n"), 1)
    text = "\u00e9" * 300_000
    assert workers.ask([text], 60.0) == [text + text]
    workers.close()


def test_a_process_that_does_not_start_says_why(tmp_path, monkeypatch):
    path = tmp_path / "broken.py"
    path.write_text('print(\'["broken", "math-verify cannot be imported: no such module"]\')')
    with pytest.raises(RuntimeError, match="math-verify cannot be imported: no such module"):
        Workers([sys.executable, str(path)], 1).ask([1], 1.0)
    path.write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="ended with status 3 while starting"):
        Workers([sys.executable, str(path)], 1).ask([1], 1.0)
    (tmp_path / "math_verify.py").write_text("raise Exception('a grammar of another version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="cannot be imported: Exception: a grammar of another version"):
        Workers([sys.executable, symbolic_worker.__file__], 1).ask([1], 1.0)


def problems(stage):
    graph = Graph(name="g", source=Prompts(Generated()), stages=(stage,), schedule=Schedule(steps=1))
    return [str(problem) for problem in stage.check(graph)]


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (
            MathVerify(timeout_s=0),
            "MathVerify has timeout_s=0; it must be a number of seconds above 0. Fix: timeout_s=5.0",
        ),
        (MathVerify(processes=0), "MathVerify has processes=0; it must be 1 or more. Fix: processes=2"),
        (
            MathVerify(on_timeout=float("nan")),
            "MathVerify has on_timeout=nan; it is a reward, or None for an error. Fix: on_timeout=0.0",
        ),
        (
            MathVerify(on_error="0"),
            "MathVerify has on_error='0'; it is a reward, or None for an error. Fix: on_error=0.0",
        ),
        (
            MathVerify(answer_after=None),
            'MathVerify has answer_after=None; it must be a string. Fix: answer_after="####"',
        ),
    ],
)
def test_problems_of_the_description(monkeypatch, description, text):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    stage = Reward(description, exact_match)
    assert problems(stage) == [f"{stage.location}: {text}"]


def test_a_missing_package_is_found_by_the_check(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    stage = Reward(MathVerify())
    assert problems(stage) == [
        f"{stage.location}: math_verify needs the package 'math-verify'; it is not installed. "
        "Fix: pip install 'sluice-rl[math]'"
    ]
