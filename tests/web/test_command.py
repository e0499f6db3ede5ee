"""Real runs in a browser: followed from start to end, and, with `--view`, killed and inspected afterwards."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import Command
from tests.web.serving import serving

pytestmark = pytest.mark.journal_expected  # the run is killed
RECIPE = Path(__file__).parents[2] / "graphs" / "quickstart.py"
START_S = 120.0
WAIT_MS = 60_000


def test_a_run_is_watched_and_then_killed(browser, tmp_path):
    flags = ["--executor", "local", "--steps", "400", "--warm-start-steps", "5", "--evaluate-every", "1000"]
    command = [sys.executable, "-u", "-m", "pipeline.run", str(RECIPE), *flags, "--run-dir", "runs/watched", "--view"]
    environment = os.environ | {"BROWSER": "true"}  # a browser command that opens nothing
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout is not None
    try:
        address = next(line for line in run.stdout if line.startswith("http://127.0.0.1:")).strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}#/watched/graph", address)
        tab = browser.new_page()
        tab.goto(address)
        tab.wait_for_selector(".pill.running", timeout=START_S * 1000)
        tab.wait_for_selector("text=/running|▶/", timeout=START_S * 1000)
        tab.wait_for_function(
            "() => Number(document.querySelector('.status progress')?.value) >= 2", timeout=START_S * 1000
        )
        port = int(address.split(":")[2].partition("/")[0])
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait(10)
    tab.wait_for_selector("text=No connection", timeout=WAIT_MS)  # the view ended with the run
    assert listens_until(port, time.monotonic() + 10) is False
    with serving(tmp_path / "runs") as served:
        tab.goto(served.address)
        tab.goto(f"{served.address.partition('?')[0]}#/watched/graph")
        tab.wait_for_selector("text=The processes of this run are gone", timeout=WAIT_MS)
        tab.wait_for_selector("text=/-bound: \\d+ % of the step|once a few steps/", timeout=WAIT_MS)
        assert not tab.locator(".node.running").count() and tab.locator(".why:has-text('stopped: ')").count()
        tab.click(".brand")
        tab.wait_for_selector(".pill.failed >> text=Killed", timeout=WAIT_MS)
    tab.close()


def test_a_run_is_watched_from_its_start_to_its_end(browser, tmp_path):
    steps = 12
    flags = ["--executor", "local", "--steps", str(steps), "--warm-start-steps", "5", "--evaluate-every", "1000"]
    folder = tmp_path / "runs"
    folder.mkdir()
    with serving(folder) as served:
        tab = browser.new_page()
        tab.goto(served.address)
        tab.wait_for_selector("text=There are no runs yet. Start one: python -m pipeline.run quickstart")
        tab.goto(f"{served.address.partition('?')[0]}#/watched/graph")
        tab.wait_for_selector("main [role=alert]")  # nothing to show yet; the run is found when it starts
        words = ["-m", "pipeline.run", str(RECIPE), *flags, "--run-dir", "runs/watched"]
        run = Command(*words, cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            done = "least => Number(document.querySelector('.status progress')?.value) >= least"
            tab.wait_for_function(done, arg=3, timeout=START_S * 1000)
            tab.reload()
            tab.wait_for_function(done, arg=3, timeout=WAIT_MS)
            tab.wait_for_selector(".pill.finished", timeout=START_S * 1000)
            assert run.wait(60) == 0
        finally:
            run.kill()
        assert tab.locator(".status b").first.inner_text() == str(steps)
        tab.click("text=Samples")
        tab.wait_for_selector(".response", timeout=WAIT_MS)
        tab.close()


def listens_until(port: int, until: float) -> bool:
    """Return whether the port still accepts connections at that time."""
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return False
        time.sleep(0.2)
    return True
