"""The reward and the stage of the docs pages in a folder outside the repository, run with the quickstart."""

import pytest
import torch

from pipeline import Output, Stage, StageError
from pipeline.executors import returned
from tests.doors import FEW_STEPS, forgotten, metrics, quickstart, snippet, user_folder
from tests.errors.harness import command

REWARD = "Reward(digit_match),"


def trained(folder, files):
    user_folder(folder, files)
    with forgotten(folder):
        code, _, err = command(folder, "graph.py", *FEW_STEPS, "--executor", "local", "--run-dir", "RUN", "--plain")
    assert code == 0, err
    return metrics(folder / "RUN")


class Mine(Stage):
    """A user's stage."""


def test_the_reward_of_the_page(tmp_path):
    graph = quickstart("from rewards import brevity, judge", (REWARD, "Reward(digit_match, brevity, judge),"))
    found = trained(tmp_path, {"rewards.py": snippet("your-own-reward.md"), "graph.py": graph})
    assert all(-1 < line["reward/brevity"] <= 0 and 0 <= line["reward/judge"] <= 1 for line in found)


def test_the_stage_of_the_page(tmp_path):
    graph = quickstart(
        "from mystages import KeepDigits\n\n\ndef score(digits: str) -> float:\n    return float(len(digits))\n\n",
        (REWARD, "KeepDigits(), Reward(digit_match, score),"),
    )
    found = trained(tmp_path, {"mystages.py": snippet("your-own-stage.md"), "graph.py": graph})
    assert all(0 <= line["reward/score"] <= 5 for line in found)


@pytest.mark.parametrize("made", [None, {"digits": []}])
def test_a_setup_that_returns_no_runner_says_so(made):
    with pytest.raises(StageError, match=r"the runner of stage 'mine' is missing: setup\(\) returned"):
        returned.runner(Mine(), made)


def test_a_metric_of_a_stream_or_a_transfer_is_a_number_too():
    for value in (1, 0.5, True, torch.tensor(2.0)):
        assert returned.output(Mine(), Output({}, metrics={"size": value})).metrics == {"size": value}
    with pytest.raises(StageError, match="stage 'mine' returned the metric size='many'; metrics are numbers"):
        returned.output(Mine(), Output({}, metrics={"size": "many"}))
