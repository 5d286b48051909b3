"""How many held-out prompts a model answers exactly, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem.rollout.protocol import GroupRequest, RolloutEngine, Sampling


def greedy_accuracy(
    engine: RolloutEngine,
    pairs: Sequence[tuple[Sequence[int], str]],
    tokenizer: Any,
    *,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
) -> float:
    """Return the fraction of ``pairs`` (prompt ids, right answer) whose greedy answer is exact up to surrounding
    blanks.
    """
    sampling = Sampling(n=1, max_tokens=max_new_tokens, greedy=True, stop_token_ids=stop_token_ids)
    requests = (GroupRequest(i, torch.tensor(ids, dtype=torch.int64), (0,)) for i, (ids, _) in enumerate(pairs))
    right = 0
    for output in engine.generate(requests, sampling):
        answer = tokenizer.decode(output.samples[0].token_ids, skip_special_tokens=True)
        right += answer.strip() == pairs[int(output.request.key)][1].strip()
    return right / len(pairs)
