"""Runs that span three machines, none of which knows the name of another: refits, failures, the cluster's token."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.record import trace
from pipeline.rundir import RunDir
from tests.conftest import REPOSITORY
from tests.hosts import Machine, hosts

GRAPH = str(Path(__file__).with_name("hosts_graph.py"))
ROOM = 2, 5, 4  # CPUs by machine: the columns on the first, the sampler on the second, the learner on the third
PORT = 6379
RUN_S = 120.0


@dataclass
class Cluster:
    """A Ray cluster on three machines; commands run on the first."""

    machines: list[Machine]
    environment: dict[str, str]

    @property
    def address(self) -> str:
        """The address of the cluster."""
        return f"{self.machines[0].address}:{PORT}"

    def command(self, folder: Path, *flags: str) -> tuple[str, ...]:
        """Return the command line of a run that joins the cluster."""
        run = (sys.executable, "-m", "pipeline.run", GRAPH, "--address", self.address, "--trusted-network", "--plain")
        return (*run, "--run-dir", str(folder), *flags)

    def run(self, folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the graph to its end."""
        words = self.command(folder, *flags)
        return self.machines[0].run(*words, env=self.environment | variables, timeout=RUN_S, cwd=folder.parent)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three machines whose Ray nodes share a token."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "PYTHONPATH": REPOSITORY}
    with hosts(len(ROOM)) as machines:
        made = Cluster(machines, os.environ | own)
        ray = str(Path(sys.executable).with_name("ray"))

        def start(machine: Machine, cpus: int, *words: str) -> None:
            small = f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}"
            done = machine.run(ray, "start", *words, *small, env=made.environment)
            assert done.returncode == 0, done.stderr

        start(machines[0], ROOM[0], "--head", f"--port={PORT}", "--include-dashboard=false")
        with ThreadPoolExecutor() as pool:
            list(pool.map(start, machines[1:], ROOM[1:], [f"--address={made.address}"] * 2))
        yield made


def test_a_failed_end_of_a_refit_ends_it_for_all_and_is_the_error(cluster: Cluster, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    done = cluster.run(tmp_path / "run", "--interface", "gone0")
    assert done.returncode == 3 and time.monotonic() - begun_s < RUN_S / 2
    assert "rank 1 did not meet the other 1" in done.stderr and "gone0" in done.stderr
    waited = (tmp_path / "run" / "logs" / "learner-0.log").read_text()
    assert "rank 0 did not meet the other 1" in waited and "gone0" in waited, "it knows why it need not wait"


def test_the_cluster_refuses_another_token_in_one_line(cluster: Cluster, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    done = cluster.run(tmp_path / "run", RAY_AUTH_TOKEN="another")
    error, way_on = done.stderr.splitlines()
    assert done.returncode == 2 and time.monotonic() - begun_s < RUN_S / 4
    assert error.startswith(f"--address {cluster.address}: the cluster refuses the token of RAY_AUTH_TOKEN;")
    assert f"--address {cluster.address} --trusted-network --run-dir" in way_on and "--resume" in way_on


def test_a_group_that_fits_no_machine_is_refused_at_once(cluster: Cluster, tmp_path: Path) -> None:
    begun_s = time.monotonic()
    done = cluster.run(tmp_path / "run", "--learner-cpus", "5.5", "--sampler-cpus", "1")
    assert done.returncode == 2 and time.monotonic() - begun_s < RUN_S / 4
    assert "worker group 'learner' asks for 1 x 5.5 CPUs, and 0 of them fit on the cluster's machines;" in done.stderr
    assert "10.77.0.1 has 2 CPUs; 10.77.0.2 has 5 CPUs; 10.77.0.3 has 4 CPUs" in done.stderr


def test_a_group_that_waits_for_room_says_so_soon(cluster: Cluster, tmp_path: Path) -> None:
    """Both groups fit on the second machine only, and not beside each other."""
    flags = "--learner-cpus", "4.5", "--sampler-cpus", "4.5"
    with cluster.machines[0].start(
        *cluster.command(tmp_path / "run", *flags), env=cluster.environment, stderr=subprocess.PIPE, text=True
    ) as running:
        begun_s = time.monotonic()
        assert running.stderr
        said = running.stderr.readline()
        assert time.monotonic() - begun_s < RUN_S / 4
        assert "worker group 'learner' has found no room for 5 s; it asks for 1 x 4.5 CPUs; free are: " in said
        assert "10.77.0.2 has 0.5 CPUs; 10.77.0.3 has 4 CPUs" in said and "the run waits for 300 s" in said
        cluster.machines[0].send(signal.SIGKILL, running)


@pytest.fixture(scope="module")
def long_run(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], RunDir]]:
    """A run that is in its fourth step or later, and does not end by itself; after it, no other run has room."""
    run_dir = RunDir(tmp_path_factory.mktemp("long") / "run")
    words = cluster.command(run_dir.path, "--steps", "5000")
    with cluster.machines[0].start(
        *words, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as running:
        until_s = time.monotonic() + RUN_S
        while not (run_dir.metrics.exists() and run_dir.metrics.read_text().count("\n") > 3):
            if running.poll() is not None or time.monotonic() > until_s:
                running.kill()
                pytest.fail(f"the run has come to no fourth step: {running.poll()}")
            time.sleep(0.1)
        yield running, run_dir
        if running.poll() is None:
            cluster.machines[0].send(signal.SIGKILL, running)


def test_a_refit_uses_rays_addresses_whatever_the_machines_names_lead_to(cluster: Cluster, long_run: Any) -> None:
    _, run_dir = long_run
    nodes = {event.group: event.node for _, event in trace.read(run_dir.events) if isinstance(event, trace.Placed)}
    assert nodes == {"sampler": cluster.machines[1].address, "learner": cluster.machines[2].address}
    assert json.loads(run_dir.metrics.read_text().splitlines()[1])["refit/path_gloo"] == 1


def test_the_columns_stay_on_the_drivers_machine(cluster: Cluster, long_run: Any) -> None:
    shown = [machine.run("ps", "-axo", "args").stdout for machine in cluster.machines]
    assert all(f"ray::{name}" in shown[0] for name in ("TransferQueueController", "SimpleStorageUnit"))
    assert "ray::StreamActor" in shown[1] and "ray::Actor" in shown[2]


def test_a_lost_machine_is_said_within_10_s_and_ends_the_run(cluster: Cluster, long_run: Any) -> None:
    """The last test: the machine does not come back."""
    running, _ = long_run
    learner = cluster.machines[2]
    learner.power_off()
    lost_s = time.monotonic()
    said = next(line for line in running.stderr if line.startswith("machine "))
    assert time.monotonic() - lost_s < 10 and "there: learner.0;" in said
    assert said.startswith(f"machine {learner.address}: warning: it has not answered for 6 s")
    assert running.wait(RUN_S) == 3 and time.monotonic() - lost_s < 40
    assert f"machine {learner.address}: it has not answered for 20 s" in running.stderr.read()
