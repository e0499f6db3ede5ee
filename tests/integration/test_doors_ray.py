"""A user's own loss, correction and backend on Ray: classes travel from the user's folder to the workers."""

from pipeline.cli.load import load
from pipeline.executors.ray import RayExecutor
from pipeline.executors.sent import user_modules
from tests.doors import forgotten, metrics, quickstart, snippet, user_folder
from tests.integration.test_async import execute

OURS = "ClippedLoss(correction=TruncatedIS(cap=2.0) if max_staleness else None)"
FLAGS = {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 4, "warm_start_steps": 20, "threads": 1}


def test_a_loss_and_a_correction_of_a_user_travel_to_the_workers(tmp_path, ray_session):
    graph = quickstart("from losses import Fading, TrustRegion", (OURS, "TrustRegion(correction=Fading())"))
    folder = user_folder(tmp_path, {"losses.py": snippet("your-own-loss.md"), "graph.py": graph})
    with forgotten(folder):
        executor = RayExecutor(modules=user_modules(load(folder / "graph.py").module))
        execute(folder / "graph.py", FLAGS, folder / "RUN", executor)
    (line,) = metrics(folder / "RUN")
    assert line["train/updates"] == 2
    assert 0 < line["train/is_weight"] <= 1


def test_a_backend_of_a_user_travels_to_the_workers(tmp_path, ray_session):
    folder = user_folder(tmp_path, {"counting.py": snippet("your-own-backend.md")})
    with forgotten(folder):
        executor = RayExecutor(modules=user_modules(load(folder / "counting.py").module))
        execute(folder / "counting.py", {"steps": 1}, folder / "RUN", executor)
    assert int((folder / "RUN" / "tokens.txt").read_text()) > 512
