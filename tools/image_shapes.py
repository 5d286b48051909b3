"""Configs of tiny models that see images, by family."""

from __future__ import annotations

from typing import Any

VOCABULARY = 40
START, END, IMAGE = 35, 36, 37
MERGED, PATCH = 2, 48  # patches on a side that become one token; numbers in a patch: 3 colours of 4 × 4

_VISION = {"patch_size": 4, "spatial_merge_size": MERGED, "temporal_patch_size": 1, "num_heads": 2, "depth": 2}
_OWN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
    "qwen3_5": {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 16},
}


def shape(family: str, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """What the ``config.json`` of a tiny model of the family holds."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "rope_parameters": rope,
    }
    if family == "qwen3_vl":
        text |= {"head_dim": 8, "rope_parameters": {**rope, "mrope_interleaved": True}}
    if family == "qwen3_5":
        text |= {
            "head_dim": 16,
            "rope_parameters": {**rope, "mrope_interleaved": True, "partial_rotary_factor": 0.5},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        }
    return {
        "model_type": family,
        "text_config": text,
        "vision_config": {**_VISION, **_OWN[family]},
        "tie_word_embeddings": False,
        "image_token_id": IMAGE,
        "video_token_id": 38,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
