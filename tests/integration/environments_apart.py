"""A run on a cluster of two logical nodes, with its environments on the second, where processes are killed meanwhile.

python environments_apart.py FOLDER

Two samplers ask two workers of the group "envs", which have an interpreter of their own, with a module that no other
process of the run finds. Once a turn runs in one of their processes, that process is killed,
and later the worker beside another one. Prints what became of it, as JSON.
"""

import json
import os
import secrets
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

from pipeline import WorkerGroup
from pipeline.executors.ray import RayExecutor
from pipeline.record import trace
from stages import Episode, Refit
from tests.other_python import other_python
from tests.unit.environments import Echo
from tests.unit.test_episode import execute, is_running, published, run_graph
from tests.waiting import until


@dataclass(frozen=True)
class Noted(Echo):
    """Echo that writes the number of its process, and whose Python that is, to the file `log` when a turn begins, and
    then takes a while."""

    log: str = ""
    turn_s: float = 0.0

    def turn(self, state, reply):
        import time

        if self.log:
            import only_there

            with Path(self.log).open("a") as file:
                file.write(f"{os.getpid()} {only_there.VALUE} {sys.prefix}\n")
        time.sleep(self.turn_s)
        return super().turn(state, reply)


def seen(log: Path) -> list[int]:
    """The processes in which turns have begun."""
    return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kills(log: Path, found: list[int]) -> None:
    """Kill a process in the middle of a turn, and the worker beside another one, in the middle of another turn."""
    first = until(lambda: seen(log), 300)[-1]
    os.kill(first, signal.SIGKILL)
    count = len(seen(log))
    second = until(lambda: [pid for pid in seen(log)[count + 4 :] if pid != first and is_running(pid)], 300)[-1]
    found += [first, second, parent(second)]
    os.kill(parent(second), signal.SIGKILL)


def main(folder: Path) -> None:
    log, killed = folder / "log", list[int]()
    python = other_python(folder / "venv", {"only_there": "VALUE = 7\n"})
    envs = WorkerGroup("envs", workers=2, cpus=4.0, python=python)
    wanted = published(execute(folder / "local", run_graph(Noted(), environments=2)))
    graph = run_graph(Noted(log=str(log), turn_s=0.2), environments=envs, retries=3)
    samplers = replace(graph.stages[0].on, workers=2, cpus=0.5)
    stages = [
        replace(stage, on=samplers) if isinstance(stage, Episode)
        else replace(stage, target=samplers) if isinstance(stage, Refit) else stage
        for stage in graph.stages
    ]  # fmt: skip
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6, "node_ip_address": "127.0.0.2"})
    cluster.add_node(num_cpus=8, node_ip_address="127.0.0.3")
    cluster.wait_for_nodes()
    killer = threading.Thread(target=kills, args=(log, killed), daemon=True)
    killer.start()
    executor = RayExecutor(address=cluster.address, modules=[sys.modules[__name__]])
    events = execute(folder / "run", replace(graph, stages=tuple(stages)), executor)
    killer.join(60)
    placed = [event for event in events if isinstance(event, trace.Placed) and event.group == "envs"]
    pids = {*seen(log), *killed, *(event.pid for event in placed)}
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ran = [event for event in events if isinstance(event, trace.Ran) and event.stage == "episode"]
    said = {
        "same": published(events) == wanted,
        "nodes": sorted({event.node for event in placed}),
        "placed": [event.worker for event in placed],
        "retried": sum(json.loads(line).get("episode/retried", 0.0) for line in lines),
        "samplers": sorted({event.worker for event in ran}),
        "dropped": [event.reason for event in events if isinstance(event, trace.Dropped)],
        "killed": len(killed),
        "python": sorted({line.partition(" ")[2] for line in log.read_text().splitlines()}),
    }
    cluster.shutdown()
    until(lambda: not any(map(is_running, pids)))
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
