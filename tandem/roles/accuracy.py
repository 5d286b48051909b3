"""How many held-out prompts a model answers exactly, greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem.columns.images import Images
from tandem.rollout.protocol import GroupRequest, RolloutEngine, Sampling


def greedy_accuracy(
    engine: RolloutEngine,
    pairs: Sequence[tuple[Sequence[int], str]],
    tokenizer: Any,
    *,
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
    images: Callable[[int], Images | None] = lambda number: None,
) -> float:
    """Return the fraction of ``pairs`` (prompt ids, right answer) whose greedy answer is exact up to surrounding
    blanks. ``images``: what the prompt of a number shows.
    """
    sampling = Sampling(n=1, max_tokens=max_new_tokens, greedy=True, stop_token_ids=stop_token_ids)
    prompts = (torch.tensor(ids, dtype=torch.int64) for ids, _ in pairs)
    requests = (GroupRequest(i, prompt, (0,), images=images(i)) for i, prompt in enumerate(prompts))
    right = 0
    for output in engine.generate(requests, sampling):
        answer = tokenizer.decode(output.samples[0].token_ids, skip_special_tokens=True)
        right += answer.strip() == pairs[int(output.request.key)][1].strip()
    return right / len(pairs)
