"""What became of one episode, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tandem.models.routers import NO_ROUTE, filled
from tandem.rollout.protocol import SampleOutput


@dataclass
class Trajectory:
    """The ids of all turns. ``prompt`` is what the first turn answered; the lists hold everything that followed it.

    ``mask`` is True on sampled tokens. A token that was inserted has the log-prob 0, since nothing was drawn, and the
    version of the token before it, so that a trajectory is as old as its oldest sampled token. ``turns`` are the
    numbers of sampled tokens, turn by turn. ``restarts`` is True where the context begins anew: the turns from there on
    have seen nothing of what stands before.

    ``prompt_routes`` (P, w) and ``routes`` (T, w) uint8, where a turn brought some, are the experts of the engine: of a
    sampled token when the next one was drawn, of others when the turn after them began.
    """

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    restarts: list[bool] = field(default_factory=list)
    prompt_routes: torch.Tensor | None = None
    routes: torch.Tensor | None = None

    @property
    def context(self) -> list[int]:
        """The ids that the next turn goes on from."""
        start = self._anew
        return self.prompt + self.ids if start is None else self.ids[start:]

    @property
    def _anew(self) -> int | None:
        """Where among the ids the context begins that holds; None: with the prompt."""
        return len(self.restarts) - 1 - self.restarts[::-1].index(True) if True in self.restarts else None

    def insert(self, ids: Sequence[int], *, anew: bool = False) -> None:
        """Append what others wrote after a turn, or (``anew``) what takes the place of all that was there."""
        self.ids += ids
        self.restarts += [anew, *[False] * (len(ids) - 1)] if ids else []
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)

    def sample(self, drawn: SampleOutput, context_routes: torch.Tensor | None = None) -> None:
        """Append a turn as it was sampled; ``context_routes`` are those of what it goes on from."""
        if context_routes is not None and drawn.routes is not None:
            self._keep_routes(context_routes, drawn.routes)
        self.ids += drawn.token_ids.tolist()
        self.restarts += [False] * len(drawn.token_ids)
        self.mask += [True] * len(drawn.token_ids)
        self.logprobs += drawn.logprobs.tolist()
        self.versions += drawn.versions.tolist()
        self.turns.append(len(drawn.token_ids))

    def _keep_routes(self, context: torch.Tensor, drawn: torch.Tensor) -> None:
        """Take the routes of a turn, and those of the ``context`` where there are none yet."""
        width = context.shape[1:]
        prompt = (
            context.new_full((len(self.prompt), *width), NO_ROUTE) if self.prompt_routes is None else self.prompt_routes
        )
        known = context.new_empty((0, *width)) if self.routes is None else self.routes
        every = torch.cat([prompt, known, context.new_full((len(self.ids) - len(known), *width), NO_ROUTE)])
        start = len(every) - len(context)
        every = torch.cat([every[:start], filled(every[start:], context), drawn])
        self.prompt_routes, self.routes = every[: len(self.prompt)], every[len(self.prompt) :]

    @classmethod
    def joined(cls, parts: Sequence[Trajectory]) -> Trajectory:
        """Return the ``parts``, at least one, as one trajectory: each but the first begins anew with its prompt."""
        first = parts[0]
        whole = cls(first.prompt)
        for part in parts:
            if part is not first:
                whole.insert(part.prompt, anew=True)
            for name in ("ids", "mask", "logprobs", "versions", "turns", "restarts"):
                getattr(whole, name).extend(getattr(part, name))
        given = next((part.routes for part in parts if part.routes is not None), None)
        if given is not None:
            width = given.shape[1:]
            every = [
                given.new_full((count, *width), NO_ROUTE) if found is None else found
                for part in parts
                for found, count in ((part.prompt_routes, len(part.prompt)), (part.routes, len(part.ids)))
            ]
            whole.prompt_routes, whole.routes = every[0], torch.cat(every[1:])
        return whole

    def until_sampled(self) -> Trajectory:
        """Return the same without what was inserted after the last turn, which no turn has answered."""
        end = len(self.mask)
        while end and not self.mask[end - 1]:
            end -= 1
        kept = slice(end)
        parts = (self.ids[kept], self.mask[kept], self.logprobs[kept], self.versions[kept])
        routes = None if self.routes is None else self.routes[kept]
        return Trajectory(self.prompt, *parts, self.turns, self.restarts[kept], self.prompt_routes, routes)

    def rewards(self, turns: Sequence[float]) -> torch.Tensor:
        """Return (T,) float32 with the rewards of the ``turns``, each on the last sampled token of its turn."""
        laid = torch.zeros(len(self.ids), dtype=torch.float32)
        sampled = torch.tensor(self.mask, dtype=torch.bool).nonzero()[:, 0]
        end = 0
        for length, reward in zip(self.turns, turns, strict=False):  # turns that got none come last
            end += length
            laid[sampled[end - 1]] += reward
        return laid

    def columns(self, *, restarts: bool = False, routes: int = 0) -> dict[str, torch.Tensor]:
        """Return the row of each token column, ``restarts`` where asked for: (T,) tensors of the declared dtypes.

        ``routes``: bytes of the record of a token; then also the rows ``routes`` and ``prompt_routes``.
        """
        further = {"restarts": torch.tensor(self.restarts, dtype=torch.bool)} if restarts else {}
        if routes:
            for name, found, count in (
                ("prompt_routes", self.prompt_routes, len(self.prompt)),
                ("routes", self.routes, len(self.ids)),
            ):
                none = torch.full((count, routes), NO_ROUTE, dtype=torch.uint8)
                further[name] = none if found is None else found
        return {
            "responses": torch.tensor(self.ids, dtype=torch.int64),
            "response_mask": torch.tensor(self.mask, dtype=torch.bool),
            "rollout_logprobs": torch.tensor(self.logprobs, dtype=torch.float32),
            "token_versions": torch.tensor(self.versions, dtype=torch.int32),
            **further,
        }
