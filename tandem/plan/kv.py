"""Keys and values of a rollout engine: what its samples need, and whether they fit what it may have."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.models.families import PER_DOCUMENT
from tandem.models.kv_cost import KVCost, Rows
from tandem.plan.files.model import ModelFacts
from tandem.plan.parts.preference import learns_preferences

KEY = "actor_rollout_ref.rollout.kv_cache_gib"
WIDTH = {"float32": 4, "bfloat16": 2}


def shares_prompts(facts: ModelFacts) -> bool:
    """Return whether the samples of a prompt have its keys and values in common."""
    return not any(family in PER_DOCUMENT for family in facts.families)


def kv_cost(config: Config, facts: ModelFacts) -> KVCost | None:
    """Return the bytes of keys and values of the engine hf; None where the files don't say."""
    if not (facts.layers and facts.kv_heads and facts.head_dim):
        return None
    part = WIDTH[config.actor_rollout_ref.model.dtype] * facts.kv_heads * facts.head_dim
    return KVCost(2 * part * facts.layers, part, tables=shares_prompts(facts))


def kv_bound(config: Config) -> int | None:
    """Return the bytes that the config gives keys and values; None where it gives none."""
    gib = config.actor_rollout_ref.rollout.kv_cache_gib
    return None if gib is None else int(gib * 2**30)


def _group(config: Config) -> Rows:
    """Return the samples of a prompt at their longest."""
    n, data = config.actor_rollout_ref.rollout.n, config.data
    return Rows(n, data.max_prompt_length, data.max_response_length, shared=n > 1)


def check_kv(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield a bound that the samples of one prompt alone may not fit."""
    bound, cost = kv_bound(config), None if facts is None else kv_cost(config, facts)
    if bound is None or cost is None or not _is_read(config):
        return
    group = _group(config)
    need = cost.together([group])
    if need > bound:
        reason = (
            f"keys and values of {group.prompt} prompt tokens and {group.rows} x {group.answer} answer tokens take "
            f"{need} bytes ({cost.token} a token), and these are {bound}"
        )
        least = -(-need * 1000 // 2**30) / 1000
        yield Problem(KEY, config.actor_rollout_ref.rollout.kv_cache_gib, reason, f"Write at least {least}")


def notes_on_kv(config: Config, facts: ModelFacts | None) -> Iterator[str]:
    """Note how many prompts are in flight at a time where the bound, and nothing else, says so."""
    bound, cost = kv_bound(config), None if facts is None else kv_cost(config, facts)
    if bound is None or cost is None or not _is_read(config):
        return
    group, rollout = _group(config), config.actor_rollout_ref.rollout
    wanted = min(config.data.train_batch_size, rollout.max_num_seqs // group.rows)
    one = cost.together([group])
    together = next((count for count in range(wanted, 0, -1) if cost.together([group] * count) <= bound), 0)
    if one <= bound and together < wanted:
        yield (
            f"{KEY} = {rollout.kv_cache_gib:g}: {together} of {wanted} prompts are in flight at a time where answers "
            f"may become as long as they may, the others wait ({one / 2**20:.1f} MiB a prompt)"
        )


def _is_read(config: Config) -> bool:
    return config.actor_rollout_ref.rollout.name == "hf" and not learns_preferences(config)
