"""Seeded runs that are broken at random end with a sound record and the weights of an undisturbed one."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import ordeal
from tests.chaos.__main__ import small_disk
from tests.chaos.faults import FAULTS, Scene, chosen
from tests.chaos.ordeal import Ordeal, OrdealError, table, undisturbed

STEPS = 8
LOCAL = {1: "disk full", 2: "driver paused", 5: "newest checkpoint damaged", 7: "driver killed"}
"""Seeds, and the faults that they begin with. The other faults of a local run are in test_stopping, and in searches."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run", STEPS)


def survived(folder: Path, weights: str, seed: int, most: int) -> set[str]:
    """The faults of a run that survived, on a small disk of its own if this user can have one."""
    (folder / "disk").mkdir()
    with small_disk(folder / "disk") as disk:
        ordeal = Ordeal(seed, "local", (disk or folder) / "run", weights, disk, most=most, steps=STEPS, forked=True)
        return {blow.fault.name for blow in ordeal.run()}


@pytest.mark.parametrize("seed", LOCAL)
def test_a_local_run_survives(tmp_path, weights, seed):
    """One fault in each."""
    assert survived(tmp_path, weights, seed, most=1)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(30))
def test_a_local_run_survives_several_faults(tmp_path, weights, seed):
    assert survived(tmp_path, weights, seed, most=3)


@pytest.mark.parametrize(("seed", "most"), [(0, 1), *(pytest.param(i, 3, marks=pytest.mark.search) for i in range(9))])
def test_a_run_on_ray_survives(tmp_path, weights, seed, most):
    assert Ordeal(seed, "ray", tmp_path / "run", weights, most=most, steps=STEPS, forked=True).run()


def test_a_seed_decides_the_faults_and_each_comes_up():
    drawn = [[chosen(random.Random(seed), "ray", Path("disk")) for seed in range(400)] for _ in range(2)]
    assert drawn[0] == drawn[1] and set(drawn[0]) == set(FAULTS)
    for seed, fault in LOCAL.items():
        assert chosen(random.Random(f"{seed} local"), "local", Path("disk")).name == fault
    local = {chosen(random.Random(seed), "local", None).name for seed in range(200)}
    assert local == {fault.name for fault in FAULTS if not fault.ray} - {"disk full"}


@pytest.mark.journal_expected("I2")
def test_a_run_that_does_not_survive_is_said(tmp_path, monkeypatch):
    """Other weights, a hang, and a sample that is missing in the record."""
    with pytest.raises(OrdealError, match="other weights than those of an undisturbed run"):
        Ordeal(1, "local", tmp_path / "run", "no digest", most=0, steps=STEPS, forked=True).run()
    events = tmp_path / "run/events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if '"trained"' not in line))
    found = Ordeal(1, "local", tmp_path / "run", "", most=0, steps=STEPS)
    found._run_dir = ordeal.RunDir(tmp_path / "run")
    with pytest.raises(OrdealError, match="the record: "):
        found._verdict()
    monkeypatch.setattr(ordeal, "HANGS_S", 0.2)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    with pytest.raises(OrdealError, match=r"no step and no end for 0\.2 s"):
        found._until(Scene(process, found._run_dir, random.Random(0), None), lambda: False)
    process.communicate()


def test_the_table_counts_faults_and_recoveries():
    sampler = next(fault for fault in FAULTS if fault.name == "sampler killed")
    blows = [ordeal.Blow(sampler, 1, recovered_s=3.0), ordeal.Blow(sampler, 2, recovered_s=5.0)]
    blows.append(ordeal.Blow(sampler, 3, ended=4))
    assert table(blows) == [{"fault": "sampler killed", "times": 3, "went on": 2, "median s": 5.0, "most s": 5.0}]
