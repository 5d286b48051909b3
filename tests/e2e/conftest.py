"""One tiny model and its task for all end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests.e2e.seven import Run, make_task, train, write_rows


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of the ``7>`` task."""
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    return make_task(tmp_path_factory.mktemp("seven"))


@pytest.fixture(scope="session")
def learned(task: Path) -> Run:
    """The whole task once, with everything on that must not disturb it."""
    held_out = write_rows(task.parent / "val.jsonl", [{"prompt": f"{d}>", "answer": str(d) * 4} for d in (3, 8)])
    return train(
        task,
        f"trainer.output_dir={task.parent / 'learned'}",
        f"data.val_files=[{held_out}]",
        "data.drop_val_prompts=false",
        "evaluation.interval=20",
        "evaluation.at_start=true",
        "evaluation.temperature=0.5",
        "evaluation.n=4",
        "evaluation.k=[1, 4]",
        "trainer.save_interval=10",
        "trainer.keep_checkpoints=9",
        "trainer.rollouts_per_step=16",
        "trainer.logger=[tensorboard]",
        "trainer.trace=true",
    )
