"""Contradictions in what is optimised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tandem.algorithms import PREFERENCE_LOSSES
from tandem.base.errors import Problem
from tandem.base.registry import Entry, Scope
from tandem.config.schema import Config
from tandem.plan.checks.learning.correction import check_correction, correction_scope
from tandem.plan.checks.learning.stages import key_of_stages
from tandem.plan.checks.parameters import COLDEST, check_parameters, is_number
from tandem.plan.parts.batch import longest_sequence, mini_batch_prompts
from tandem.plan.parts.entries import Entries, advantage_name, estimator_columns
from tandem.plan.parts.placement import train_ranks, uses_reference
from tandem.plan.parts.stages import columns_known, old_logprobs_from, plan_stages
from tandem.reward.parts import component_names
from tandem.stages.facts import COMPUTED_IN_TRAINING, CRITIC
from tandem.stages.stage import PlannedStage
from tandem.stages.table import advantages, train

LOSS = "algorithm.policy_loss"
ESTIMATOR = "algorithm.adv_estimator"
ROLLOUT = "actor_rollout_ref.rollout"
STAGES = "algorithm.stages"


def check_algorithm(config: Config, entries: Entries) -> Iterator[Problem]:
    """Yield every problem of the section ``algorithm`` and of what it asks other sections for."""
    yield from _check_loss(config, entries)
    yield from _check_estimator(config, entries)
    yield from _check_kl(config)
    yield from _check_sampling(config)
    yield from check_correction(config, entries)
    yield from _check_groups(config, entries)
    yield from _check_columns(config, entries)


def _check_loss(config: Config, entries: Entries) -> Iterator[Problem]:
    if entries.policy_loss is None:
        return
    loss = config.algorithm.policy_loss
    yield from check_parameters(LOSS, "policy loss", loss.type, loss.parameters, entries.policy_loss.signature)
    yield from _check_sides(loss.parameters, entries.policy_loss)
    yield from _check_band(loss.parameters, entries.policy_loss)
    yield from _check_whole_mini_batch(config, entries.policy_loss)


def _check_sides(written: Mapping[str, Any], loss: Entry[Any]) -> Iterator[Problem]:
    """Report a bound for both sides that is not read, since each side has one of its own."""
    for name, value in written.items():
        sides = [f"{name}_low", f"{name}_high"]
        if all(side in loss.signature.parameters and written.get(side) is not None for side in sides):
            reason = f"nothing reads it: {' and '.join(sides)} are both written"
            yield Problem(f"{LOSS}.{name}", value, reason, "Leave it out, or leave one of the sides to it")


def _check_band(written: Mapping[str, Any], loss: Entry[Any]) -> Iterator[Problem]:
    """Check the two bounds between which Clip-Cov draws tokens."""
    names, known = ("clip_cov_lb", "clip_cov_ub"), loss.signature.parameters
    if not all(name in known for name in names):
        return
    low, high = (written.get(name, known[name].default) for name in names)
    if is_number(low) and is_number(high) and low >= high:
        key, value = (names[0], low) if names[0] in written else (names[1], high)
        reason = f"no covariance lies between {low:g} and {high:g}, so nothing would ever be left out"
        yield Problem(f"{LOSS}.{key}", value, reason, "Write clip_cov_lb below clip_cov_ub, such as 1.0 and 5.0")


def _check_whole_mini_batch(config: Config, loss: Entry[Any]) -> Iterator[Problem]:
    """Report a loss with statistics over the mini-batch would change with its cut into micro-batches."""
    actor = config.actor_rollout_ref.actor
    n = config.actor_rollout_ref.rollout.n
    needed = mini_batch_prompts(config) * n * longest_sequence(config)
    if not loss.traits.get("whole_mini_batch"):
        return
    if actor.micro_batch_tokens < needed:
        reason = f"{loss.name} looks at a whole mini-batch at once, which can have {needed} tokens"
        least = math.ceil(needed / actor.ulysses_sequence_parallel_size)
        remedy = f"Write at least {least}, a smaller mini-batch, or a loss such as ppo_clip"
        budget = actor.ppo_max_token_len_per_gpu
        yield Problem("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", budget, reason, remedy)
    micro, samples = actor.ppo_micro_batch_size, mini_batch_prompts(config) * n
    if micro is not None and micro < samples:
        reason = f"{loss.name} looks at a whole mini-batch at once, which has {samples} samples"
        yield Problem("actor_rollout_ref.actor.ppo_micro_batch_size", micro, reason, "Leave it out")
    if config.trainer.exact:
        reason = f"it trains group by group, and {loss.name} looks at a whole mini-batch at once"
        yield Problem("trainer.exact", True, reason, "Write exact: false, or a loss such as ppo_clip")
    ranks = train_ranks(config)
    if ranks > 1:
        reason = f"{loss.name} looks at a whole mini-batch at once, and each of {ranks} train ranks has a part of it"
        remedy = "Give the actor one device, or write a loss such as ppo_clip"
        yield Problem(f"{LOSS}.type", loss.name, reason, remedy)


def _check_estimator(config: Config, entries: Entries) -> Iterator[Problem]:
    entry, name, n = entries.advantage, advantage_name(config), config.actor_rollout_ref.rollout.n
    if entry is None:
        return
    yield from check_parameters(ESTIMATOR, "advantage estimator", name, entries.advantage_parameters, entry.signature)
    yield from _check_weights(config, entries)
    if not entries.estimates:
        return
    if n == 1 and entry.traits.get("group_baseline"):
        reason = f"{name} compares the samples of a prompt with each other: with one sample every advantage is 0"
        yield Problem(f"{ROLLOUT}.n", n, reason, "Write 2 or more, or an estimator without a group baseline")
    critic_key = f"{ESTIMATOR}" + ("" if isinstance(config.algorithm.adv_estimator, str) else ".type")
    needs_values = "values" in entry.signature.columns
    if needs_values and not config.critic.enable:
        reason = f"{name} needs the column 'values', which only a critic gives"
        yield Problem(critic_key, name, reason, "Write critic.enable: true, or an estimator such as grpo")
    if config.critic.enable and not needs_values and "values" not in entry.signature.optional_columns:
        reason = f"a critic would be trained and nothing reads its values: {name} doesn't"
        yield Problem("critic.enable", True, reason, "Write critic.enable: false, or adv_estimator: gae")


def _check_weights(config: Config, entries: Entries) -> Iterator[Problem]:
    """Yield every problem of the weights of an estimator that has one for each part of the reward."""
    weights, reward = entries.advantage_parameters.get("weights"), config.reward_manager
    if entries.advantage is None or "reward_components" not in entries.advantage.signature.columns:
        return
    if not isinstance(weights, list):
        return
    if weights and all(is_number(weight) and weight == 0 for weight in weights):
        reason = "all parts weigh 0, so every advantage would be 0"
        yield Problem(f"{ESTIMATOR}.weights", weights, reason, "Write a number other than 0 for one of them")
    parts = component_names(reward.type, reward.file, reward.parameters)
    if parts and len(parts) != len(weights):
        reason = f"{len(weights)} weights, and reward_manager has {len(parts)} parts ({', '.join(parts)})"
        yield Problem(f"{ESTIMATOR}.weights", weights, reason, f"Write {len(parts)} numbers, in the order of the parts")


def _check_kl(config: Config) -> Iterator[Problem]:
    kl = config.algorithm.kl
    if kl.controller == "adaptive" and kl.horizon <= 0:
        reason = "the adaptive controller acts over this many samples"
        yield Problem("algorithm.kl.horizon", kl.horizon, reason, "Write a positive number, such as 10000")
    yield from check_reference(config)


def check_reference(config: Config) -> Iterator[Problem]:
    """Check whether there is a reference to refresh."""
    interval = config.actor_rollout_ref.ref.update_interval
    if interval is not None and not uses_reference(config):
        reason = "there is no reference policy to refresh: nothing compares with one"
        remedy = "Remove it, or write algorithm.kl.in: loss with a coefficient above 0"
        if config.algorithm.policy_loss.type in PREFERENCE_LOSSES:
            with_one = [
                n for n in PREFERENCE_LOSSES.names() if "ref_logprobs" in PREFERENCE_LOSSES[n].signature.columns
            ]
            remedy = f"Remove it, or take a loss that compares with a reference: {', '.join(with_one)}"
        yield Problem("actor_rollout_ref.ref.update_interval", interval, reason, remedy)


def _check_sampling(config: Config) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature < COLDEST:
        reason = (
            "training samples; a temperature of 0 or less has no distribution to learn from"
            if rollout.temperature <= 0
            else "practically greedy: the samples of a group would be equal, and gradients divided by it overflow"
        )
        remedy = f"Write {COLDEST:g} or more, such as 1.0"
        yield Problem(f"{ROLLOUT}.temperature", rollout.temperature, reason, remedy)
    if not rollout.do_sample:
        reason = "greedy answers are all equal and have nothing to learn from"
        yield Problem(
            f"{ROLLOUT}.do_sample", False, reason, "Write true; greedy answers belong to evaluation.temperature: 0"
        )
    if rollout.top_k == 1:
        reason = "always the likeliest token: answers to a prompt are all equal and have nothing to learn from"
        yield Problem(f"{ROLLOUT}.top_k", 1, reason, "Write -1 to keep all, or 2 or more")
    if rollout.top_k == 0:
        yield Problem(f"{ROLLOUT}.top_k", 0, "no token would be kept", "Write -1 to keep all, or how many to keep")


def _check_groups(config: Config, entries: Entries) -> Iterator[Problem]:
    filtering, n = config.algorithm.filter_groups, config.actor_rollout_ref.rollout.n
    if filtering.enable and n == 1 and "reward_baselines" not in estimator_columns(config):
        reason = "a group of one sample always has equal rewards: every group would be filtered and no step ever filled"
        yield Problem("algorithm.filter_groups.enable", True, reason, f"Write false, or {ROLLOUT}.n of 2 or more")
    execution = config.execution
    if execution.mode != "hybrid" or execution.train_pipelining == "off":
        return
    key, value = "execution.train_pipelining", execution.train_pipelining
    adaptive = Scope.PARTITION if config.algorithm.kl.controller == "adaptive" else Scope.TOKEN
    wide = {
        f"{ESTIMATOR} {advantage_name(config)}": _scope(entries.advantage if entries.estimates else None),
        f"{LOSS} {config.algorithm.policy_loss.type}": _scope(entries.policy_loss),
        "algorithm.distillation": _scope(entries.distillation),
        "algorithm.kl.controller adaptive": adaptive,
        "algorithm.rollout_correction": correction_scope(config),
        **{f"{STAGES}: {one.name}": Scope.PARTITION for one in entries.stages if one.phase == "partition"},
    }
    blockers = [name for name, scope in wide.items() if scope > Scope.GROUP]
    if blockers:
        reason = f"{' and '.join(blockers)} looks at the whole partition at once, which pipelining never has"
        yield Problem(
            key, value, reason, "Write off, or something of group scope in its place, such as grpo or ppo_clip"
        )


def _scope(entry: Entry[Any] | None) -> Scope:
    """Return the scope of an entry that is used; the narrowest where none is."""
    return Scope.TOKEN if entry is None else entry.scope


def _check_columns(config: Config, entries: Entries) -> Iterator[Problem]:
    stages, named = plan_stages(config, entries), key_of_stages(config)
    known = {*columns_known(stages), *COMPUTED_IN_TRAINING, "values", "tis_weights"}
    for stage in stages:
        if stage.role == CRITIC and not entries.estimates:
            continue  # a critic without rewards is refused as such
        for name in stage.needs:
            if name not in known:
                yield _orphan(config, stage, name, named)


def _orphan(config: Config, stage: PlannedStage, column: str, named: Mapping[str, str]) -> Problem:
    key, value = {
        **{name: (key, name) for name, key in named.items()},
        advantages.name: (ESTIMATOR, advantage_name(config)),
        train.name: (LOSS, config.algorithm.policy_loss.type),
    }.get(stage.name, ("reward_manager.type", config.reward_manager.type))
    if column == "ref_logprobs":
        return Problem(
            key, value, "it needs ref_logprobs, and nothing asks for a reference", "Write algorithm.kl.in: loss"
        )
    if column == "old_logprobs":
        reason = f"it needs old_logprobs, and algorithm.old_logprobs is {old_logprobs_from(config)}"
        return Problem(key, value, reason, "Write algorithm.old_logprobs: recompute")
    if column == "sum_pi_squared":
        reason = f"it needs {column!r} of the old policy's forward, and algorithm.old_logprobs is rollout"
        return Problem(key, value, reason, "Write algorithm.old_logprobs: recompute, or an estimator such as grpo")
    if column == "reward_components":
        reason = f"{value} compares the parts of a reward one by one, and reward_manager has no parts"
        remedy = "Write reward_manager: {type: weighted_sum, parts: [...]}, or an estimator such as grpo"
        return Problem(key, value, reason, remedy)
    remedy = "Use another one. If it is yours: a column is positional, a parameter written in YAML stands behind a '*'"
    return Problem(key, value, f"it needs the column {column!r}, which no stage gives", remedy)
