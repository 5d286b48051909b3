"""The training engine of the critic: of each trained token its value is read instead of its log-prob."""

from __future__ import annotations

from torch import nn

import torch

from tandem.models.causal_lm import Head
from tandem.models.packing import PackedSamples
from tandem.models.value_model import token_values
from tandem.train.engine import FsdpEngine, TokenValues
from tandem.train.protocol import Wanted


class ValueEngine(FsdpEngine):
    """Trains a ``ValueModel``. ``forward`` gives ``values``; an objective gets them where it else gets log-probs.

    The value of a token is read where the token is predicted from: it is that of the state before it.
    """

    reads: Wanted = "values"

    def _run(self, samples: PackedSamples, *, want_entropy: bool, entropy_grad: bool) -> TokenValues:
        """Values of the N trained tokens, (N,)."""

        def read(hidden: torch.Tensor, head: Head) -> torch.Tensor:
            return token_values(nn.functional.embedding(samples.read, hidden), head)

        values: torch.Tensor = self.model(samples.input_ids, samples.positions, samples.layout, read)
        return values, None
