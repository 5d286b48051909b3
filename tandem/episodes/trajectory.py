"""What became of one episode, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem.rollout.protocol import SampleOutput


@dataclass
class Trajectory:
    """The ids of all turns. ``prompt`` is what the first turn answered; the lists hold everything that followed it.

    ``mask`` is True on sampled tokens. A token that was inserted has the log-prob 0, since nothing was drawn, and the
    version of the token before it, so that a trajectory is as old as its oldest sampled token. ``turns`` are the
    numbers of sampled tokens, turn by turn.
    """

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def whole(self) -> list[int]:
        """All ids: what the next turn goes on from."""
        return self.prompt + self.ids

    def insert(self, ids: Sequence[int]) -> None:
        """Append what others wrote after a turn."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)

    def sample(self, drawn: SampleOutput) -> None:
        """Append a turn as it was sampled."""
        self.ids += drawn.token_ids.tolist()
        self.mask += [True] * len(drawn.token_ids)
        self.logprobs += drawn.logprobs.tolist()
        self.versions += drawn.versions.tolist()
        self.turns.append(len(drawn.token_ids))

    def until_sampled(self) -> Trajectory:
        """Return the same without what was inserted after the last turn, which no turn has answered."""
        end = len(self.mask)
        while end and not self.mask[end - 1]:
            end -= 1
        kept = slice(end)
        return Trajectory(
            self.prompt, self.ids[kept], self.mask[kept], self.logprobs[kept], self.versions[kept], self.turns
        )

    def columns(self) -> dict[str, torch.Tensor]:
        """Return the row of each token column: (T,) tensors of the dtypes that the columns declare."""
        return {
            "responses": torch.tensor(self.ids, dtype=torch.int64),
            "response_mask": torch.tensor(self.mask, dtype=torch.bool),
            "rollout_logprobs": torch.tensor(self.logprobs, dtype=torch.float32),
            "token_versions": torch.tensor(self.versions, dtype=torch.int32),
        }
