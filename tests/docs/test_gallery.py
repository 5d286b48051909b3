"""The gallery of the examples: drawn from what was recorded of runs, and from nothing else."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.view.runs import make_run
from tools import gallery

KEPT: dict[str, Any] = json.loads(gallery.RECORDED.read_text("utf-8"))


def test_the_page_and_its_drawings_are_those_of_the_recorded_curves() -> None:
    assert gallery.PAGE.read_text("utf-8") == gallery.page(KEPT)
    drawn = {path.name for path in gallery.IMAGES.glob("gallery_*.svg")}
    assert (
        drawn == {f"gallery_{name.replace('/', '_')}.svg" for name in KEPT} and KEPT.keys() <= gallery.EXAMPLES.keys()
    )
    for name, run in KEPT.items():
        text = (gallery.IMAGES / f"gallery_{name.replace('/', '_')}.svg").read_text("utf-8")
        assert text == gallery.drawing(name, run)
        ET.fromstring(text)  # a file of its own, in both schemes, that asks nobody
        assert "prefers-color-scheme: dark" in text and not re.search(r"(href|src|url\()", text)


def test_every_example_is_there_with_a_curve_or_without() -> None:
    text = gallery.PAGE.read_text("utf-8")
    for readme in (gallery.ROOT / "examples").rglob("README.md"):
        assert f"(../{readme.relative_to(gallery.ROOT).as_posix()})" in text
    for name in gallery.EXAMPLES:
        assert (gallery.ROOT / "examples" / f"{name}.yaml").is_file()


def test_a_run_is_recorded_with_its_curves_and_half_a_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "RECORDED", tmp_path / "gallery.json")
    gallery.record("quickstart/grpo", make_run(tmp_path / "run", steps=400, groups=1, n=2))
    (run,) = json.loads((tmp_path / "gallery.json").read_text()).values()
    assert run["steps"] == 400 and len(run["curves"]["reward/mean"]) <= gallery.MOST_POINTS
    first, *_, last = run["curves"]["reward/mean"]
    assert first[0] == 1 and last[0] >= 398 and first[1] > last[1]  # its only prompt's reward falls
    with pytest.raises(SystemExit, match="it did not finish"):
        gallery.record("quickstart/grpo", make_run(tmp_path / "other", steps=1, ended=False))
