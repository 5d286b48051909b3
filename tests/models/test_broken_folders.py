"""Folders that hold no whole model are refused with the folder and the cause, whatever transformers raises for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tandem.base.errors import DataError
from tandem.models.loading import load_causal_lm, load_model
from tests.e2e.seven import make_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model."""
    make_task(tmp_path)
    return tmp_path / "model"


def edit_config(folder: Path, **changes: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def drop_one(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (cut_weights, "could not be read"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "could not be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "could not be read"),
    "unknown architecture": (lambda f: edit_config(f, model_type="nonesuch"), "could not be read"),
    "another width": (lambda f: edit_config(f, hidden_size=32), "could not be read"),
    "more layers": (lambda f: edit_config(f, num_hidden_layers=3), "9 weights .*model.layers.2"),
    "a weight short": (drop_one, "1 weights .*'model.layers.1.mlp.up_proj.weight'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_named_and_never_filled_up_with_random_weights(folder: Path, kind: str) -> None:
    break_it, cause = BROKEN[kind]
    break_it(folder)
    for load in (load_model, load_causal_lm):
        with pytest.raises(DataError, match=cause) as error:
            load(folder)
        assert str(folder) in str(error.value)
