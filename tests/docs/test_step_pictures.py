"""The pictures of a step are those that the script draws, of every stage and every mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.step_drawing import STEPS, draw

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("mode", STEPS)
def test_the_picture_in_the_docs_is_the_scripts(mode: str) -> None:
    assert (IMAGES / f"step_{mode}.svg").read_text("utf-8") == draw(mode)


def test_every_mode_is_drawn_with_every_part_of_a_step() -> None:
    assert set(STEPS) == {"colocate", "hybrid", "fully_async"}
    for mode, (_, lanes) in STEPS.items():
        labels = " ".join(box.label for lane in lanes for box in lane.boxes)
        assert all(word in labels for word in ("generate", "score", "ref", "values", "advantages", "train", "push")), (
            mode
        )
