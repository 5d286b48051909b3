"""Batches as a run hands them to its log, and a tokenizer of letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem.columns.proto import DataProto
from tandem.columns.ragged import Ragged


class Letters:
    """A token is a letter; a first space is lost, as some tokenizers lose it."""

    def decode(self, row: Any) -> str:
        tokens = row.tolist() if hasattr(row, "tolist") else row
        return "".join(map(chr, tokens))


def scored(
    texts: Sequence[str],
    rewards: Sequence[float],
    *,
    prompts: Sequence[str] = (),
    failures: Sequence[str] = (),
    notes: Sequence[dict[str, str]] = (),
    version: int = 0,
    advantages: Sequence[float] | None = None,
    group: int = 2,
) -> DataProto:
    """Answers in groups of ``group``; ``advantages``: one for all tokens of each."""
    count = len(texts)
    responses = Ragged.from_rows([torch.tensor([ord(letter) for letter in text], dtype=torch.int64) for text in texts])
    asked = prompts or [f"prompt {i // group}" for i in range(count)]
    columns: dict[str, Any] = {
        "prompts": Ragged.from_rows([torch.tensor([ord(letter) for letter in prompt]) for prompt in asked]),
        "responses": responses,
        "response_mask": responses.like(torch.ones(len(responses.values), dtype=torch.bool)),
        "rollout_logprobs": responses.like(torch.full((len(responses.values),), -0.5)),
        "token_versions": responses.like(torch.full((len(responses.values),), version, dtype=torch.int32)),
        "group_ids": torch.arange(count) // group,
        "sample_index": torch.arange(count) % group,
        "truncated": torch.zeros(count, dtype=torch.bool),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        "reward_valid": torch.tensor(rewards).isfinite(),
    }
    if advantages is not None:
        columns["advantages"] = responses.like(torch.tensor(advantages).repeat_interleave(responses.lengths))
    said = [
        {"failure": failure, "metrics": {"strict": reward} if reward == reward else {}, "notes": note}
        for reward, failure, note in zip(
            rewards, failures or [""] * count, notes or [dict[str, str]()] * count, strict=True
        )
    ]
    others = {
        "uid": [f"row{i // group}" for i in range(count)],
        "prompt_text": list(asked),
        "ground_truth": [i // group for i in range(count)],
        "data_source": [None] * count,
        "extra_info": [{"level": 1, "api_key": "a secret"}] * count,
        "scoring": said,
    }
    return DataProto(columns, others, tokenizer=Letters())
