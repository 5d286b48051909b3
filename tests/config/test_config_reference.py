"""The reference page says what the schema says."""

from __future__ import annotations

from pathlib import Path

from tandem.config.reference import reference
from tandem.config.schema import Config, SftConfig
from tandem.config.tree import paths_of

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_in_the_repository_is_current() -> None:
    assert PAGE.read_text("utf-8") == reference(), "run `python -m tandem.config.reference`"


def test_every_leaf_is_on_the_page() -> None:
    text = reference()
    missing = [
        path
        for root in (Config, SftConfig)
        for path, f in paths_of(root).items()
        if not f.nodes and f"| `{path}` |" not in text
    ]
    assert missing == []


def test_a_default_that_a_parent_sets_is_the_one_shown() -> None:
    assert "| `critic.optim.lr` | number > 0 and <= 10 | `1e-05` |" in reference()
    assert "| `actor_rollout_ref.actor.optim.lr` | number > 0 and <= 10 | `1e-06` |" in reference()
