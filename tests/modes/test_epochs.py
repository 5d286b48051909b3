"""B58: all modes draw the same prompts, by steps or by epochs, whichever ends first."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.seven import train

MODES = ("colocate", "hybrid", "fully_async")


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        (("trainer.total_epochs=2", "trainer.total_steps=null"), 5),
        (("trainer.total_epochs=2", "trainer.total_steps=3"), 3),
        (("trainer.total_epochs=2", "trainer.total_steps=9"), 5),
    ],
)
def test_b58_the_same_prompts_in_all_modes(task: Path, tmp_path: Path, limits: tuple[str, ...], steps: int) -> None:
    drawn = []
    for mode in MODES:
        words = (f"execution.mode={mode}", "data.train_batch_size=4", "trainer.rollouts_per_step=9", *limits)
        run = train(task, f"trainer.output_dir={tmp_path / mode}", *words)
        assert len(run.prompts) == steps
        drawn.append(Counter(prompt for step in run.prompts for prompt in step))
    assert drawn[0] == drawn[1] == drawn[2]
    assert sum(drawn[0].values()) == 4 * steps
    if steps == 5:
        assert drawn[0] == Counter({f"{digit}>": 2 for digit in range(10)})
