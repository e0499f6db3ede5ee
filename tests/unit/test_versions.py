"""Oldest and newest policy version of each group's tokens, against a plain loop."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.declare.columns import Ragged
from pipeline.declare.handle import sample_key
from pipeline.executors.policy_versions import versions_of


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3), max_size=5))
def test_every_group_has_its_own_bounds(groups):
    keys = [sample_key(g, i) for g, samples in enumerate(groups) for i in range(len(samples))]
    rows = [torch.tensor(versions, dtype=torch.int32) for samples in groups for versions in samples]
    values = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int32)
    found = versions_of(Ragged(values, tuple(map(len, rows))), keys)
    assert list(found) == list(range(len(groups)))
    for group, samples in enumerate(groups):
        tokens = [version for versions in samples for version in versions] or [0]
        of = found[group]
        assert (of.samples, of.oldest, of.newest) == (len(samples), min(tokens), max(tokens))
        assert of.longest == max(map(len, samples))
