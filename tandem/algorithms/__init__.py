"""Pure computations of reinforcement learning: tensors in, tensors out.

Importing this package fills its registries; it does not import torch.
"""

from tandem.algorithms import baselines, behaviour_losses, ratio_losses, sequence_losses
from tandem.algorithms.advantage import ADVANTAGES
from tandem.algorithms.distillation import DISTILLATIONS
from tandem.algorithms.kl import KL_CONTROLLERS, KL_TYPES
from tandem.algorithms.policy_loss import POLICY_LOSSES
from tandem.algorithms.preference_losses import PREFERENCE_LOSSES
from tandem.algorithms.reduce import Aggregation, LossCounts

__all__ = [
    "ADVANTAGES",
    "DISTILLATIONS",
    "KL_CONTROLLERS",
    "KL_TYPES",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "Aggregation",
    "LossCounts",
    "baselines",
    "behaviour_losses",
    "ratio_losses",
    "sequence_losses",
]
