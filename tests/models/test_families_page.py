"""docs/models.md is what the script finds: tried on one family of each route."""

from __future__ import annotations

import pytest

from tools.families import TARGET, line, look


@pytest.mark.parametrize("family", ["llama", "falcon", "lfm2"])
def test_the_page_says_what_becomes_of_the_family(family: str) -> None:
    assert line(look(family)) in TARGET.read_text("utf-8")
