"""Contradictions between log-probs of the rollout engine and whatever compares them with the trainer's."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.algorithms.rollout_correction import CorrectionRules
from tandem.base.errors import ContractError, Problem
from tandem.base.registry import Scope
from tandem.config.correction import RejectionConfig
from tandem.config.schema import Config
from tandem.plan.parts.entries import Entries

TIS, CORRECTION, LOSS = "algorithm.use_tis", "algorithm.rollout_correction", "algorithm.policy_loss.type"
ROLLOUT = "actor_rollout_ref.rollout"


def check_correction(config: Config, entries: Entries) -> Iterator[Problem]:
    """Yield every problem of the rollout correction."""
    yield from _check_settings(config)
    yield from _check_distribution(config, entries)
    yield from _check_effect(config, entries)


def correction_notes(config: Config, entries: Entries) -> Iterator[str]:
    """Note samples of another distribution than the one that is trained, where nothing looks at the difference."""
    execution = config.execution
    if readers(config, entries):
        return
    if (cut := cut_sampling(config)) is not None:
        yield (
            f"samples are drawn with {cut} and trained as if they came from the whole distribution, and no "
            f"{CORRECTION} looks at the difference; top_p: 1.0 and top_k: -1 make none"
        )
    if execution.mode != "colocate" and execution.max_staleness > 1:
        yield (
            f"samples may be {execution.max_staleness} versions old, and neither {CORRECTION} nor a loss that knows "
            "the policy that sampled looks at the difference; policy_loss: {type: decoupled_ppo} does"
        )


def correction_scope(config: Config) -> Scope:
    """Return the widest set of samples that the correction looks at; where its settings are wrong a problem says so."""
    try:
        return CorrectionRules.of(config.algorithm.correction).scope
    except ContractError:
        return Scope.TOKEN


def cut_sampling(config: Config) -> str | None:
    """Return what is cut off before a token is drawn, if anything."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_p < 1:
        return f"top_p {rollout.top_p:g}"
    return f"top_k {rollout.top_k}" if rollout.top_k > 0 else None


def readers(config: Config, entries: Entries) -> dict[str, object]:
    """Return the keys and values of whatever compares rollout log-probs with the trainer's."""
    algorithm = config.algorithm
    found: dict[str, object] = {}
    if algorithm.use_tis:
        found[TIS] = True
    if algorithm.rollout_correction.gives:
        found[_key(config)] = _value(config)
    if algorithm.old_logprobs == "rollout":
        found["algorithm.old_logprobs"] = "rollout"
    if entries.policy_loss is not None and "rollout_logprobs" in entries.policy_loss.signature.columns:
        found[LOSS] = algorithm.policy_loss.type
    return found


def _key(config: Config) -> str:
    """Return the key that turns the correction on."""
    correction = config.algorithm.rollout_correction
    if correction.weights != "off":
        return f"{CORRECTION}.weights"
    return f"{CORRECTION}.reject" if correction.reject else f"{CORRECTION}.veto"


def _value(config: Config) -> object:
    correction = config.algorithm.rollout_correction
    if correction.weights != "off":
        return correction.weights
    return [rule.by for rule in correction.reject] or correction.veto


def _check_settings(config: Config) -> Iterator[Problem]:
    algorithm, correction = config.algorithm, config.algorithm.rollout_correction
    if algorithm.use_tis and correction.weights != "off":
        reason = "both ask for importance weights, and use_tis is short for weights: token"
        yield Problem(TIS, True, reason, f"Write use_tis: false, and tis_cap as {CORRECTION}.cap")
    if (
        algorithm.correction.weights != "off"
        and correction.floor is not None
        and correction.floor > algorithm.correction.cap
    ):
        reason = f"weights are kept from floor to cap, which is {algorithm.correction.cap:g}"
        yield Problem(f"{CORRECTION}.floor", correction.floor, reason, "Write a number below cap, such as 0.5")
    for index, rule in enumerate(correction.reject):
        yield from _check_rule(f"{CORRECTION}.reject[{index}]", rule)


def _check_rule(key: str, rule: RejectionConfig) -> Iterator[Problem]:
    if rule.quantile is not None:
        if rule.high is not None or rule.low is not None:
            reason = "a quantile says how much is kept, whatever the bounds"
            yield Problem(f"{key}.quantile", rule.quantile, reason, "Write either quantile, or high and low")
    elif rule.by == "seq_min_k1":
        if rule.low is None or rule.high is not None:
            reason = "the smallest ratio of an answer has a lower bound only"
            yield Problem(f"{key}.by", rule.by, reason, "Write low, such as 1.0e-4, and no high")
    elif rule.high is None:
        yield Problem(f"{key}.high", None, f"{rule.by} needs a bound", f"Write {key}.high=..., or quantile")
    elif rule.low is not None and not rule.by.endswith("k1"):
        reason = f"{rule.by} is 0 without drift and has no lower bound"
        yield Problem(f"{key}.low", rule.low, reason, "Remove it, or write by: " + rule.by[:-2] + "k1")
    elif rule.low is not None and rule.low > rule.high:
        reason = f"nothing lies between it and high, which is {rule.high:g}"
        yield Problem(f"{key}.low", rule.low, reason, "Write a number below high")
    elif rule.by.endswith("k1") and rule.low is None and rule.high < 1:
        reason = "low defaults to 1 / high, so nothing would be kept"
        yield Problem(f"{key}.high", rule.high, reason, "Write a ratio above 1, such as 2.0, or low as well")


def _check_distribution(config: Config, entries: Entries) -> Iterator[Problem]:
    """Check that both log-probs of the ratios are of the same distribution: else they mean nothing."""
    rollout, cut = config.actor_rollout_ref.rollout, cut_sampling(config)
    for key, value in list(readers(config, entries).items())[:1]:
        if cut is not None and rollout.logprobs_of == "sampled":
            reason = (
                f"with {cut} the rollout log-probs are of the truncated distribution and the trainer's of the whole "
                "one, so their ratio is biased"
            )
            remedy = f"Write {ROLLOUT}.logprobs_of: full, or top_p: 1.0 and top_k: -1"
            yield Problem(key, value, reason, remedy)


def _check_effect(config: Config, entries: Entries) -> Iterator[Problem]:
    algorithm, loss = config.algorithm, entries.policy_loss
    for key, value in readers(config, entries).items():
        if key == "algorithm.old_logprobs" or algorithm.old_logprobs != "rollout":
            continue
        reason = "old log-probs that are the rollout's make every importance weight 1"
        yield Problem(key, value, reason, "Write algorithm.old_logprobs: recompute, or turn it off")
    if algorithm.correction.weights == "off" or loss is None:
        return
    key, value = (TIS, True) if algorithm.use_tis else (_key(config), _value(config))
    if "tis_weights" not in (*loss.signature.columns, *loss.signature.optional_columns):
        reason = f"the policy loss {loss.name!r} takes no tis_weights, so it would have no effect"
        remedy = (
            f"Write {key.rpartition('.')[2]}: {'false' if key == TIS else 'off'}, or policy_loss: {{type: ppo_clip}}"
        )
        yield Problem(key, value, reason, remedy)
