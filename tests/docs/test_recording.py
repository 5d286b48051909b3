"""The recording of the quickstart: what a terminal shows of what was written, and a picture that asks for nothing."""

from __future__ import annotations

import re
from pathlib import Path

from tools.recording import draw, lines_of, screens

SHOWN = Path(__file__).parents[2] / "docs" / "images" / "quickstart.svg"


def test_a_line_that_is_drawn_anew_takes_the_place_of_the_old_one() -> None:
    written = [(0.0, "one\r\n"), (1.0, "\r\x1b[2K\x1b[1mstep 1\x1b[0m of 2"), (2.0, "\r\x1b[2Kstep 2\r\nend")]
    assert [rows for _, rows in screens(written)] == [["one", ""], ["one", "step 1 of 2"], ["one", "step 2", "end"]]


def test_the_picture_says_everything_and_runs_and_loads_nothing() -> None:
    written = [[0.0, "<step> 1\r"], [10.0, "\x1b[2K<step> 2\r\n"]]
    commands = [{"command": "tandem train", "seconds": 10.0, "written": written}]
    gone = [(line.text, line.end is None) for line in lines_of(commands)]
    assert ("<step> 1", False) in gone and ("<step> 2", True) in gone and ("$ tandem train", True) in gone
    for picture in (draw(commands), SHOWN.read_text("utf-8")):
        assert not re.search(r"<script|@import|@font-face|url\(|href", picture)
        assert re.findall(r"https?://[^\"]*", picture) == ["http://www.w3.org/2000/svg"]
    assert "&lt;step&gt; 2" in draw(commands) and "$ tandem train examples/quickstart/hybrid.yaml" in SHOWN.read_text()
