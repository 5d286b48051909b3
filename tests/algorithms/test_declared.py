"""What each entry declares beside its formula: what it must see at once, facts for the plan, its defaults.

The plan refuses to pipeline what needs a whole partition, and groups of one where a peer is needed: a wrong declaration
trains on wrong numbers without an error.
"""

from __future__ import annotations

from typing import Any

import pytest

from tandem.algorithms import ADVANTAGES, DISTILLATIONS, KL_CONTROLLERS, KL_TYPES, POLICY_LOSSES, PREFERENCE_LOSSES
from tandem.algorithms.rollout_correction import Rejection, Weighting
from tandem.base.registry import Registry, Scope

TOKEN, SEQUENCE, GROUP, PARTITION = Scope
Declared = dict[str, tuple[Scope, set[str], dict[str, object]]]
CLIP: dict[str, object] = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None}
BY_STD: dict[str, object] = {"norm_adv_by_std": True, "epsilon": 1e-6}
PEERS, EACH_TOKEN, WHOLE, IN_REWARD = {"group_baseline"}, {"token_level"}, {"whole_mini_batch"}, {"for_reward"}

ESTIMATORS: Declared = {
    "dr_grpo": (GROUP, PEERS, {}),
    "gae": (PARTITION, EACH_TOKEN, {"gamma": 1.0, "lam": 1.0}),
    "gdpo": (PARTITION, PEERS, {"weights": None, "epsilon": 1e-6}),
    "gpg": (PARTITION, PEERS, {"f_norm": 1.0}),
    "grpo": (GROUP, PEERS, BY_STD),
    "grpo_passk": (GROUP, PEERS, BY_STD),
    "opo": (GROUP, PEERS, {}),
    "optimal_token_baseline": (GROUP, PEERS | EACH_TOKEN, {}),
    "reinforce_plus_plus": (PARTITION, EACH_TOKEN, {"gamma": 1.0}),
    "reinforce_plus_plus_baseline": (PARTITION, PEERS, {}),
    "remax": (SEQUENCE, EACH_TOKEN, {}),
    "rloo": (GROUP, PEERS, {}),
    "tir_optimal_token_baseline": (GROUP, PEERS | EACH_TOKEN, {}),
}
LOSSES: Declared = {
    "cispo": (TOKEN, set(), CLIP),
    "clip_cov": (
        PARTITION,
        WHOLE,
        CLIP | {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "seed": 0},
    ),
    "decoupled_ppo": (TOKEN, set(), CLIP | {"clip_ratio_c": None, "behaviour_cap": 5.0}),
    "dppo_kl": (TOKEN, set(), CLIP | {"clip_ratio_c": 3.0, "epsilon": 1e-8}),
    "dppo_tv": (TOKEN, set(), CLIP | {"clip_ratio_c": 3.0}),
    "dro": (TOKEN, set(), {}),
    "geo_mean": (SEQUENCE, set(), CLIP),
    "gpg": (TOKEN, set(), {}),
    "gspo": (SEQUENCE, set(), CLIP),
    "kl_cov": (PARTITION, WHOLE, {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0}),
    "m2po": (PARTITION, WHOLE, {"m2_threshold": 0.04}),
    "ppo_clip": (TOKEN, set(), CLIP | {"clip_ratio_c": 3.0}),
    "sapo": (TOKEN, set(), {"tau_pos": 1.0, "tau_neg": 1.05}),
}
PREFERENCES: Declared = {
    "dpo": (GROUP, set(), {"beta": 0.1, "label_smoothing": 0.0}),
    "ipo": (GROUP, set(), {"beta": 0.1}),
    "kto": (PARTITION, set(), {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}),
    "orpo": (GROUP, set(), {"beta": 0.1}),
    "simpo": (GROUP, set(), {"beta": 2.0, "gamma": 1.0}),
}
OBJECTIVES: Declared = {
    "forward_kl_topk": (TOKEN, set(), {"top_k": 64}),
    "jsd_topk": (TOKEN, set(), {"top_k": 64, "beta": 0.5}),
    "reverse_kl": (SEQUENCE, set(), {"discount": 0.0}),
}
DIVERGENCES: Declared = {
    name: (TOKEN, IN_REWARD if name in ("k1", "kl") else set(), {})
    for plain in ("abs", "k1", "k2", "k3", "kl", "low_var_kl", "mse")
    for name in (plain, f"{plain}+")
}
CONTROLLERS: Declared = {"adaptive": (PARTITION, set(), {}), "fixed": (TOKEN, set(), {})}


@pytest.mark.parametrize(
    ("registry", "declared"),
    [
        (ADVANTAGES, ESTIMATORS),
        (POLICY_LOSSES, LOSSES),
        (PREFERENCE_LOSSES, PREFERENCES),
        (DISTILLATIONS, OBJECTIVES),
        (KL_TYPES, DIVERGENCES),
        (KL_CONTROLLERS, CONTROLLERS),
    ],
)
def test_scope_facts_and_defaults(registry: Registry[Any], declared: Declared) -> None:
    own = [name for name in registry.names() if registry[name].target.__module__.startswith("tandem.")]
    found = {}
    for name in own:
        entry = registry[name]
        facts = {trait for trait, value in entry.traits.items() if value is True}
        defaults = {p.name: p.default for p in entry.signature.parameters.values() if not p.required}
        found[name] = (entry.scope, facts, defaults)
    assert found == declared


def test_a_correction_declares_the_widest_of_what_it_is_made_of() -> None:
    assert [Weighting(level).scope for level in ("token", "sequence")] == [TOKEN, SEQUENCE]
    assert {Weighting(level, normalize=True).scope for level in ("token", "sequence")} == {PARTITION}
    assert Weighting() == Weighting("token", cap=2.0, floor=None, normalize=False)
    assert [Rejection(name, 2.0).scope for name in ("token_k1", "seq_sum_k1")] == [TOKEN, SEQUENCE]
    assert Rejection("token_k1", quantile=0.5).scope is PARTITION
