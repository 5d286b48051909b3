"""Imports every module that registers a built-in scorer."""

from __future__ import annotations

from tandem.reward import combined, mathematics, programs, questions, scorers

__all__ = ["combined", "mathematics", "programs", "questions", "scorers"]
