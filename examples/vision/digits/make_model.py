"""A fresh model of the shape of Qwen2.5-VL, small enough for a laptop: weights, tokenizer and image processor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer

MARKS = {"start": "<|vision_start|>", "image": "<|image_pad|>", "end": "<|vision_end|>"}
TEMPLATE = (
    "{%- for m in messages -%}{%- if m['role'] == 'assistant' -%}{{ '>' + m['content'] + '\\n' }}"
    "{%- elif m['content'] is string -%}{{ m['content'] }}{%- else -%}{%- for part in m['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '" + "".join(MARKS.values()) + "' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '>' }}{%- endif -%}"
)
PATCH = 2  # pixels; four patches become one token, so that a digit has four


def make_model(folder: Path, *, hidden: int = 128, layers: int = 4, seed: int = 0) -> None:
    """Write the model into ``folder``."""
    tokenizer = character_tokenizer("\n0123456789>?abcdefghijklmnopqrstuvwxyz ", eos="\n", pad=None)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS.values())})
    tokenizer.chat_template = TEMPLATE
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    model = new_model(shape(len(tokenizer), ids, tokenizer.eos_token_id, hidden, layers), seed=seed)
    save_pretrained_atomic(model, tokenizer, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2), "utf-8")


def shape(tokens: int, ids: dict[str, Any], end: Any, hidden: int, layers: int) -> dict[str, Any]:
    """What its ``config.json`` holds; weights start with the spread of ``nn.Linear``'s own initialisation."""
    heads, spread = hidden // 32, (3 * hidden) ** -0.5
    text = {
        "vocab_size": tokens,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3 // 8 * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 256,
        "initializer_range": spread,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 2,
        "hidden_size": hidden // 2,
        "intermediate_size": hidden,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [0, 1],
        "out_hidden_size": hidden,
        "initializer_range": (3 * hidden // 2) ** -0.5,
    }
    return {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
        "initializer_range": spread,
        "image_token_id": ids["image"],
        "vision_start_token_id": ids["start"],
        "vision_end_token_id": ids["end"],
    }


PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 1,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""An image keeps its size, in multiples of 4 pixels."""


if __name__ == "__main__":
    make_model(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vision/digits/fresh"))
