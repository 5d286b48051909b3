"""Bad images and models that can't see them, through the commands: refused before any model is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
import yaml
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.models import loading
from tests.images.folders import png, write_model
from tests.plan.folders import MODEL_CONFIG
from tests.plan.folders import write_model as write_text_model

IMAGE = {"bytes": png(0), "path": None}
LARGE = {"bytes": png(0, (64, 32)), "path": None}
PART = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "sees", "qwen2_5_vl")
    write_model(folder / "blind", "qwen3_5")
    (folder / "blind" / "preprocessor_config.json").unlink()
    write_text_model(folder / "text", **MODEL_CONFIG)
    return folder


def rows_with(**changes: object) -> list[dict[str, Any]]:
    """Good rows, but for the last one."""
    good = {"prompt": "<image>what?", "image": IMAGE, "answer": "7", "response": "7"}
    return [good] * 7 + [{**good, **changes}]


Case = tuple[str, list[dict[str, Any]], list[str], str]
CASES: dict[str, Case] = {
    "an image column without an image model": (
        *("text", rows_with(), ["data.image_key=image"]),
        "data.image_key = 'image': images need a model that sees them, and {model}.path is of the family llama",
    ),
    "an image column that nobody names": (
        *("text", rows_with(), []),
        "models are trained on text alone",
    ),
    "more places than images": (
        *("sees", rows_with(prompt="<image>or<image>?"), ["data.image_key=image"]),
        "row 8: the messages have places for 2 images, and the column 'image' has 1",
    ),
    "an image larger than the budget": (
        *("sees", rows_with(image=LARGE), ["data.image_key=image", "data.image_max_pixels=2000"]),
        "row 8: an image of 64 × 32 = 2048 pixels is larger than data.image_max_pixels = 2000",
    ),
    "a file larger than the budget": (
        *("sees", rows_with(), ["data.image_key=image", "data.image_max_bytes=20"]),
        "larger than data.image_max_bytes = 20",
    ),
    "a broken image": (
        *("sees", rows_with(image={"bytes": b"no image", "path": None}), ["data.image_key=image"]),
        "row 8: an image can't be decoded",
    ),
    "a missing image": (
        *("sees", rows_with(image={"bytes": None, "path": "gone.png"}), ["data.image_key=image"]),
        "row 8: the image",
    ),
    "a text model with image parts": (
        *("text", [{"prompt": PART, "answer": "7", "response": "7"}] * 8, []),
        "messages with a part of the type image in the column prompt",
    ),
    "a processor folder that is missing": (
        *("blind", rows_with(), ["data.image_key=image"]),
        "the model sees images, and its folder has no preprocessor_config.json",
    ),
}


@pytest.mark.parametrize("kind", ["train", "sft"])
@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_a_command_before_a_model_is_loaded(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kind: str
) -> None:
    model, rows, words, said = CASES[case]
    if isinstance(rows[0]["prompt"], str):
        parquet.write_table(pyarrow.Table.from_pylist(rows), file := tmp_path / "rows.parquet")
    else:
        (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    part = {"path": str(models / model)}
    tree: dict[str, Any] = {
        "model" if kind == "sft" else "actor_rollout_ref": part if kind == "sft" else {"model": part},
        "data": {"train_files": [str(file)], "chat": isinstance(rows[0]["prompt"], str), "train_batch_size": 2},
        "trainer": {"total_steps": 1, "logger": [], "output_dir": str(tmp_path / "run")},
    }
    if kind == "train":
        tree["data"] |= {"answer_key": "answer", "max_prompt_length": 64, "max_response_length": 4}
        tree["reward_manager"] = {"type": "exact"}
    else:
        tree["data"] |= {"max_length": 64}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    loads: list[object] = []
    never: Callable[..., Any] = lambda *args, **options: loads.append(args)  # noqa: E731
    monkeypatch.setattr(loading, "from_pretrained", never)
    result = CliRunner().invoke(app, [kind, str(tmp_path / "run.yaml"), *words], env={"COLUMNS": "1000"})
    named = "model" if kind == "sft" else "actor_rollout_ref.model"
    assert result.exit_code != 0 and not loads
    assert said.format(model=named) in " ".join(result.output.split())
