"""The second table of docs/models.md is what the script finds, and has no third kind of cell."""

from __future__ import annotations

import pytest

from tools.families import TARGET
from tools.features import NO, SECTION, SHOWN, YES, line


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "mixtral", "idefics3"])
def test_the_page_says_what_goes_with_the_family(family: str) -> None:
    assert line(family) in TARGET.read_text("utf-8")


def test_every_cell_is_yes_or_refused() -> None:
    page = TARGET.read_text("utf-8")
    assert SECTION in page
    rows = [row.strip("|").split("|") for row in page.partition(SECTION)[2].splitlines()]
    assert [row[0].strip() for row in rows] == list(SHOWN) and len(rows) >= 16
    assert {cell.strip() for row in rows for cell in row[1:]} == {YES, NO}
