"""How far a run may be ahead of its weights, as pure functions: the rule of admission and the rule of the claim.

v is the published policy version, k max_staleness, B groups a step; `ahead` is the smaller of k and pipeline_depth.
Admission alone does not bound the age of a sample, because a slow one may still be running when others are trained; the
claim does.
"""

from __future__ import annotations


def askable(*, version: int, ahead: int, batch: int, asked: int) -> int:
    """How many more groups may be asked of the sampler now. Never negative.

    `asked` counts those that were trained and those on their way to it: together with the new ones they stay within
    (ahead + v + 1) * B.
    """
    return max(0, (ahead + version + 1) * batch - asked)


def admissible(*, capacity: int, held: int) -> int:
    """How many more groups may be admitted, that is take room in the data plane. Never negative.

    What is admitted has its prompts made and waits for the sampler; `held` groups were admitted and not yet cleared.
    """
    return max(0, capacity - held)


def too_old(*, oldest: int, step: int, max_staleness: int) -> bool:
    """Whether a sample whose oldest token is of version `oldest` must not be trained at `step` or later.

    The weights that step n trains are version n.
    """
    return oldest < step - max_staleness
