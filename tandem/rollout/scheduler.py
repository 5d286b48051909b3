"""Which prompts start next. Needs no model, so that any engine can use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from tandem.base.errors import ContractError
from tandem.models.layouts.positions import Context
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling

IDLE_SOURCE = (
    "the request source gave None while nothing is in flight: it must wait (with a deadline) until it has a request, "
    "or end"
)


class Scheduler:
    """Requests, checked and pulled as late as there is room; within a window the shortest prompt goes first.

    A window is started through before the next one is pulled, so no prompt waits for ever, and prompts that are in
    flight together have similar lengths. ``fits`` says whether there is room for requests beside what is in flight, and
    raises for one that there is never room for; the first that waits is never passed by another.
    """

    def __init__(
        self,
        requests: Iterable[GroupRequest | None],
        sampling: Sampling,
        window: int,
        context: Context | None,
        fits: Callable[[Sequence[GroupRequest]], bool],
    ) -> None:
        self._fits = fits
        self._source = iter(requests)
        self._sampling, self._window, self._context = sampling, window, context
        self._waiting: list[GroupRequest] = []  # longest first
        self.exhausted = False

    def pull(self, idle: bool) -> None:
        """Fill the window if it is empty. ``idle``: nothing is in flight, so the source must give something or end."""
        while not self.exhausted and len(self._waiting) < self._window:
            try:
                request = next(self._source)
            except StopIteration:
                self.exhausted = True
                break
            if request is None:
                if idle and not self._waiting:
                    raise ContractError(IDLE_SOURCE)
                break
            self._check(request)
            self._waiting.append(request)
        self._waiting.sort(key=_prefilled, reverse=True)

    def give_back(self, requests: Iterable[GroupRequest]) -> None:
        """Put back requests that had started; they start again before all others, the shortest first."""
        self._waiting += sorted(requests, key=_prefilled, reverse=True)

    def take(self, groups: int, tokens: int) -> list[GroupRequest]:
        """Take at most ``groups`` requests with at most ``tokens`` to prefill together, but one at least if any
        waits; none where there is no room for it.
        """
        taken: list[GroupRequest] = []
        while self._waiting and len(taken) < groups:
            tokens -= _prefilled(self._waiting[-1])
            if (tokens < 0 and taken) or not self._fits([*taken, self._waiting[-1]]):
                break
            taken.append(self._waiting.pop())
        return taken

    def cancel(self, keys: Collection[int | str]) -> list[GroupOutput]:
        """Take the requests with these keys out; gives their groups, as far as they had begun before."""
        given_up = [request for request in self._waiting if request.key in keys]
        self._waiting = [request for request in self._waiting if request.key not in keys]
        return [as_it_is(request, self._sampling.routes) for request in given_up]

    @property
    def blocked(self) -> bool:
        """The first that waits has no room."""
        return bool(self._waiting) and not self._fits([self._waiting[-1]])

    @property
    def empty(self) -> bool:
        """Nothing waits; there may be more to pull."""
        return not self._waiting

    def _check(self, request: GroupRequest) -> None:
        length, name = len(request.prompt_ids), f"prompt {request.key!r}"
        if length == 0:
            raise ContractError(f"{name} has no tokens: a model needs at least one, such as its BOS token")
        if len(request.seeds) != self._sampling.samples:
            raise ContractError(
                f"{name} has {len(request.seeds)} seeds for n = {self._sampling.samples} samples: give one each"
            )
        self._check_begun(request)
        limit = request.limit(self._sampling)
        if limit < 1:
            raise ContractError(f"{name} may have {limit} tokens: give at least one, or don't ask")
        if self._context is not None and length + limit > self._context.tokens:
            most = self._context.tokens - limit
            raise ContractError(
                f"{name}: {length} prompt tokens + max_tokens {limit} are too many, for "
                f"{self._context.why}: shorten the prompt to {most} tokens, or lower max_tokens"
            )
        self._fits([request])

    def _check_begun(self, request: GroupRequest) -> None:
        name, begun, most = f"prompt {request.key!r}", request.begun, request.limit(self._sampling)
        n = self._sampling.samples
        if len(begun) not in (0, n):
            raise ContractError(f"{name} has {len(begun)} begun samples for n = {n}: give one for each seed, or none")
        for i, sample in enumerate(begun):
            if sample.finish_reason == "aborted" and len(sample.token_ids) >= most:
                raise ContractError(
                    f"{name}, sample {i}: {len(sample.token_ids)} begun tokens leave none of max_tokens {most} to "
                    "make; a sample goes on only under the sampling it began with"
                )


def as_it_is(request: GroupRequest, routes: int = 0) -> GroupOutput:
    """Return the group of a request that no engine has worked on: what it had begun, or samples without a token.

    Where ``routes`` bytes a token are recorded, those of its prompt are unknown: 255.
    """
    ids, logprobs, versions = (torch.zeros(0, dtype=kind) for kind in (torch.int64, torch.float32, torch.int32))
    unknown = torch.full((len(request.prompt_ids), routes), 255, dtype=torch.uint8) if routes else None
    nothing = SampleOutput(ids, logprobs, versions, "aborted", None if unknown is None else unknown[:0])
    return GroupOutput(request, request.begun or (nothing,) * len(request.seeds), unknown)


def _prefilled(request: GroupRequest) -> int:
    """Count the tokens that must be computed before the request's samples grow."""
    own = sum(len(sample.token_ids) for sample in request.begun if sample.finish_reason == "aborted")
    return len(request.prompt_ids) + own
