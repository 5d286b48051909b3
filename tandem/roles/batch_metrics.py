"""The numbers of a trained partition that a person looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tandem.base.errors import ContractError
from tandem.columns.proto import DataProto


def check_lag(batch: DataProto, step: int, max_staleness: int) -> None:
    """Refuse a batch that is not to be trained at ``step``.

    The lag of a sample is ``step`` minus the version of its oldest token. Above ``max_staleness``, or below 0 (weights
    that don't exist yet), it is a defect of the system and raises ``ContractError``.
    """
    lags = sample_lags(batch, step)
    if len(lags) and not 0 <= int(lags.min()) <= int(lags.max()) <= max_staleness:
        raise ContractError(
            f"step {step} was given samples of lags {int(lags.min())} to {int(lags.max())}; "
            f"max_staleness is {max_staleness}"
        )


def batch_metrics(batch: DataProto, step: int) -> dict[str, float]:
    """Return the rewards, lengths and lags of a batch trained at ``step``."""
    valid = batch.dense("reward_valid")
    rewards = batch.dense("rewards")[valid].double()
    lengths = batch.ragged("responses").lengths.double()
    lags = sample_lags(batch, step)
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        "reward/excluded": float((~valid).sum()),
        "reward/groups_without_signal": float(_flat_groups(batch, rewards, valid)),
        "length/mean": _mean(lengths),
        "length/max": float(lengths.max()) if len(lengths) else 0.0,
        **_quantiles(lengths),
        "length/truncated": _mean(batch.dense("truncated").double()),
        "length/prompt": _mean(batch.ragged("prompts").lengths.double()),
        "lag/mean": _mean(lags.double()),
        "lag/max": float(lags.max()) if len(lags) else 0.0,
    }
    if "reward_baselines" in batch.columns:
        metrics["reward/greedy"] = _mean(batch.dense("reward_baselines")[valid].double())
    if "episode" in batch.non_tensor_batch:
        metrics |= episode_metrics(batch.non_tensor_batch["episode"])
    if "advantages" in batch.columns:
        metrics |= _advantages(batch)
    counts = torch.bincount(lags, minlength=1).tolist() if len(lags) else []
    return metrics | {f"lag/count_{lag}": float(count) for lag, count in enumerate(counts)}


def distributions(batch: DataProto) -> dict[str, list[float]]:
    """Return the values of a batch whose spread a person looks at: of each answer, advantages of each trained token."""
    rewards = batch.dense("rewards")[batch.dense("reward_valid")]
    found = {"distribution/length": batch.ragged("responses").lengths.tolist(), "distribution/reward": rewards.tolist()}
    if "advantages" in batch.columns:
        found["distribution/advantage"] = _trained_advantages(batch).tolist()
    return {name: values for name, values in found.items() if values}


def episode_metrics(episodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over episodes of what was counted in each, and the shares of those that a limit has cut, by
    limit.
    """
    counts = ("turns", "tool_calls", "tool_errors", "unparsed", "sampled", "rewritten")
    counted = (*counts, "seconds", "tool_seconds", "engine_seconds")
    found = {f"episode/{name}": sum(float(one[name]) for one in episodes) / len(episodes) for name in counted}
    cuts = {limit: sum(one["cut"] == limit for one in episodes) / len(episodes) for limit in ("turns", "tokens")}
    rewarded = [sum(one["turn_rewards"]) for one in episodes if "turn_rewards" in one]
    given = {"episode/turn_rewards": sum(rewarded) / len(rewarded)} if rewarded else {}
    return found | {f"episode/cut_{limit}": share for limit, share in cuts.items()} | given


def sample_lags(batch: DataProto, step: int) -> torch.Tensor:
    """Count the versions between ``step`` and the oldest token of each sample that has tokens, (<= B,) int64."""
    versions = batch.ragged("token_versions")
    sample = torch.repeat_interleave(versions.lengths)
    oldest = torch.full((len(batch),), step, dtype=torch.int64)
    oldest.scatter_reduce_(0, sample, versions.values.long(), "amin", include_self=False)
    return (step - oldest)[versions.lengths > 0]


def _advantages(batch: DataProto) -> dict[str, float]:
    """Return mean, spread and the share of zeros of the trained tokens' advantages; nothing where none is trained."""
    values = _trained_advantages(batch).double()
    if not len(values):
        return {}
    return {
        "advantage/mean": float(values.mean()),
        "advantage/std": float(values.std(correction=0)),
        "advantage/zero_share": float((values == 0).double().mean()),
    }


def _trained_advantages(batch: DataProto) -> torch.Tensor:
    trained = batch.ragged("loss_mask" if "loss_mask" in batch.columns else "response_mask").values
    return batch.ragged("advantages").values[trained]


def _flat_groups(batch: DataProto, rewards: torch.Tensor, valid: torch.Tensor) -> int:
    """Count the groups all of whose valid rewards are equal: they teach nothing under a group baseline."""
    ids, slot = batch.dense("group_ids")[valid].unique(return_inverse=True)
    low = torch.zeros(len(ids), dtype=rewards.dtype).scatter_reduce(0, slot, rewards, "amin", include_self=False)
    high = torch.zeros(len(ids), dtype=rewards.dtype).scatter_reduce(0, slot, rewards, "amax", include_self=False)
    return int((low == high).sum())


def _quantiles(lengths: torch.Tensor) -> dict[str, float]:
    """Return how the lengths are spread: each a length that there is."""
    shares = {"length/p10": 0.1, "length/p50": 0.5, "length/p90": 0.9}
    return {
        key: float(lengths.quantile(share, interpolation="nearest")) for key, share in shares.items() if len(lengths)
    }


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
