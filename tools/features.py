"""What goes with which family of models, tried with tiny random ones: the second table of ``docs/models.md``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tandem.base.errors import TandemError
from tandem.models.families import IMAGE_FAMILIES, SPLIT
from tandem.models.loading import as_causal_lm, load_model, new_model, save_pretrained_atomic
from tandem.models.lora import get_lora_model
from tandem.models.megatron import fault_for_megatron
from tandem.models.probe import prove
from tools.families import build
from tools.image_shapes import shape

TEXT = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "gemma3_text", "glm4", "granite", "smollm3"),
    *("starcoder2", "gpt2", "deepseek_v3", "qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_text"),
)
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
STRANGERS = ("idefics3", "smolvlm", "llava", "internvl", "mistral3", "qwen3_vl_moe")
"""Families that see and that nothing is known of: a plan refuses the model itself, by name."""

SHOWN = (*TEXT, *SEEING, *STRANGERS)
YES, NO = "✓", "refused"

SECTION = """
## What goes with them

Tried by the same script with the same models. A cell is ✓ or refused by name in a plan, before a model is loaded.

- **images**: prompts that show some give what plain transformers gives; a language model has none, and
  `data.image_key` is refused.
- **LoRA**: adapters on all linear modules of the language part train along a route that equals plain transformers.
- **TP**: `actor.tensor_model_parallel_size`; how layers of other families are split is not known (equality on two
  ranks: `tests/train`).
- **Megatron**: `actor.strategy: megatron`; which weight of another family is which is not known (`tests/train`).
- **export**: plain transformers loads what is saved, with the same weights.

| family | images | LoRA | TP | Megatron | export |
| --- | --- | --- | --- | --- | --- |
"""


def tiny_model(family: str) -> PreTrainedModel:
    """The tiny random model of a family, always the same."""
    return new_model(shape(family), seed=0) if family in IMAGE_FAMILIES else build(family)


def cells(family: str) -> list[str]:
    """What becomes of each feature with the family."""
    if family in STRANGERS:
        return [NO] * 5
    megatron = fault_for_megatron(tiny_model(family).config.to_dict()) is None
    found = [_tried(check, family) for check in (_sees, _adapts)]
    return [*found, _word(family in SPLIT), _word(megatron), _tried(_exports, family)]


def line(family: str) -> str:
    """A row of the table."""
    return f"| {' | '.join([family, *cells(family)])} |\n"


def section() -> str:
    """The whole section."""
    return SECTION + "".join(line(family) for family in SHOWN)


def _word(works: bool) -> str:
    return YES if works else NO


def _tried(check: Callable[[str], bool], family: str) -> str:
    try:
        return _word(check(family))
    except TandemError:
        return NO


def _sees(family: str) -> bool:
    """Prove the model, which shows it an image if it is known to see."""
    model = as_causal_lm(tiny_model(family))
    prove(model, "training")
    return model.vision is not None


def _adapts(family: str) -> bool:
    prove(as_causal_lm(get_lora_model(tiny_model(family), 2)), "training")
    return True


def _exports(family: str) -> bool:
    model = tiny_model(family)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained_atomic(model, None, Path(folder) / "saved")
        loaded = load_model(Path(folder) / "saved").state_dict()
    return all(torch.equal(weight, loaded[name]) for name, weight in model.state_dict().items())
