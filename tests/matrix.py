"""The page of faults and threats, from the results of the tests that show each row.

    python -m pytest --junitxml report.xml
    python -m tests.matrix report.xml                 # says which rows hold; exit code 1 if one does not
    python -m tests.matrix report.xml --out docs/fault-matrix.md

Seconds from a fault to the next trained step come from benchmarks/results/recovery.json (`python -m
benchmarks.recovery`), which the machine of the page measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RECOVERY = ROOT / "benchmarks" / "results" / "recovery.json"


@dataclass(frozen=True)
class Row:
    """What may happen, what Sluice does then, and the tests (file::name below tests/) that show it. `measured` names
    the fault in benchmarks/recovery.py."""

    event: str
    answer: str
    tests: tuple[str, ...]
    measured: str = ""


FAULTS = (
    Row(
        "a sampler's process is killed",
        "replaced, with the weights that it served; its samples are made again as the next attempt",
        (
            "integration/test_lost_workers.py::test_a_sampler_that_dies_is_replaced_and_its_samples_are_made_again",
            "integration/test_lost_workers.py::test_streams_that_die_are_begun_again_and_slow_groups_still_dropped",
            "engines/test_engine_runs.py::test_the_quickstart_learns_with_both_engines_and_a_sampler_that_dies",
        ),
        "sampler killed",
    ),
    Row(
        "a vLLM engine's process is killed",
        "started again inside its worker, with the weights that it served",
        (
            "engines/test_vllm_faults.py::test_a_lost_engine_is_started_again_with_the_weights_it_served",
            "engines/test_vllm_faults.py::test_an_engine_that_dies_twice_under_a_task_ends_it",
            "engines/test_vllm_faults.py::test_an_engine_ends_with_its_worker",
        ),
    ),
    Row(
        "a trainer's rank is killed",
        "the run goes back to its last checkpoint and ends with the same weights",
        (
            "integration/test_lost_workers.py::test_the_command_goes_on_from_the_last_checkpoint_and_ends_with_the_same_weights",
            "engines/test_engine_runs.py::test_a_trainer_of_two_ranks_that_loses_one_goes_back_to_its_checkpoint",
        ),
        "learner killed",
    ),
    Row(
        "a worker hangs (SIGSTOP)",
        "killed after its heartbeat's deadline and replaced; what it writes later is never seen",
        (
            "integration/test_hung_workers.py::test_a_sampler_that_is_stopped_is_replaced_and_nothing_changes",
            "integration/test_hung_workers.py::test_a_trainer_that_is_stopped_takes_the_run_back_to_a_checkpoint",
            "integration/test_hung_workers.py::test_what_a_worker_that_was_taken_for_lost_writes_is_never_seen_and_is_swept",
        ),
    ),
    Row(
        "a worker is slow, or a stage in the driver's process hangs",
        "a slow worker is waited for, or its late groups are dropped if the schedule says so; what hangs ends the run "
        "at its deadline, with the line of code and the command to resume",
        (
            "integration/test_hung_workers.py::test_only_who_hangs_is_replaced",
            "integration/test_async.py::test_no_trained_token_is_older_than_allowed",
            "unit/test_watchdog.py::test_a_stage_that_hangs_in_the_drivers_process_ends_the_run_with_its_line",
            "unit/test_watchdog.py::test_what_cannot_be_interrupted_ends_with_the_process_and_its_last_words",
        ),
    ),
    Row(
        "the wall clock jumps",
        "durations and deadlines come from a monotonic clock",
        (
            "unit/test_clock.py::test_a_run_whose_clock_jumps_by_hours_is_the_same_run",
            "unit/test_clock.py::test_nothing_but_the_record_reads_the_wall_clock",
        ),
    ),
    Row(
        "TransferQueue's controller or a storage unit dies",
        "an error within seconds, and the run resumes from its last checkpoint",
        (
            "contract/test_transfer_queue_plane.py::test_a_slow_store_is_waited_for_and_a_lost_one_is_an_error_at_once",
            "integration/test_chaos.py::test_a_run_on_ray_survives",
        ),
        "storage killed",
    ),
    Row(
        "Ray's control store dies, or stops",
        "it dies: the run says so and ends within seconds; it stops: training goes on, and the run ends without it",
        (
            "integration/test_stopping.py::test_a_run_whose_control_store_has_died_says_so_and_leaves_no_process",
            "integration/test_stopping.py::test_a_run_ends_even_if_rays_control_store_has_stopped",
        ),
    ),
    Row(
        "the driver is killed at any moment",
        "no process is left; a resume ends with the weights of a run that was not disturbed",
        (
            "integration/test_chaos.py::test_a_local_run_survives",
            "integration/test_chaos.py::test_a_run_on_ray_survives",
        ),
        "driver killed",
    ),
    Row(
        "a machine is lost",
        "said within 10 s, and the run ends or goes on from its checkpoint",
        ("integration/test_three_hosts.py::test_a_lost_machine_is_said_within_10_s_and_ends_the_run",),
    ),
    Row(
        "SIGTERM, SIGHUP, SIGQUIT, Ctrl-C, also to the whole process group",
        "the step in training is finished and saved, exit code 143, 129, 131, 130; a second one ends the run now",
        (
            "integration/test_stopping.py::test_a_command_that_gets_a_signal_saves_and_can_be_resumed",
            "integration/test_stopping.py::test_weights_are_those_of_a_run_that_was_not_stopped",
            "integration/test_stopping.py::test_a_second_signal_ends_a_run_now",
            "integration/test_stopping.py::test_a_run_that_ends_while_its_workers_start_leaves_no_process",
        ),
    ),
    Row(
        "a loss or gradient is not finite, or training diverges",
        "the update is skipped and counted; said once with its step, and by choice the run stops",
        (
            "unit/test_torch_learner.py::test_an_update_that_is_not_finite_is_skipped_and_counted",
            "engines/test_megatron.py::test_an_update_that_is_not_finite_changes_nothing",
            "unit/test_divergence.py::test_a_learning_rate_that_ruins_the_policy_is_noticed_within_a_few_steps",
            "unit/test_divergence.py::test_a_run_that_is_to_stop_ends_as_on_an_error",
        ),
    ),
    Row(
        "an environment raises, hangs, exits, lies or is killed",
        "opened again with the same draws; what fails again at its turn is the policy's and scored, what cannot be "
        "opened is lost and never trained",
        (
            "unit/test_episode.py::test_a_failure_that_does_not_come_again_changes_nothing",
            "unit/test_episode.py::test_a_failure_that_comes_again_at_its_turn_is_the_policys",
            "unit/test_episode.py::test_what_cannot_be_opened_is_lost",
            "unit/test_episode.py::test_a_run_with_lost_episodes_trains_the_others",
            "integration/test_unruly.py::test_a_run_with_unruly_environments_is_sound",
        ),
    ),
    Row(
        "a worker of a group of environments is killed, or its machine does not answer",
        "replaced; its episodes go on at another one, to the same bits",
        (
            "unit/test_environment_groups.py::test_episodes_of_a_worker_that_dies_go_on_elsewhere",
            "integration/test_environment_groups_ray.py::test_environments_on_another_node_are_those_beside_the_sampler_whatever_is_killed",
            "integration/test_environment_groups_ray.py::test_a_machine_that_no_longer_answers_ends_the_connection",
        ),
    ),
    Row(
        "a run is cut off in the middle of its episodes",
        "goes on there: the turns so far are not sampled again, and the weights are those of a run that was not cut "
        "off",
        (
            "unit/test_kept_turns.py::test_a_run_that_was_cut_off_in_its_episodes_ends_as_the_whole_one",
            "unit/test_kept_turns.py::test_an_environment_that_answers_otherwise_is_found_and_sampled_again",
        ),
    ),
    Row(
        "a reward raises, hangs, or leaves Python",
        "asked again if so declared, then one error with its line and the sample",
        (
            "unit/test_reward_calls.py::test_a_service_that_fails_at_first_is_asked_again",
            "unit/test_reward_calls.py::test_a_service_that_hangs_is_late",
            "unit/test_reward_calls.py::test_a_function_that_leaves_python_is_an_error_of_its_own",
        ),
    ),
    Row(
        "the disk is full or fails, at any write",
        "older checkpoints stay whole, one error names the file, the run resumes once there is room",
        (
            "unit/test_checkpoint_disk.py::test_wherever_the_disk_fails_the_old_checkpoint_stays_and_the_error_names_the_file",
            "unit/test_checkpoint_disk.py::test_a_full_disk_ends_the_run_with_the_name_of_the_file_and_the_run_resumes",
            "unit/test_checkpoint_files.py::test_whenever_the_process_ends_each_checkpoint_is_whole_and_the_newest_stays",
        ),
    ),
    Row(
        "a file of a run or a model is damaged, missing, a pipe",
        "one plain error, or the checkpoint before it",
        (
            "unit/test_damaged_files.py::test_the_record_of_a_run",
            "unit/test_damaged_files.py::test_a_resume",
            "unit/test_damaged_files.py::test_the_state_of_a_learner",
            "unit/test_damaged_files.py::test_the_folder_of_a_model",
        ),
    ),
    Row(
        "the storage of a mirror fails, or the machine with the run directory is gone",
        "training goes on and the storage is tried again; the run goes on from its mirror",
        (
            "unit/test_mirror.py::test_a_storage_that_fails_is_tried_again",
            "unit/test_mirror.py::test_a_run_goes_on_from_its_mirror_as_if_nothing_had_happened",
        ),
    ),
    Row(
        "a stage writes the wrong thing, or twice",
        "refused with stage, key and field; the same bytes again change nothing",
        (
            "contract/test_plane_errors.py::test_text_of_a_refused_put",
            "contract/test_plane_contract.py::test_repeated_put_is_a_no_op_and_other_bytes_raise",
            "contract/test_plane_contract.py::test_attempts_are_fenced",
        ),
    ),
    Row(
        "two runs in one folder; a worker that does not see the folder",
        "refused, and what is there stays as it is",
        (
            "unit/test_lock.py::test_a_second_run_in_a_folder_is_refused_and_changes_nothing",
            "unit/test_shared_directory.py::test_all_workers_see_the_directory_of_the_driver",
        ),
    ),
)
THREATS = (
    Row(
        "another user of the machine talks to TransferQueue",
        "a message without the run's signature is refused before anything is unpickled",
        (
            "contract/test_signed.py::test_every_socket_of_transfer_queue_is_closed_to_a_stranger",
            "contract/test_transfer_queue_plane.py::test_everything_listens_on_loopback_only",
        ),
    ),
    Row(
        "a stranger joins or asks Ray, or finds another open socket",
        "its token is needed, a wrong one is refused in one line; all other sockets are on the loopback interface",
        (
            "integration/test_three_hosts.py::test_the_cluster_refuses_another_token_in_one_line",
            "integration/test_stopping.py::test_every_socket_of_a_run_is_closed_to_a_stranger",
            "integration/test_stopping.py::test_no_other_user_enters_the_folder_of_rays_sockets",
            "engines/test_vllm.py::test_an_engine_is_reached_by_its_owner_only",
        ),
    ),
    Row(
        "another user reads a run; a secret gets into its files",
        "folders and files are private, and no variable of the environment is recorded",
        (
            "integration/test_private_runs.py::test_others_can_read_nothing_of_a_run",
            "integration/test_collisions_ray.py::test_workers_import_what_the_driver_does_and_no_secret_is_recorded",
            "unit/test_mirror.py::test_an_address_that_cannot_be_used_is_refused_before_anything_starts",
        ),
    ),
    Row(
        "a model writes markup; another site asks the view",
        "text stays text; token, cookie, Host and Origin are checked, and nothing but GET is taken",
        (
            "web/test_pages.py::test_whatever_a_model_wrote_is_text",
            "web/test_server.py::test_strangers_are_refused",
            "web/test_server.py::test_nothing_but_get_is_taken",
            "web/test_server.py::test_paths_lead_nowhere_else",
        ),
    ),
    Row(
        "a model folder has pickles or code; a mirror's manifest names files outside",
        "refused unless a flag says so; nothing is written outside",
        (
            "unit/test_model_files.py::test_a_folder_that_runs_code_is_refused",
            "unit/test_model_files.py::test_transformers_itself_gets_neither_pickles_nor_code",
            "unit/test_mirror.py::test_a_manifest_of_the_storage_writes_nothing_outside",
        ),
    ),
    Row(
        "a dependency is not declared",
        "found; `.ci/run` asks the audit service for known vulnerabilities",
        ("unit/test_dependencies.py::test_every_import_is_declared",),
    ),
)


@dataclass
class Result:
    """What a run of the tests says of one test, over all its parameters."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    longest_s: float = 0.0


def read(report: Path) -> dict[str, Result]:
    """Return the results in a JUnit report by file::name below tests/."""
    found: dict[str, Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        one = found.setdefault(f"{module}.py::{case.get('name', '').partition('[')[0]}", Result())
        kinds = {child.tag for child in case}
        one.failed += bool(kinds & {"failure", "error"})
        one.skipped += "skipped" in kinds
        one.passed += not kinds & {"failure", "error", "skipped"}
        one.longest_s = max(one.longest_s, float(case.get("time", 0)))
    return found


def state(row: Row, results: Mapping[str, Result]) -> str:
    """Return "holds", or why that is not shown."""
    for test in row.tests:
        result = results.get(test, Result())
        if result.failed:
            return f"{test} failed"
        if not result.passed:
            return f"{test} was {'skipped' if result.skipped else 'not run'}"
    return "holds"


def lines(rows: Iterable[Row], results: Mapping[str, Result], recovery: Mapping[str, float], first: str) -> list[str]:
    """Return a table in Markdown."""
    made = [
        f"| {first} | what Sluice does | shown by | cases | longest | next step after |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        of = [results.get(test, Result()) for test in row.tests]
        after = f"{recovery[row.measured]:.1f} s" if row.measured in recovery else "-"
        tests = ", ".join(f"`tests/{test}`" for test in row.tests)
        cases, longest_s = sum(one.passed for one in of), max(one.longest_s for one in of)
        figures = f"{cases} | {longest_s:.1f} s" if cases else "- | -"
        made.append(f"| {row.event} | {row.answer} | {tests} | {figures} | {after} |")
    return made


def page(results: Mapping[str, Result], recovery: Mapping[str, float]) -> str:
    """Return the page."""
    return "\n".join(
        [
            "# Faults and threats, and the tests that show each",
            "",
            "`python -m tests.matrix report.xml --out docs/fault-matrix.md` writes this page from the results of",
            "`python -m pytest --junitxml report.xml`; `.ci/run` fails if a row does not hold. `cases` passed;",
            "`longest` is the slowest of them. `next step after` is the time from the fault to the next trained step",
            "on two cores (`python -m benchmarks.recovery`); - is not measured yet.",
            "",
            *lines(FAULTS, results, recovery, "fault"),
            "",
            *lines(THREATS, results, recovery, "threat"),
            "",
        ]
    )


def measured() -> dict[str, float]:
    """Return the median seconds of benchmarks.recovery by fault; empty if they were not measured."""
    if not RECOVERY.is_file():
        return {}
    rows = json.loads(RECOVERY.read_bytes())["rows"]
    return {row["fault"]: row["median s"] for row in rows if isinstance(row["median s"], int | float)}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="the JUnit report of a run of the tests")
    parser.add_argument("--out", type=Path, help="write the page here")
    options = parser.parse_args()
    results = read(options.report)
    broken = [(row, found) for row in (*FAULTS, *THREATS) if (found := state(row, results)) != "holds"]
    for row, found in broken:
        print(f"{row.event}: {found}", file=sys.stderr)
    if options.out and not broken:
        options.out.write_text(page(results, measured()))
    print(f"{len(FAULTS)} faults and {len(THREATS)} threats, {len(broken)} not shown")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
