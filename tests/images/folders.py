"""Folders of tiny image models, with all that a run reads of one: weights, tokenizer, chat template, processor."""

from __future__ import annotations

import io
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer
from tools.image_shapes import MERGED, shape

MARKS = {
    "vision_start_token_id": "<|start|>",
    "image_token_id": "<|image|>",
    "vision_end_token_id": "<|end|>",
    "video_token_id": "<|video|>",
}
TEMPLATE = (
    "{%- for m in messages -%}{%- if m['content'] is string -%}{{ m['content'] }}{%- else -%}"
    "{%- for part in m['content'] -%}{%- if part['type'] == 'image' -%}{{ '"
    + "".join(list(MARKS.values())[:3])
    + "' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- if m['role'] == 'assistant' -%}"
    "{{ '\\n' }}{%- else -%}{{ '>' }}{%- endif -%}{%- endfor -%}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": MERGED,
    "temporal_patch_size": 1,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a tiny random model of the family; an image token is 8 × 8 pixels."""
    tokenizer = character_tokenizer(string.printable, eos="\n", pad=None)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    tokenizer.chat_template = TEMPLATE
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    made = shape(family, len(tokenizer)) | ids
    made["text_config"] |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    save_pretrained_atomic(new_model(made, seed=seed), tokenizer, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def png(seed: int, side: tuple[int, int] = (16, 8)) -> bytes:
    """The file of an image of noise, of ``side`` (width, height) pixels."""
    shades = np.random.default_rng(seed).integers(0, 255, (side[1], side[0]), np.uint8)
    written = io.BytesIO()
    Image.fromarray(shades).save(written, "PNG")
    return written.getvalue()
