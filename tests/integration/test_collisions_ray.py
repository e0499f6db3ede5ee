"""A run on Ray in a folder whose files have the names of Sluice's, Python's and installed modules."""

from tests.errors.harness import live_text
from tests.unit.test_collisions import RAISES, sluice, written

INSTALLED = ("torch", "numpy", "tensordict", "transfer_queue", "ray", "msgspec", "cloudpickle", "random")
OURS = ("pipeline__init__", "pipeline__executors", "stages__init__", "ops")


def test_no_process_of_a_run_imports_a_users_file_in_the_place_of_an_installed_package(tmp_path):
    """Neither a worker nor an actor of the data plane does; `both` is the graph's, not the working directory's."""
    graph = "import both, here\n\n" + live_text()
    files = dict.fromkeys((*INSTALLED, *OURS, "both"), RAISES)
    written(tmp_path, project__graph=graph, project__both="", here="", **files)
    code, _, stderr = sluice(tmp_path, "run", "project/graph.py", "--run-dir", "run", "--steps", "1", "--plain")
    assert (code, stderr) == (0, "")
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == 1
