"""Whole runs on images: the digits example at reduced size."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tandem.config.load import load_words
from tandem.config.schema import SftConfig
from tandem.control.entry import run_sft
from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.e2e.seven import Run, equal, train

pytest.importorskip("sklearn")

DIGITS = Path(__file__).parents[2] / "examples" / "vision" / "digits"
SOURCE = str(DIGITS / "digits.py")


def make_model(folder: Path, **sizes: int) -> None:
    """Call the example's own function."""
    spec = importlib.util.spec_from_file_location("digits_make_model", DIGITS / "make_model.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make_model(folder, **sizes)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short warm-up of a smaller model."""
    folder = tmp_path_factory.mktemp("digits")
    make_model(folder / "fresh", hidden=64, layers=1)
    config = load_words(
        [
            str(DIGITS / "sft.yaml"),
            f"model.path={folder / 'fresh'}",
            f"data.source={{file: {SOURCE}, type: DigitsWithErrors, copies: 1}}",
            "data.train_batch_size=64",
            "optim.lr=0.003",
            "evaluation.interval=20",
            "evaluation.stop_at_accuracy=null",
            "trainer.total_steps=20",
            "trainer.logger=[]",
            f"trainer.output_dir={folder / 'sft'}",
        ],
        SftConfig,
    )
    assert run_sft(config) == 0
    return folder / "sft"


@pytest.fixture(scope="module")
def task(tuned: Path) -> Path:
    """The config of a few small steps from there."""
    tree = yaml.safe_load((DIGITS / "hybrid.yaml").read_text("utf-8"))
    tree["execution"] = {"mode": "colocate"}
    tree["actor_rollout_ref"]["model"] = {"path": str(tuned / "final")}
    tree["actor_rollout_ref"]["rollout"] = {"name": "hf", "n": 4}
    tree["data"] |= {"source": {"file": SOURCE, "type": "Digits", "rows": 40}, "train_batch_size": 4}
    tree["evaluation"] = {}
    tree["trainer"] = {"total_steps": 2, "logger": [], "exact": True}
    tree["runtime"] = {"torch_threads": 1, "threads": True}
    (tuned / "run.yaml").write_text(yaml.safe_dump(tree))
    return tuned / "run.yaml"


@pytest.fixture(scope="module")
def colocate(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(task, f"trainer.output_dir={tmp_path_factory.mktemp('colocate')}")


def test_fine_tuning_learns_what_images_show(tuned: Path) -> None:
    accuracy = [float(str(row["eval/accuracy"])) for row in read_rows(tuned / METRICS_FILE) if "eval/accuracy" in row]
    assert accuracy[-1] > 0.2  # one in ten by chance


def test_plain_transformers_loads_what_a_run_leaves(tuned: Path) -> None:
    final = tuned / "final"
    model = AutoModelForImageTextToText.from_pretrained(final)
    assert model.config.model_type == "qwen2_5_vl"
    assert AutoImageProcessor.from_pretrained(final, backend="pil").patch_size == 2
    assert json.loads((final / "config.json").read_text())["image_token_id"] == model.config.image_token_id


def test_a_group_shares_one_image_to_the_end_of_a_step(colocate: Run) -> None:
    trained = colocate.session.run.progress.trained
    assert trained is not None
    shown, groups = trained[0].non_tensor_batch["images"], trained[0].dense("group_ids")
    by_group: dict[int, Any] = {}
    for images, group in zip(shown, groups.tolist(), strict=True):
        assert by_group.setdefault(group, images) is images
    assert len(by_group) == 4 and len({id(images) for images in shown}) == 4


@pytest.mark.parametrize("mode", [["--hybrid", "--max-staleness", "0"], ["--fully-async", "--max-staleness", "0"]])
def test_all_modes_give_the_synchronous_run_bit_by_bit(
    task: Path, tmp_path: Path, colocate: Run, mode: list[str]
) -> None:
    run = train(task, *mode, f"trainer.output_dir={tmp_path}")
    assert equal(run.weights, colocate.weights)
    before = AutoModelForImageTextToText.from_pretrained(task.parent / "final").state_dict()
    moved = {name for name, weight in run.weights.items() if not torch.equal(weight, before[name])}
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)


def test_frozen_parts_stay_through_a_run(task: Path, tmp_path: Path) -> None:
    run = train(
        task, f"trainer.output_dir={tmp_path}", "trainer.total_steps=1",
        "actor_rollout_ref.model.freeze=[vision_tower, projector]",
    )  # fmt: skip
    before = AutoModelForImageTextToText.from_pretrained(task.parent / "final").state_dict()
    moved = {name for name, weight in run.weights.items() if not torch.equal(weight, before[name])}
    assert moved and not any("visual" in name for name in moved)
