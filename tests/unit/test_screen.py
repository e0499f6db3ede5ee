"""What libraries print while they load goes into a log; what a run says goes to the screen."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, os, subprocess, sys
from pathlib import Path
from pipeline.engine.termination import _say
from pipeline.screen import aside, back, say

print("before")
with aside(Path("log")):
    print("a print")
    handler = logging.StreamHandler()
    logging.getLogger("library").addHandler(handler)
    os.write(2, b"of C\\n")
    subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
    say("starting\\n")
    _say("a signal\\n")
    if len(sys.argv) > 1:
        back()
        print("last words", file=sys.stderr)
logging.getLogger("library").warning("later")
print("after")
"""


def test_only_what_a_run_says_is_on_the_screen(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for words, told in (((), ["a signal"]), (("ends",), ["a signal", "last words"])):
        (tmp_path / "log").unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout.split("\n")[:-1]) == (0, ["before", "starting", "after"]), done.stderr
        assert done.stderr.splitlines() == told
        assert (tmp_path / "log").read_text().splitlines() == ["a print", "of C", "of a child", "later"]
