"""The stages of a training step. They work on columns and know neither Ray nor the data plane.

    from stages import Advantage, ClippedLoss, PrevLogprobs, Prompts, Refit, Reward, Rollout, Train

Importing this package loads no tensor library; a backend loads when a worker sets up a stage.
"""

from pipeline.declare.sharding import Dynamic, Packed
from stages.advantage import Advantage
from stages.episode.endpoint.elsewhere import verifiers_command
from stages.episode.endpoint.stage import Endpoint
from stages.episode.environment import Call, Deadlines, End, Environment, Messages, Reply, Tool
from stages.episode.stage import Episode
from stages.evaluate import Evaluate
from stages.filter import Filter
from stages.logprobs import PrevLogprobs, RefLogprobs
from stages.lora import LoRA
from stages.losses import (
    CispoLoss,
    ClippedLoss,
    Correction,
    Decoupled,
    IcePop,
    PolicyLoss,
    Scored,
    SequenceMask,
    TruncatedIS,
)
from stages.prompts import Prompts
from stages.refit import Refit, TransportName
from stages.reward import Reward
from stages.reward_model import RewardModel
from stages.rollout import Rollout
from stages.sources import Dataset, Mixture
from stages.tasks import Calculated, Generated, Programmed
from stages.train import Train
from stages.warm_start import Supervised

__all__ = [
    "Advantage",
    "Calculated",
    "Call",
    "CispoLoss",
    "ClippedLoss",
    "Correction",
    "Dataset",
    "Deadlines",
    "Decoupled",
    "Dynamic",
    "End",
    "Endpoint",
    "Environment",
    "Episode",
    "Evaluate",
    "Filter",
    "Generated",
    "IcePop",
    "LoRA",
    "Messages",
    "Mixture",
    "Packed",
    "PolicyLoss",
    "PrevLogprobs",
    "Programmed",
    "Prompts",
    "RefLogprobs",
    "Refit",
    "Reply",
    "Reward",
    "RewardModel",
    "Rollout",
    "Scored",
    "SequenceMask",
    "Supervised",
    "Train",
    "Tool",
    "TransportName",
    "TruncatedIS",
    "verifiers_command",
]
