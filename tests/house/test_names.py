"""Names are the field's terms: what a thing is called elsewhere, or what it does."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

TANDEM = Path(__file__).parents[2] / "tandem"
HOME_MADE = {
    "answering": "monitored, probed: what it is asked for",
    "bequeath": "release tickets",
    "bury": "handle death",
    "crew": "rollout workers",
    "deal": "shard",
    "dealt": "shard",
    "fleet": "engine pool",
    "hire": "restart",
    "keeper": "gate",
    "mortal": "supervised",
    "occupancy": "utilization",
    "shelf": "group storage",
    "slab": "column",
    "tell": "report, warn, print or answer, by what it does",
    "telling": "stall warning",
    "told": "report, metrics, message, note, by what it is",
}
"""Words that names once had, and what to write instead."""

OF_PYTHON = {("base/manifest.py", "tell")}
"""The position in an open file."""


def words(name: str) -> set[str]:
    """Those of a name: ``SharedRollout`` has shared and rollout."""
    return set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower()))


def names(source: str) -> set[str]:
    return {
        token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME
    }


@pytest.mark.parametrize("name", ["rows_told", "_fleet", "GateKeeper", "tell", "MortalEngine"])
def test_a_home_made_word_is_seen(name: str) -> None:
    assert words(name) & HOME_MADE.keys()


def test_no_name_is_home_made() -> None:
    found = {
        f"{file.relative_to(TANDEM)}: {name}": [HOME_MADE[word] for word in sorted(words(name) & HOME_MADE.keys())]
        for file in sorted(TANDEM.rglob("*.py"))
        for name in names(file.read_text("utf-8"))
        if words(name) & HOME_MADE.keys() and (str(file.relative_to(TANDEM)), name) not in OF_PYTHON
    }
    assert found == {}
