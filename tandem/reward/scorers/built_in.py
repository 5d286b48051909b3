"""Imports every module that registers a built-in scorer."""

from __future__ import annotations

from tandem.reward import combined
from tandem.reward.scorers import judge, mathematics, programs, questions, reward_model, rules

__all__ = ["combined", "judge", "mathematics", "programs", "questions", "reward_model", "rules"]
