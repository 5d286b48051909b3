"""Every estimator, loss and correction learns a bandit: over three seeds it beats its start by a stated margin."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config.schema import AlgorithmConfig
from tests.algorithms.bandit import START, Bandit, learned
from tests.algorithms.entries import ESTIMATORS, LOSSES

MARGIN = 0.35
"""Of expected reward: from 0.25 to 0.6 and more, of 1."""
PARAMETERS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.1}}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_learns(name: str) -> None:
    assert min(learned({"adv_estimator": name})) > MARGIN


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_learns(name: str) -> None:
    assert min(learned({"policy_loss": {"type": name, **PARAMETERS.get(name, {})}})) > MARGIN


@pytest.mark.parametrize("name", ["decoupled_ppo", "m2po", "ppo_clip", "gspo", "cispo"])
def test_losses_learn_from_stale_samples(name: str) -> None:
    assert min(learned({"policy_loss": {"type": name}}, stale=4)) > MARGIN


CORRECTIONS: dict[str, dict[str, Any]] = {
    "weights of tokens": {"weights": "token"},
    "weights of answers, normalised": {"weights": "sequence", "normalize": True, "cap": 3.0},
    "a band": {"weights": "token", "floor": 0.5, "cap": 2.0},
    "rejection by the geometric mean": {"reject": [{"by": "seq_mean_k1", "high": 1.5}]},
    "rejection by a quantile, and a veto": {"reject": [{"by": "token_k3", "quantile": 0.9}], "veto": 0.2},
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrected_stale_samples_are_learned_from(name: str) -> None:
    config = AlgorithmConfig.model_validate({"rollout_correction": CORRECTIONS[name]})
    for seed in range(3):
        bandit = Bandit(config, seed, stale=2)
        assert bandit.run(12) > START + MARGIN
        assert (bandit.rejected > 0) == ("reject" in CORRECTIONS[name])


@pytest.mark.parametrize("kind", ["k2", "k3", "k1+", "k3+", "abs+"])
def test_a_kl_in_the_loss_holds_the_policy_at_its_reference(kind: str) -> None:
    """Weak, it lets the policy learn; strong, it doesn't let it go."""
    for seed in range(3):
        weak, strong = (
            Bandit(AlgorithmConfig.model_validate({"kl": {"in": "loss", "type": kind, "coef": coef}}), seed)
            for coef in (0.01, 5.0)
        )
        assert weak.run(12) > START + MARGIN
        strong.run(12)
        assert strong.kl < 0.2 * weak.kl


def test_an_adaptive_kl_in_the_reward_rises_where_the_policy_leaves_its_target() -> None:
    kl = {"in": "reward", "type": "k1", "coef": 0.05, "controller": "adaptive", "target": 0.4, "horizon": 100}
    for seed in range(3):
        held = Bandit(AlgorithmConfig.model_validate({"kl": kl, "adv_estimator": "dr_grpo"}), seed)
        free = Bandit(AlgorithmConfig.model_validate({"adv_estimator": "dr_grpo"}), seed)
        assert held.run(30) > START + MARGIN
        free.run(30)
        assert held.metrics["kl/coef"] > 4 * 0.05  # it had to rise
        assert held.kl < 0.97 * free.kl
