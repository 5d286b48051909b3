"""What an engine gives is checked where it comes in: a defect of an engine is named as its own, at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import torch

from tandem.base.errors import ContractError
from tandem.rollout.protocol import FinishReason, GroupOutput, GroupRequest, RolloutEngine, SampleOutput, Sampling

_ROUNDING = 1e-3  # a log-prob may exceed 0 by so much
_REASONS = get_args(FinishReason)


def sound_outputs(
    engine: RolloutEngine, requests: Iterable[GroupRequest | None], sampling: Sampling
) -> Iterator[GroupOutput]:
    """Yield what ``engine.generate`` does, each group checked against ``RolloutEngine.generate``.

    Raises ``ContractError`` for an answer that nobody asked for or that breaks the protocol, and for an engine that
    ends before it has answered everything and seen the end of ``requests``.
    """
    name, asked = type(engine).__name__, _Asked(requests)
    outputs = engine.generate(iter(asked), sampling)
    if not isinstance(outputs, Iterable):
        raise ContractError(f"the rollout engine {name} returned {outputs!r} from generate: yield GroupOutputs")
    return _checked(name, outputs, asked, sampling)


class _Asked:
    """Requests on their way to an engine: the keys that it owes an answer to, and whether it has seen their end."""

    def __init__(self, requests: Iterable[GroupRequest | None]) -> None:
        self.owed: set[int | str] = set()
        self.ended = False
        self._requests = requests

    def __iter__(self) -> Iterator[GroupRequest | None]:
        for request in self._requests:
            if request is not None:
                self.owed.add(request.key)
            yield request
        self.ended = True


def _checked(name: str, outputs: Iterable[GroupOutput], asked: _Asked, sampling: Sampling) -> Iterator[GroupOutput]:
    for output in outputs:
        wrong = _wrong(output, asked.owed, sampling)
        if wrong is not None:
            raise ContractError(f"the rollout engine {name} gave {wrong}")
        asked.owed.discard(output.request.key)
        yield output
    if asked.owed or not asked.ended:
        left = f"{len(asked.owed)} groups unanswered" if asked.owed else "requests that it never took"
        raise ContractError(
            f"generate of the rollout engine {name} ended with {left}: it must answer each request until they end"
        )


def _wrong(output: Any, asked: set[int | str], sampling: Sampling) -> str | None:
    """Describe the first thing that is not as the protocol has it; None where all is."""
    if not isinstance(output, GroupOutput):
        return f"{type(output).__name__} instead of a GroupOutput"
    request: Any = output.request
    samples: Any = output.samples
    if not isinstance(request, GroupRequest):
        return f"a group of {request!r} instead of a GroupRequest"
    if request.key not in asked:
        return f"a group {request.key!r} that nobody waits for"
    key = request.key
    if not isinstance(samples, tuple | list):
        return f"{samples!r} as the samples of group {key!r} instead of a tuple"
    if len(samples) != sampling.samples:
        return f"{len(samples)} samples of group {key!r} instead of {sampling.samples}"
    most = request.limit(sampling)
    for number, sample in enumerate(samples):
        if not isinstance(sample, SampleOutput):
            return f"{sample!r} as sample {number} of group {key!r} instead of a SampleOutput"
        if wrong := _wrong_shape(sample, most) or _wrong_routes(sample.routes, len(sample.token_ids), sampling.routes):
            return f"sample {number} of group {key!r} {wrong}"
    if wrong := _wrong_routes(output.prompt_routes, len(request.prompt_ids), sampling.routes):
        return f"the prompt of group {key!r} {wrong}"
    # Reading numbers costs the same for a sample as for a group: one by one only where something is wrong.
    ids, logprobs = [sample.token_ids for sample in samples], [sample.logprobs for sample in samples]
    if _wrong_numbers(torch.cat(ids), torch.cat(logprobs), sampling.vocabulary):
        for number, (own_ids, own_logprobs) in enumerate(zip(ids, logprobs, strict=True)):
            if wrong := _wrong_numbers(own_ids, own_logprobs, sampling.vocabulary):
                return f"sample {number} of group {key!r} {wrong}"
    return None


def _wrong_shape(sample: SampleOutput, most: int) -> str | None:
    ids: Any = sample.token_ids
    reason: Any = sample.finish_reason
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        return f"with token_ids {_shown(ids)} instead of (T,) int64"
    if len(ids) > most:
        return f"of {len(ids)} tokens, more than max_tokens = {most}"
    if reason not in _REASONS:
        return f"with finish_reason {reason!r} instead of {', '.join(_REASONS)}"
    columns: list[tuple[str, Any, bool]] = [("logprobs", sample.logprobs, True), ("versions", sample.versions, False)]
    for name, values, floating in columns:
        if not isinstance(values, torch.Tensor) or values.is_floating_point() != floating or values.shape != ids.shape:
            return f"with {name} {_shown(values)} instead of ({len(ids)},) {'float32' if floating else 'int32'}"
    return None


def _wrong_routes(routes: Any, tokens: int, width: int) -> str | None:
    if width == 0:
        return None
    if isinstance(routes, torch.Tensor) and routes.dtype == torch.uint8 and routes.shape == (tokens, width):
        return None
    return f"with routes {_shown(routes)} instead of ({tokens}, {width}) uint8"


def _wrong_numbers(ids: torch.Tensor, logprobs: torch.Tensor, ids_below: int | None) -> str | None:
    if not len(ids):
        return None
    least, largest = (int(number) for number in ids.aminmax())
    if least < 0:
        return f"with the token id {least}"
    if ids_below is not None and largest >= ids_below:
        return f"with the token id {largest}, and the model has the tokens 0 to {ids_below - 1}"
    low, high = (float(number) for number in logprobs.aminmax())  # both NaN where one is
    if -math.inf < low and high <= _ROUNDING:
        return None
    place = int((~(logprobs <= _ROUNDING) | logprobs.isinf()).nonzero()[0])
    return f"with the log-prob {float(logprobs[place])} of its token {place}"


def _shown(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
