"""Whole runs of Qwen3.5 on images: linear attention, positions on three axes and images together."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText

from tests.e2e.seven import equal, train
from tests.images.folders import png, write_model


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_5")
    rows = [
        {"problem": "which digit", "image": {"bytes": png(i, (8 * (1 + i % 2), 8)), "path": None}, "solution": str(i)}
        for i in range(8)
    ]
    rows[3]["image"] = None
    (folder / "scorer.py").write_text("def early(response):\n    return sum(map(ord, response)) % 5 / 5\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    tree = {
        "execution": {"mode": "colocate"},
        "actor_rollout_ref": {
            "model": {"path": str(write_model(folder / "model", "qwen3_5"))},
            "actor": {"optim": {"lr": 1.0e-3}},
            "rollout": {"name": "hf", "n": 2},
        },
        "algorithm": {"adv_estimator": {"type": "grpo", "norm_adv_by_std": False}, "kl": {"in": "loss", "coef": 0.01}},
        "reward_manager": {"type": "early", "file": str(folder / "scorer.py")},
        "data": {
            "train_files": [str(folder / "rows.parquet")],
            "prompt_key": "problem",
            "answer_key": "solution",
            "image_key": "image",
            "chat": True,
            "train_batch_size": 4,
            "max_prompt_length": 32,
            "max_response_length": 2,
        },
        "trainer": {"total_steps": 2, "logger": [], "exact": True},
        "runtime": {"torch_threads": 1, "threads": True},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def test_hybrid_without_staleness_is_the_synchronous_run_bit_by_bit(task: Path, tmp_path: Path) -> None:
    colocate = train(task, f"trainer.output_dir={tmp_path / 'colocate'}")
    hybrid = train(task, "--hybrid", "--max-staleness", "0", f"trainer.output_dir={tmp_path / 'hybrid'}")
    assert equal(hybrid.weights, colocate.weights)
    before = AutoModelForImageTextToText.from_pretrained(task.parent / "model").state_dict()
    moved = {name for name, weight in hybrid.weights.items() if not torch.equal(weight, before[name])}
    assert any("visual" in name for name in moved) and any("linear_attn" in name for name in moved)
    # What the engine drew, and what the trainer says of the same tokens under the same weights.
    assert max(hybrid.column("mismatch/abs"), default=1.0) < 1e-5


def test_a_run_goes_on_from_a_checkpoint_with_the_images_of_its_rows(task: Path, tmp_path: Path) -> None:
    """A checkpoint has where the data stand: no pixel, and images are read again from the rows."""
    whole = train(task, f"trainer.output_dir={tmp_path / 'whole'}")
    words = (f"trainer.output_dir={tmp_path / 'run'}", "trainer.save_interval=1")
    train(task, *words, "trainer.total_steps=1")
    assert equal(train(task, *words, "trainer.resume=auto").weights, whole.weights)
