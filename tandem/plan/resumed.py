"""What a checkpoint says of the run that wrote it, for the plan of the run that goes on from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.base.hidden import hide_in
from tandem.base.regular import regular
from tandem.config.model import ModelConfig
from tandem.config.schema import Config, SftConfig
from tandem.plan.files.model import model_folder
from tandem.plan.parts.preference import learns_preferences
from tandem.plan.parts.stages import plan_base_tags, plan_tags
from tandem.stages.facts import REF

SETTINGS = "settings"
"""Under which the facts of a checkpoint have them."""

_SAMPLE = 1 << 20
_SAMPLED = 3
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


def settings_of(config: Config | SftConfig, updates: int | None) -> dict[str, Any]:
    """Return what a run writes into its checkpoints of itself: plain JSON, without secrets.

    ``kind`` is that of the run, ``keys`` every value of the config by its path, ``tags`` the copies of weights that are
    saved, ``model`` and ``tokenizer`` what their files are; ``updates`` is where its schedule ends.
    """
    return {
        "kind": kind_of(config),
        "keys": flat(config),
        "tags": saved_tags(config),
        "model": model_identity(config),
        "tokenizer": tokenizer_identity(config),
        "updates": updates,
    }


def kind_of(config: Config | SftConfig) -> str:
    """Return what is learned from."""
    if isinstance(config, SftConfig):
        return "examples"
    return "preferences" if learns_preferences(config) else "rewards"


def flat(config: Config | SftConfig) -> dict[str, Any]:
    """Return every value of the config by its dotted path, secrets hidden."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                walk(item, f"{path}.{name}" if path else str(name))
        else:
            found[path] = value

    walk(hide_in(config.model_dump(mode="json", by_alias=True)), "")
    return found


def saved_tags(config: Config | SftConfig) -> list[str]:
    """Return the tags whose weights a checkpoint has: a reference that is no adapter switched off."""
    if isinstance(config, SftConfig):
        return []
    return [tag for tag in plan_tags(config) if tag == REF and tag not in plan_base_tags(config)]


def model_identity(config: Config | SftConfig) -> dict[str, str] | None:
    """Map each file of the start model to what it is; None where its folder is not here.

    Of a large file: its size, and a checksum of its beginning, middle and end, which two trained models never share.
    """
    return _identity(model_of(config).path, (*_WEIGHTS, "config.json"))


def tokenizer_identity(config: Config | SftConfig) -> dict[str, str] | None:
    """Return the ``model_identity`` of the tokenizer's files."""
    return _identity(model_of(config).tokenizer, _TOKENIZERS)


def model_of(config: Config | SftConfig) -> ModelConfig:
    """Return the section of the model that is trained."""
    return config.model if isinstance(config, SftConfig) else config.actor_rollout_ref.model


def _identity(path: str, patterns: tuple[str, ...]) -> dict[str, str] | None:
    folder = model_folder(path)
    if folder is None:
        return None
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    try:
        return {file.name: _print(file) for file in files if file.is_file()}
    except OSError:
        return None


def _print(file: Path) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    with regular(file).open("rb") as handle:
        if size <= _SAMPLED * _SAMPLE:
            digest.update(handle.read())
        else:
            for place in (0, size // 2, size - _SAMPLE):
                handle.seek(place)
                digest.update(handle.read(_SAMPLE))
    return f"{size}:{digest.hexdigest()}"
