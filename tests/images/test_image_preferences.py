"""Preferences over answers to prompts that show images: only the image tells which answer is better."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
import yaml

from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.control.preferences import train_preferences
from tandem.data.pictures import Budget, Sight
from tandem.data.preferences import Lengths, PreferenceColumns, PreferenceEncoder
from tandem.data.prompts import PromptColumns
from tandem.data.rows import Row
from tandem.models.tokenizer import load_tokenizer
from tandem.models.vision.image_reader import ImageReader
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tandem.roles.preferences import as_groups, mismatched
from tandem.session.preferences import build_preference_session
from tests.images.folders import png, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("preferences") / "model", "qwen2_5_vl")


def encoder(model: Path) -> PreferenceEncoder:
    sight = Sight(ImageReader(model), Budget(10_000, 10_000), "image")
    columns = PreferenceColumns(PromptColumns(chat=True))
    return PreferenceEncoder(load_tokenizer(str(model)), columns, Lengths(64, 8), sight)


def test_answers_follow_the_expanded_prompt_and_share_its_images(model: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(0)).decode()
    asked = {"role": "user", "content": [{"type": "image", "image": url}, {"type": "text", "text": "which?"}]}
    talks = {key: [asked, {"role": "assistant", "content": key[:1]}] for key in ("chosen", "rejected")}
    rows = [
        {"prompt": "which?", "image": png(0), "chosen": "c", "rejected": "r"},
        {"prompt": "", "image": None, **talks},
        {"prompt": "which?", "image": None, "chosen": "c", "rejected": "r"},
    ]
    encode = encoder(model)
    found = []
    for number, values in enumerate(rows):
        row = Row("rows.jsonl", number, values)
        found.append(encode.preference(0, row, encode.render(row)))
    assert found[0].prompt_ids == found[1].prompt_ids != found[2].prompt_ids
    assert [list(answer.ids) for answer in found[0].answers] == [list(answer.ids) for answer in found[2].answers]
    batch = as_groups(found)
    shown = batch.non_tensor_batch["images"]
    assert shown[0] is shown[1] and shown[2] is shown[3] and shown[0] == shown[2] and shown[4] is shown[5] is None
    assert mismatched(batch).non_tensor_batch["images"] == shown


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_run_learns_which_answer_an_image_wants(model: Path, tmp_path: Path, loss: str) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "which?", "image": {"bytes": png(i), "path": None}, "chosen": "ab"[i % 2], "rejected": "ba"[i % 2]}
        for i in range(4)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "same.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes())
    tree = {
        "actor_rollout_ref": {"model": {"path": str(model)}, "actor": {"optim": {"lr": 3.0e-3}}},
        "algorithm": {"policy_loss": {"type": loss}},
        "data": {
            "train_files": [str(tmp_path / "rows.parquet")],
            "val_files": [str(tmp_path / "same.parquet")],
            "drop_val_prompts": False,
            "image_key": "image",
            "chat": True,
            "train_batch_size": 4,
            "max_prompt_length": 32,
            "max_response_length": 4,
        },
        "evaluation": {"interval": 12},
        "trainer": {"total_steps": 12, "total_epochs": 12, "logger": [], "output_dir": str(tmp_path / "run")},
        "runtime": {"torch_threads": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_words([str(tmp_path / "run.yaml")], Config)
    session = build_preference_session(config, compile_plan(config))
    with session.run.running():
        train_preferences(session)
    evaluated = [row for row in read_rows(tmp_path / "run" / METRICS_FILE) if "eval/accuracy" in row]
    assert float(str(evaluated[-1]["eval/accuracy"])) == 1.0
