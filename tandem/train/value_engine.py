"""The training engine of the critic: of each trained token its value is read instead of its log-prob."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tandem.models.head.projection import Head
from tandem.models.layouts.packing import PackedSamples
from tandem.models.value_model import token_values
from tandem.train.engine import FsdpEngine
from tandem.train.packed_engine import Found
from tandem.train.protocol import Wanted


class ValueEngine(FsdpEngine):
    """Trains a ``ValueModel``. ``forward`` gives ``values`` only; an objective gets them in the place of log-probs.

    The value of a token is read where the token is predicted from: it is that of the state before it.
    """

    def _look(self, samples: PackedSamples, want: Sequence[Wanted]) -> Found:
        return {"values": self._values(samples)}

    def _run(
        self,
        samples: PackedSamples,
        *,
        want_entropy: bool,
        entropy_grad: bool,
        also: torch.Tensor | None = None,
        watched: bool = False,
    ) -> Found:
        return {"logprobs": self._values(samples)}

    def _values(self, samples: PackedSamples) -> torch.Tensor:
        """Return the values of the N trained tokens, (N,)."""

        def read(hidden: torch.Tensor, head: Head) -> torch.Tensor:
            return token_values(nn.functional.embedding(samples.read, hidden), head)

        values: torch.Tensor = self.model(samples.input_ids, samples.positions, samples.layout, read)
        return values
