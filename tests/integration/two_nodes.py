"""A run that joins a cluster of two logical nodes, with a storage unit on each; the worker group fits only on the
second.

python two_nodes.py FOLDER   copies the small graph to FOLDER with a helper beside it, loads it, deletes FOLDER, runs.

On the workers, the graph's code can only come from the driver. Prints where workers and storage units ran, as JSON.
"""

import json
import os
import secrets
import shutil
import sys
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

from ray.cluster_utils import Cluster

from pipeline.cli.load import load
from pipeline.engine.driver import Driver
from pipeline.executors.ray import RayExecutor
from pipeline.executors.sent import user_modules
from pipeline.plan.planner import plan
from pipeline.record import trace
from pipeline.rundir import RunDir

HERE = Path(__file__).parent
folder = Path(sys.argv[1])
source = folder / "graph"
source.mkdir(parents=True)
text = (HERE / "small_graph.py").read_text()
(source / "shouting.py").write_text("def double(text: str) -> str:\n    return text * 2\n")
text = text.replace("from typing import Any\n", "from typing import Any\n\nimport shouting\n", 1)
text = text.replace("[text * 2 for text", "[shouting.double(text) for text")
text = text.replace('WorkerGroup("shouters", workers=workers)', 'WorkerGroup("shouters", workers=workers, cpus=4.0)')
(source / "small_graph.py").write_text(text)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "node_ip_address": "127.0.0.2"})
cluster.add_node(num_cpus=5, node_ip_address="127.0.0.3")
cluster.wait_for_nodes()
file = load(source / "small_graph.py")
graph = file.build({"steps": 2})
modules = user_modules(file.module)
shutil.rmtree(source)

run_dir = RunDir(folder / "run").create()
executor = RayExecutor(address=cluster.address, modules=modules, storage_units="per-node")
units = []
open_plane = executor._open_plane


def noting(wanted):
    plane = open_plane(wanted)
    units.extend(sorted(address for _, address, _ in plane.settings.storage))
    return plane


executor._open_plane = noting
Driver(graph, plan(graph)[0], executor, run_dir=run_dir, deadline_s=240).execute()
events = [event for _, event in trace.read(run_dir.events)]
nodes = {event.group: event.node for event in events if isinstance(event, trace.Placed)}
ended = [event for event in events if isinstance(event, trace.Ended)]
samples = [json.loads(line)["shout"] for line in run_dir.samples(1).read_text().splitlines()]
said = {"nodes": nodes, "units": units, "rows_left": ended[0].rows_left, "steps": ended[0].steps, "samples": samples}
print(json.dumps(said))
cluster.shutdown()
