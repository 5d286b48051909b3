"""Folders that look like a saved model from outside: what a plan reads of one."""

from __future__ import annotations

import json
from pathlib import Path

MODEL_CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}


def write_model(folder: Path, *, parameters: int = 0, **config: object) -> Path:
    """A config, a tokenizer with a chat template, and a file of weights that holds what its header claims."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_weights(folder / "model.safetensors", {"model.layers.0.mlp.weight": parameters} if parameters else {})
    return folder


def write_weights(file: Path, sizes: dict[str, int]) -> None:
    """A safetensors file of float16 numbers that are all 0."""
    header: dict[str, object] = {}
    end = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "F16", "shape": [size], "data_offsets": [end, end + 2 * size]}
        end += 2 * size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
