"""Errors of the commands that read a record: missing or incomplete records, and flags that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.errors.harness import live_text
from tests.errors.resumes import ResumeCase, cut, in_runs, nothing, remove


def reading(name: str, program: str, *args: str, change: Callable[[Path], None] = nothing) -> ResumeCase:
    """Return a case of `python -m pipeline.PROGRAM` on a copy of a finished run of two steps, `run`."""
    return ResumeCase(name, text=live_text(), graph=None, program=program, args=args, change=change)


def _write(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(content)

    return change


COMMANDS = ("analyse", "simulate", "export", "forward", "mirror")
CASES = [
    reading("new_nothing", "new"),
    reading("new_over_a_file", "new", "graph"),
    reading("new_in_no_folder", "new", "my work/mine"),
    reading("new_in_a_file", "new", "graph.py/mine"),
    reading("new_of_no_recipe", "new", "mine", "--from", "grop"),
    reading("new_like_a_module", "new", "random"),
    reading("new_with_a_space", "new", "a b"),
    reading("analyse_nothing", "analyse"),
    reading("analyse_no_run", "analyse", "runs"),
    reading("analyse_no_record", "analyse", "run", change=remove("run/events.jsonl")),
    reading("analyse_cut_plan", "analyse", "run", change=cut("run/plan.json", 100)),
    reading("analyse_wrong_event", "analyse", "run", change=_write("run/events.jsonl", '{"type": "begun"}\n')),
    reading("analyse_wrong_metrics", "analyse", "run", change=_write("run/metrics.jsonl", "step 1\n")),
    reading("analyse_step_beyond", "analyse", "run", "--step", "3"),
    reading("analyse_step_before_any_ended", "analyse", "run", "--step", "1", change=_write("run/events.jsonl", "")),
    reading("analyse_step_is_no_number", "analyse", "run", "--step", "last"),
    reading("analyse_step_of_two_runs", "analyse", "run", "--step", "1", "--compare", "run"),
    reading("analyse_with_no_run", "analyse", "run", "--compare", "other"),
    reading("analyse_misspelled", "analyse", "run", "--comparison", "other"),
    *(reading(f"{program}_nothing_of_a_run_in_runs", program, change=in_runs) for program in COMMANDS),
    reading("analyse_a_name_too_long", "analyse", "x" * 256),
    reading("simulate_a_name_too_long", "simulate", "x" * 256),
    reading("mirror_nowhere", "mirror", "run"),
    reading("view_of_no_folder", "view", "nodir"),
    reading("view_of_no_folder_of_a_run_in_runs", "view", "nodir", change=in_runs),
    reading("export_nothing", "export"),
    reading("export_no_format", "export", "run"),
    reading("export_no_run", "export", "elsewhere", "--csv", "tables"),
    reading("export_onto_a_file", "export", "run", "--csv", "graph.py"),
    reading("export_over_a_file", "export", "run", "--html", "graph.py", "--perfetto", "run/events.jsonl"),
    reading("export_onto_a_folder", "export", "run", "--perfetto", "run"),
    reading("export_misspelled", "export", "run", "--perfeto", "trace.json"),
    reading("forward_nothing", "forward", "--follow"),
    reading("forward_no_service", "forward", "run", "--follow"),
    reading("forward_password", "forward", "run", "--mlflow", "https://me:secret@example.org"),
    reading("simulate_environments_without_episodes", "simulate", "run", "--environments", "reward=4"),
    reading("simulate_one_step", "simulate", "run", change=_write("run/events.jsonl", "")),
]
