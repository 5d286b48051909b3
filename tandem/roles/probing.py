"""What the trainer's weights say of a few fixed prompts, and what an engine says: at a push the two are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged
from tandem.roles.train_group import TrainGroup
from tandem.roles.train_rank import TrainRank
from tandem.rollout.protocol import GroupOutput, GroupRequest, RolloutEngine, Sampling
from tandem.rollout.sound import sound_outputs
from tandem.train.protocol import TopTokens
from tandem.weights.probe import Answer, Expected, Tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOLERANCES = {"float32": Tolerance(1e-3, 1e-2), "bfloat16": Tolerance(0.1, 0.6)}
"""By the dtype in which both compute."""

_LENGTHS = (1, 3, 7, 12, 19, 28, 33, 40)
_GREEDY = Sampling(n=1, max_tokens=1, greedy=True)


class LogprobProbe:
    """A ``Probe`` of the weights in place on ``ranks``: at the first push, at those of versions that ``every`` divides,
    and where one is due for somebody who joined."""

    def __init__(
        self,
        ranks: TrainGroup[TrainRank],
        prompts: Sequence[torch.Tensor],
        *,
        tokens: int,
        every: int,
        tolerance: Tolerance,
    ) -> None:
        self._ranks, self._prompts, self._tokens = ranks, prompts, tokens
        self._every, self._tolerance = every, tolerance
        self._first = True

    @classmethod
    def of(
        cls,
        ranks: TrainGroup[TrainRank],
        tokenizer: PreTrainedTokenizerBase,
        *,
        longest: int,
        every: int,
        dtype: Literal["float32", "bfloat16"],
    ) -> LogprobProbe:
        """Return the probe with the prompts of ``probe_prompts``, for engines that compute in ``dtype``."""
        return cls(
            ranks,
            probe_prompts(tokenizer, longest),
            tokens=max(tokenizer.get_vocab().values()) + 1,
            every=every,
            tolerance=TOLERANCES[dtype],
        )

    def expected(self, version: int, *, due: bool = False) -> Expected | None:
        """Return what the actor answers to the prompts, by one forward; None where this version is not to be asked."""
        due, self._first = due or self._first or version % self._every == 0, False
        if not due:
            return None
        answers = Ragged.from_rows([prompt[:1] for prompt in self._prompts])  # whatever is behind, they are read before
        columns: dict[str, Ragged | torch.Tensor] = {
            "prompts": Ragged.from_rows(list(self._prompts)),
            "responses": answers,
            "response_mask": answers.like(torch.ones(len(self._prompts), dtype=torch.bool)),
            "group_ids": torch.arange(len(self._prompts)),
        }
        found = self._ranks.forward(DataProto(columns), [TopTokens(2, self._tokens, temperature=1.0)])
        logprobs, ids = found["top_logprobs"].values, found["top_ids"].values.long()
        return Expected(self._prompts, ids[:, 0], logprobs[:, 0], logprobs[:, 1], self._tolerance)


def probe_prompts(tokenizer: PreTrainedTokenizerBase, longest: int) -> list[torch.Tensor]:
    """Return the prompts, each (P,) int64 of ordinary tokens, of at most ``longest``: the same ones in every run."""
    special = {*tokenizer.all_special_ids}
    known = torch.tensor(sorted({*tokenizer.get_vocab().values()} - special) or sorted(special))
    noise = torch.Generator().manual_seed(0)
    return [known[torch.randint(len(known), (min(length, longest),), generator=noise)] for length in _LENGTHS]


def ask(engine: RolloutEngine, prompts: Sequence[torch.Tensor], logprobs: bool) -> list[Answer]:
    """Return the engine's likeliest next token after each prompt; with its log-prob where the engine gives
    ``logprobs``.
    """
    requests = [GroupRequest(i, prompt, (i,)) for i, prompt in enumerate(prompts)]
    answers: dict[int, Answer] = {}
    for output in sound_outputs(engine, requests, _GREEDY):
        answers[int(output.request.key)] = _answer(output, logprobs)
    return [answers[i] for i in range(len(prompts))]


def _answer(output: GroupOutput, logprobs: bool) -> Answer:
    (sample,) = output.samples
    return Answer(int(sample.token_ids[0]), float(sample.logprobs[0]) if logprobs else None)
