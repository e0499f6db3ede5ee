"""How far a run may be ahead of its weights, as pure functions.

v is the published policy version, k max_staleness, B groups a step.
"""

from __future__ import annotations


def askable(*, version: int, max_staleness: int, batch: int, trained: int, asked: int) -> int:
    """How many more groups may be asked of the sampler now. Never negative.

    `trained` groups are behind the published version; `asked` were handed to the sampler and are not: together with
    the new ones they stay within (k + v + 1) * B.
    """
    return max(0, (max_staleness + version + 1) * batch - trained - asked)


def admissible(*, capacity: int, held: int) -> int:
    """How many more groups may be admitted, that is take room in the data plane. Never negative.

    What is admitted has its prompts made and waits for the sampler; `held` groups were admitted and not yet cleared.
    """
    return max(0, capacity - held)
