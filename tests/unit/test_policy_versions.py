"""The versions of a group's tokens, with tokens that no policy sampled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.declare.columns import Ragged
from pipeline.declare.handle import sample_key
from pipeline.executors.policy_versions import Versions, versions_of

SAMPLE = st.lists(st.integers(-1, 5), max_size=6)


@given(groups=st.lists(st.lists(SAMPLE, min_size=1, max_size=3), min_size=1, max_size=4))
def test_tokens_that_no_policy_sampled_have_no_version(groups: list[list[list[int]]]) -> None:
    import torch

    samples = [sample for group in groups for sample in group]
    keys = [sample_key(number, index) for number, group in enumerate(groups) for index in range(len(group))]
    column = Ragged.of([torch.tensor(sample, dtype=torch.int32) for sample in samples])
    found = versions_of(column, keys)
    for number, group in enumerate(groups):
        drawn = [version for sample in group for version in sample if version >= 0]
        longest = max(map(len, group))
        assert found[number] == Versions(len(group), min(drawn, default=0), max(drawn, default=0), longest)
