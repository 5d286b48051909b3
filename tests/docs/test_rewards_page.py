"""The page about rewards names every built-in scorer, and every one of its own kind of parameters is a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.reward import resolve as _built_in  # noqa: F401  (registers the built-in scorers)
from tandem.reward.registry import REWARDS

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")
BUILT_IN = [name for name in REWARDS.names() if REWARDS[name].target.__module__.startswith("tandem.")]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_scorer_is_on_the_page(name: str) -> None:
    table = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert any(f"`{name}`" in first for first in table)
