"""What a rollout engine takes, gives and obeys. Tokens in, tokens out: text is never re-tokenised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from tandem.base.errors import ContractError

if TYPE_CHECKING:
    import torch

    from tandem.columns.images import Images

FinishReason = Literal["stop", "length", "aborted"]
KeepKV = Literal["old", "recompute"]
Watch = Callable[[int, Sequence[int], Sequence[float]], None]
LogprobsOf = Literal["sampled", "full", "either"]


@dataclass(frozen=True)
class Sampling:
    """How ``n`` samples of a prompt are drawn.

    Logits are divided by ``temperature``; of that distribution the ``top_k`` likeliest tokens are kept (-1: all), then
    the fewest that together have at least ``top_p``, and the rest is renormalised. ``logprobs_of`` says which log-prob
    a token gets: ``sampled``, that of this last distribution, which it was drawn from, or ``full``, that of the
    distribution before ``top_k`` and ``top_p``; with ``either`` nobody reads it. ``greedy`` takes the likeliest token
    instead; its log-prob is the model's own, at temperature 1. With ``baseline`` each group has one sample more, its
    last, which is greedy.

    A sample ends with the first of ``stop_token_ids``, which is part of it, or after ``max_tokens`` tokens. With no
    stop tokens every sample has ``max_tokens``. ``vocabulary``: an engine gives ids below it only; None: whatever.
    ``routes``: bytes in which the experts are recorded that each token goes to (``Routers.width``); 0: they are not.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    greedy: bool = False
    baseline: bool = False
    logprobs_of: LogprobsOf = "sampled"
    stop_token_ids: tuple[int, ...] = ()
    vocabulary: int | None = None
    routes: int = 0

    def __post_init__(self) -> None:
        wrong = {
            "n": (self.n < 1, "at least 1"),
            "max_tokens": (self.max_tokens < 1, "at least 1"),
            "temperature": (not self.greedy and not self.temperature > 0, "above 0, or greedy=True"),
            "top_p": (not 0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k < -1, "a count of tokens, or -1 to keep all"),
        }
        for name, (is_wrong, remedy) in wrong.items():
            if is_wrong:
                raise ContractError(f"sampling {name} = {getattr(self, name)!r}: write {remedy}")

    @property
    def samples(self) -> int:
        """Samples of a group: ``n``, and the greedy one where there is one."""
        return self.n + self.baseline


@dataclass(frozen=True, eq=False)
class SampleOutput:
    """One answer of T tokens, all on the CPU: ``token_ids`` (T,) int64, ``logprobs`` (T,) float32 of the distribution
    sampled from, ``versions`` (T,) int32 of the weights that produced each token. ``routes`` (T, w) uint8, where they
    are recorded: the experts that each token went to when the next one was drawn; 255 in each byte of the last token,
    which nothing followed.

    One that was ``aborted`` is a beginning: it goes on in a request that has it among ``begun``."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    versions: torch.Tensor
    finish_reason: FinishReason
    routes: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class GroupRequest:
    """One prompt to answer. ``prompt_ids`` (P,) int64; ``seeds``: one per sample, a greedy one included.

    ``key`` comes back in messages.

    A sample's random stream is a function of its seed alone: the caller derives it from (run seed, prompt, index in
    group), so equal seeds mean equal samples, and two samples of a group need different ones.

    ``begun`` (none, or one per sample) is what an aborted generation gave. Its finished samples are taken over; the
    others are prefilled with the tokens they have, whose log-probs and versions stay, and go on in their random stream.

    ``max_tokens`` of each sample, where that is less than the sampling's. ``images`` that the prompt shows, where it
    has a token for each.

    ``watch`` is told the tokens of the samples as they are drawn, as far as the engine can: the number of the sample,
    new ids and their log-probs. It returns at once and raises nothing. What an aborted generation gave isn't told
    again.
    """

    key: int | str
    prompt_ids: torch.Tensor
    seeds: tuple[int, ...]
    begun: tuple[SampleOutput, ...] = ()
    max_tokens: int | None = None
    images: Images | None = None
    watch: Watch | None = None

    def limit(self, sampling: Sampling) -> int:
        """Return how many tokens a sample may have: the request's own limit, never more than that of ``sampling``."""
        return sampling.max_tokens if self.max_tokens is None else min(self.max_tokens, sampling.max_tokens)


@dataclass(frozen=True, eq=False)
class GroupOutput:
    """A group that has ended: its request, and its samples in the order of the seeds.

    ``prompt_routes`` (P, w) uint8 are those of the prompt, which all of them share.
    """

    request: GroupRequest
    samples: tuple[SampleOutput, ...]
    prompt_routes: torch.Tensor | None = None

    @property
    def aborted(self) -> bool:
        """Whether a sample is only a beginning, so that the group can't be used as it is."""
        return any(sample.finish_reason == "aborted" for sample in self.samples)

    def resumed(self) -> GroupRequest:
        """Return the request that lets an aborted group go on where it was."""
        return replace(self.request, begun=self.samples)

    def restarted(self) -> GroupRequest:
        """Return the request that makes the group anew: same seeds, no token of the aborted generation."""
        return replace(self.request, begun=())


class RolloutEngine(Protocol):
    """Generates with one version of the weights at a time; every change happens between two tokens.

    ``HfEngine`` and ``CoreEngine`` (vLLM, SGLang) generate; ``HostedEngine`` passes everything on to one of them in
    another process, and ``EnginePool`` to several. Used so::

        engine.load(weights, version=3)
        for group in engine.generate(iter(requests), sampling): ...
    """

    @property
    def version(self) -> int:
        """The version of the weights that the next token is drawn from."""

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        """Answer each request; groups come as they finish, in any order.

        Requests are pulled when there is room for them, so the source may produce them on the way. A source that has
        nothing right now yields None and is asked again after the next token; it may block only while nothing it gave
        is unanswered. Between two groups the caller may ``load``: running samples go on under the new weights, and
        their tokens carry the version that drew them.
        """

    def load(self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int) -> str | None:
        """Take over ``weights`` (Hugging Face names) at the next token boundary and answer their fingerprint.

        It is that of the names that came, with the values that the engine now has under them; where they are adapters,
        joined with that of the base weights. The tensors are copied before the call returns. An engine that shares the
        trainer's own parameters takes None, only counts the version, and answers None: there is nothing that could
        differ.
        """

    def pause(self, abort: bool = False) -> None:
        """Return once no token is being made; none is made until ``resume``.

        ``abort``: every group in flight ends as it is. ``generate`` gives it out next, its unfinished samples with the
        reason ``aborted``; requests that have not started wait for ``resume``.
        """

    def resume(self) -> None:
        """End the pause: requests that wait are answered from here on."""

    def sleep(self) -> None:
        """Free the memory that only generation needs. Nothing may be running."""

    def wake(self) -> None:
        """Take back the memory that ``sleep`` gave up, and generate again with the weights of the last ``load``."""


@runtime_checkable
class Supervised(Protocol):
    """An engine in a process that may die while nobody asks it for anything: ``HostedEngine``, here or on Ray."""

    def is_ready(self) -> bool:
        """Return whether it has started. Raises what its start raised: no property, which ``isinstance`` would look
        at.
        """

    def check(self) -> None:
        """Raise ``EngineDiedError`` if the process has ended or was given up; returns at once."""

    def close(self) -> None:
        """End the process of the engine, whatever it does."""


@runtime_checkable
class Heartbeat(Protocol):
    """An engine in a process that gives signs of life, as ``HostedEngine`` does."""

    def silent_s(self) -> float:
        """Return the seconds since the last sign of life."""


@runtime_checkable
class Cancelling(Protocol):
    """An engine that can be told which groups nobody wants any more. ``SteppedEngine`` and ``HostedEngine`` can."""

    def cancel(self, keys: Iterable[int | str]) -> None:
        """End the groups with these keys where they are, at the next token; returns at once.

        ``generate`` gives them out as it gives aborted ones. A key that it doesn't know is none of its own.
        """


@runtime_checkable
class EngineStats(Protocol):
    """What an engine may report besides, for health checks and measurements. ``SteppedEngine`` and ``HostedEngine``
    do.
    """

    @property
    def steps(self) -> int:
        """Times that a token was made for everything in flight; stands still in an engine that hangs."""

    @property
    def applied_s(self) -> float:
        """Seconds for which the last ``load`` kept tokens from being made."""

    def ping(self, deadline_s: float) -> int:
        """Return the version of an engine that is well; ``DeadlineError`` from one that doesn't answer in time."""
