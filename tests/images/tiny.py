"""Tiny image models with random weights, and prompts that show images."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from tandem.columns.images import Images
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm, new_model
from tools.image_shapes import END, IMAGE, MERGED, PATCH, START, shape

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
PACKED = FAMILIES[:3]
"""Those whose documents stand in one row on a CPU too."""


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
