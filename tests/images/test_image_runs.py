"""Whole runs on images: the digits example at reduced size."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tandem.config.load import load_words
from tandem.config.schema import SftConfig
from tandem.control.entry import run_sft
from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.e2e.seven import Run, equal, train

DIGITS = Path(__file__).parents[2] / "examples" / "vision" / "digits"


def example(name: str) -> Any:
    """A module of the example."""
    spec = importlib.util.spec_from_file_location(f"digits_{name}", DIGITS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(answers: str = "01234567") -> list[dict[str, Any]]:
    """Questions of one text, whose answers only their images tell; in the form that ``datasets`` writes images."""
    shades = np.random.default_rng(0).integers(0, 255, (len(answers), 8, 8), np.uint8)
    found = []
    for shade, answer in zip(shades, answers, strict=True):
        written = io.BytesIO()
        Image.fromarray(shade).save(written, "PNG")
        shown = [{"bytes": written.getvalue(), "path": None}]
        found.append({"prompt": "<image>digit?", "images": shown, "answer": answer, "response": answer})
    return found


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short warm-up of a smaller model."""
    folder = tmp_path_factory.mktemp("digits")
    example("make_model").make_model(folder / "fresh", hidden=64, layers=1)
    parquet.write_table(pyarrow.Table.from_pylist(rows()), folder / "rows.parquet")
    tree = yaml.safe_load((DIGITS / "sft.yaml").read_text("utf-8"))
    tree["model"]["path"] = str(folder / "fresh")
    tree["data"] |= {"train_files": [str(folder / "rows.parquet")], "train_batch_size": 8}
    del tree["data"]["source"]
    (folder / "same.parquet").write_bytes((folder / "rows.parquet").read_bytes())
    tree["data"]["val_files"] = [str(folder / "same.parquet")]
    tree["optim"] = {"lr": 3.0e-3}
    tree["evaluation"] = {"interval": 20, "stop_at_accuracy": 0.75}
    tree["trainer"] = {"total_steps": 200, "total_epochs": 200, "logger": [], "output_dir": str(folder / "sft")}
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))
    assert run_sft(load_words([str(folder / "sft.yaml")], SftConfig)) == 0
    return folder / "sft"


@pytest.fixture(scope="module")
def task(tuned: Path) -> Path:
    """The config of a few small steps from there."""
    tree = yaml.safe_load((DIGITS / "hybrid.yaml").read_text("utf-8"))
    tree["execution"] = {"mode": "colocate"}
    tree["actor_rollout_ref"]["model"] = {"path": str(tuned / "final")}
    tree["actor_rollout_ref"]["rollout"] = {"name": "hf", "n": 4}
    tree["data"] |= {"train_files": [str(tuned.parent / "rows.parquet")], "train_batch_size": 4}
    del tree["data"]["source"]
    tree["evaluation"] = {}
    tree["trainer"] = {"total_steps": 2, "total_epochs": 2, "logger": [], "exact": True}
    tree["runtime"] = {"torch_threads": 1, "threads": True}
    (tuned / "run.yaml").write_text(yaml.safe_dump(tree))
    return tuned / "run.yaml"


@pytest.fixture(scope="module")
def colocate(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(task, f"trainer.output_dir={tmp_path_factory.mktemp('colocate')}")


def test_fine_tuning_learns_what_images_show(tuned: Path) -> None:
    accuracy = [float(str(row["eval/accuracy"])) for row in read_rows(tuned / METRICS_FILE) if "eval/accuracy" in row]
    assert accuracy[-1] >= 0.75  # one in eight by chance: the texts are equal


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


def test_two_images_in_a_prompt_are_trained_on(task: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    rows = example("digits").Larger(pairs=8, held_out=2).get_train_dataset()
    assert all(len(set(row["images"])) == 2 and row["prompt"].count("<image>") == 2 for row in rows)
    known = {row["images"][0]: row["answer"] for row in example("digits").Digits().get_train_dataset()}
    assert all(row["answer"] == max(known[image] for image in row["images"]) for row in rows)
    words = (f"data.source={{file: {DIGITS / 'digits.py'}, type: Larger, pairs: 8}}", "data.train_files=[]")
    run = train(task, *words, f"trainer.output_dir={tmp_path}", "trainer.total_steps=1")
    trained = run.session.run.progress.trained
    assert trained is not None and all(len(images.grid) == 2 for images in trained[0].non_tensor_batch["images"])
    assert run.column("mismatch/abs")[0] < 1e-5
    larger = yaml.safe_load((DIGITS / "larger.yaml").read_text("utf-8"))
    begun = yaml.safe_load((DIGITS / "hybrid.yaml").read_text("utf-8"))["trainer"]["output_dir"]
    assert larger["actor_rollout_ref"]["model"]["path"] == f"{begun}/final"


def test_the_example_has_real_digits_and_a_poor_teacher() -> None:
    pytest.importorskip("sklearn")
    digits = example("digits")
    found = digits.Digits()
    assert (len(found.get_train_dataset()), len(found.get_val_dataset())) == (1500, 297)
    (image,) = found.get_train_dataset()[0]["images"]
    assert Image.open(io.BytesIO(image)).size == (8, 8)
    taught = digits.DigitsWithErrors(copies=1).get_train_dataset()
    assert 0.5 < sum(row["response"] == row["answer"] for row in taught) / len(taught) < 0.6
