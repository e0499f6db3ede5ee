"""How far a run may be ahead of its weights, as pure functions: the admission rule and the claim rule.

v is the published policy version, k max_staleness, B groups per step; `ahead` is the smaller of k and pipeline_depth.
Admission alone does not bound the age of a sample, because a slow sample may still be running when later ones are
trained; the claim does.
"""

from __future__ import annotations


def askable(*, version: int, ahead: int, batch: int, asked: int) -> int:
    """Return how many more groups may be requested from the sampler now. Never negative.

    `asked` counts groups trained and groups on their way to training; with the new ones they stay within
    (ahead + v + 1) * B.
    """
    return max(0, (ahead + version + 1) * batch - asked)


def admissible(*, capacity: int, held: int) -> int:
    """Return how many more groups may be admitted and occupy the data plane. Never negative.

    Admitted groups get their prompts and wait for the sampler. `held` counts groups admitted and not yet cleared.
    """
    return max(0, capacity - held)


def too_old(*, oldest: int, step: int, max_staleness: int) -> bool:
    """Return whether a sample whose oldest token has version `oldest` is too old to be trained at `step` or later.

    Step n trains weights of version n.
    """
    return oldest < step - max_staleness
