"""What an image costs beside its tokens, by the config of its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tandem.config.schema import Config
from tandem.plan.checks.model.images import shows_images
from tandem.plan.files.model import model_folder, read_model


def patch_tokens(config: Config) -> float:
    """Return how many tokens take as long as a patch of an image: products of a patch with the weights of the image
    tower by those of a token with the language model's; 0 for a run on text.
    """
    folder = model_folder(config.actor_rollout_ref.model.path)
    if folder is None or not (folder / "config.json").is_file():
        return 0.0
    facts = read_model(folder)
    if not shows_images(config, facts):
        return 0.0
    vision: Mapping[str, Any] = json.loads((folder / "config.json").read_text("utf-8")).get("vision_config") or {}
    hidden, layers, heads, dim = facts.hidden or 0, facts.layers or 0, facts.heads or 0, facts.head_dim or 0
    attention = 2 * hidden * dim * (heads + (facts.kv_heads or heads))
    token = layers * (attention + 3 * hidden * (facts.inside or 0)) + hidden * (facts.vocabulary or 0)
    width = int(vision.get("embed_dim") or vision.get("hidden_size") or 0)
    inside = int(vision.get("intermediate_size") or width * int(vision.get("mlp_ratio") or 0))
    patch = int(vision.get("depth") or 0) * (4 * width**2 + 2 * width * inside)
    return patch / token if token else 0.0
