"""Imports every module that registers a built-in scorer."""

from __future__ import annotations

from tandem.reward import combined, judge, mathematics, programs, questions, reward_model, scorers

__all__ = ["combined", "judge", "mathematics", "programs", "questions", "reward_model", "scorers"]
