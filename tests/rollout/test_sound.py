"""What an engine of one's own gives wrongly is named at once, as the engine's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.base.errors import ContractError
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling
from tandem.rollout.sound import sound_outputs
from tests.rollout.tiny_models import lm, requests

SAMPLING = Sampling(n=2, max_tokens=4, vocabulary=1000)


class Own(HfEngine):
    """Spoils what it generates."""

    def __init__(self, spoil: Callable[[GroupOutput], Any]) -> None:
        super().__init__(lm())
        self.spoil = spoil

    def generate(self, requests: Iterable[GroupRequest | None], sampling: Sampling) -> Iterator[GroupOutput]:
        for output in super().generate(requests, sampling):
            yield self.spoil(output)


def sample(**changes: Any) -> Callable[[GroupOutput], GroupOutput]:
    def spoil(output: GroupOutput) -> GroupOutput:
        made = {name: change(getattr(output.samples[1], name)) for name, change in changes.items()}
        return replace(output, samples=(output.samples[0], replace(output.samples[1], **made)))

    return spoil


def with_nan(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values[:2], torch.tensor([math.nan]), values[3:]])


WRONG: dict[str, tuple[Callable[[GroupOutput], Any], str]] = {
    "no log-probs": (
        sample(logprobs=lambda x: None),
        r"sample 1 of group 0 with logprobs None instead of \(4,\) float32",
    ),
    "log-probs of another length": (sample(logprobs=lambda x: x[:2]), r"with logprobs \(2,\) torch.float32 instead of"),
    "a NaN": (sample(logprobs=with_nan), "with the log-prob nan of its token 2"),
    "a log-prob above 0": (sample(logprobs=lambda x: -x + 1), r"with the log-prob \d"),
    "minus infinity": (sample(logprobs=lambda x: x - math.inf), "with the log-prob -inf of its token 0"),
    "no versions": (sample(versions=lambda x: None), r"with versions None instead of \(4,\) int32"),
    "a list of tokens": (sample(token_ids=lambda x: x.tolist()), r"with token_ids \[.*instead of \(T,\) int64"),
    "an impossible token": (sample(token_ids=lambda x: x - 100), "with the token id -"),
    "a token that no model has": (
        sample(token_ids=lambda x: x + 1000),
        r"with the token id 1\d\d\d, and the model has the tokens 0 to 999",
    ),
    "an unknown end": (
        sample(finish_reason=lambda x: "eos"),
        "with finish_reason 'eos' instead of stop, length",
    ),
    "too many tokens": (
        sample(**dict.fromkeys(("token_ids", "logprobs", "versions"), lambda x: torch.cat([x, x]))),
        "of 8 tokens, more than max_tokens = 4",
    ),
    "too few samples": (lambda o: replace(o, samples=o.samples[:1]), "1 samples of group 0 instead of 2"),
    "a group of nobody's": (lambda o: replace(o, request=replace(o.request, key="x")), "'x' that nobody waits for"),
    "no sample": (lambda o: replace(o, samples=(o.samples[0], None)), "None as sample 1 of group 0 instead of a Sam"),
    "no samples": (lambda o: replace(o, samples=None), "None as the samples of group 0 instead of a tuple"),
    "no request": (lambda o: replace(o, request=None), "a group of None instead of a GroupRequest"),
    "something else": (lambda o: o.samples, "tuple instead of a GroupOutput"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_broken_answer_is_named(kind: str) -> None:
    spoil, told = WRONG[kind]
    with pytest.raises(ContractError, match=f"the rollout engine Own gave .*{told}"):
        list(sound_outputs(Own(spoil), requests(1), SAMPLING))


def test_sound_answers_pass_aborted_and_empty_ones_too() -> None:
    def cut(output: GroupOutput) -> GroupOutput:
        nothing = SampleOutput(*(x[:0] for x in (output.samples[0].token_ids, output.samples[0].logprobs)),
                               output.samples[0].versions[:0], "aborted")  # fmt: skip
        return replace(output, samples=(nothing, output.samples[1]))

    assert len(list(sound_outputs(Own(cut), requests(3), SAMPLING))) == 3


@pytest.mark.parametrize(
    ("generate", "told"),
    [
        (lambda self, requests, sampling: None, "returned None from generate"),
        (lambda self, requests, sampling: iter(()), "ended with requests that it never took"),
        (lambda self, requests, sampling: list(requests)[:0], "ended with 3 groups unanswered"),
    ],
)
def test_an_engine_that_simply_ends_is_named(monkeypatch: pytest.MonkeyPatch, generate: Any, told: str) -> None:
    monkeypatch.setattr(Own, "generate", generate)
    with pytest.raises(ContractError, match=f"the rollout engine Own {told}"):
        list(sound_outputs(Own(lambda o: o), requests(3), SAMPLING))
