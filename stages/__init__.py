"""What a training step is made of. Stages see columns; they know neither Ray nor the data plane.

    from stages import Advantage, ClippedLoss, PrevLogprobs, Prompts, Refit, Reward, Rollout, Train

Importing this loads no tensor library: a backend loads when a stage is set up in a worker.
"""

from stages.advantage import Advantage
from stages.evaluate import Evaluate
from stages.logprobs import PrevLogprobs, RefLogprobs
from stages.prompts import Prompts
from stages.refit import Refit
from stages.reward import Reward
from stages.rollout import Rollout
from stages.tasks import Generated
from stages.train import ClippedLoss, Train
from stages.warm_start import Supervised

__all__ = [
    "Advantage",
    "ClippedLoss",
    "Evaluate",
    "Generated",
    "PrevLogprobs",
    "Prompts",
    "RefLogprobs",
    "Refit",
    "Reward",
    "Rollout",
    "Supervised",
    "Train",
]
