"""Tiny image models with random weights, and prompts that show images."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.columns.images import Images
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm, new_model

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
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


def plain_model(family: str) -> PreTrainedModel:
    """A model whose distributions are far from uniform, and whose images matter."""
    model = new_model(shape(family), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    return model


@functools.cache
def model(family: str) -> CausalLM:
    """One for all tests that leave its weights alone."""
    return as_causal_lm(plain_model(family))


def picture(*sides: tuple[int, int], seed: int = 0) -> Images:
    """Images of noise, of so many patches in height and width."""
    grid = torch.tensor([[1, *one] for one in sides])
    generator = torch.Generator().manual_seed(seed)
    return Images(torch.randn(int(grid.prod(-1).sum()), PATCH, generator=generator), grid)


def prompt(images: Images | None, text: list[int]) -> list[int]:
    """The first token of the text, the images, and the rest of the text."""
    shown: list[int] = []
    for one in () if images is None else images.grid:
        shown += [START, *[IMAGE] * (int(one.prod()) // MERGED**2), END]
    return [text[0], *shown, *text[1:]]


@torch.no_grad()
def plain_logprobs(plain: Any, ids: list[int], images: Images | None, answer: list[int]) -> torch.Tensor:
    """What plain transformers gives for the tokens of an answer, as its documentation calls it."""
    row = torch.tensor([ids + answer])
    shown = {} if images is None else {"pixel_values": images.pixels, "image_grid_thw": images.grid}
    pictured = {} if images is None else {"mm_token_type_ids": (row == IMAGE).int()}
    logits = plain(input_ids=row, use_cache=False, **shown, **pictured).logits[0].log_softmax(-1)
    return logits[len(ids) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]
