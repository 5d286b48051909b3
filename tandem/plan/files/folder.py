"""What the files of a model's folder say of its tokenizer, read without loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.base.regular import irregular_in, regular
from tandem.config.model import ModelConfig
from tandem.models.tokenizer import PLAIN_CLASSES

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "tekken.json",
    "*.tiktoken",
    "tokenization_*.py",
)
"""Files of which one is there where a folder has a tokenizer."""


_DESCRIBING = frozenset(
    {
        *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
        *("video_preprocessor_config.json", "README.md"),
    }
)
"""Files that describe a model and hold none."""


def describes_alone(model: ModelConfig) -> bool:
    """Return whether the model's folder holds its config and nothing that could be run: no weights, no tokenizer."""
    folder = Path(model.path).expanduser()
    if not model.path or model.tokenizer_path is not None or not (folder / "config.json").is_file():
        return False
    return {file.name for file in folder.iterdir()} <= _DESCRIBING


@dataclass(frozen=True)
class TokenizerFacts:
    """``chat_template``: whether there is one. ``ends``: whether any token ends an answer; None where files don't say.

    ``fault``: what keeps it from being loaded, if anything.
    """

    chat_template: bool
    ends: bool | None
    fault: str | None


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Return the facts of a tokenizer from the files that ``save_pretrained`` writes."""
    declared = _mapping(folder / "tokenizer_config.json")
    named = {**_mapping(folder / "special_tokens_map.json"), **declared}.get("eos_token")
    written = _says_something(folder / "chat_template.jinja") or any(folder.glob("chat_templates/*.jinja"))
    template = written or bool(declared.get("chat_template") or _mapping(folder / "chat_template.json"))
    ends: bool | None = named is not None or _mapping(folder / "generation_config.json").get("eos_token_id") is not None
    if not ends and declared.get("tokenizer_class") not in PLAIN_CLASSES:
        ends = None  # other classes bring an end token of their own
    return TokenizerFacts(template, ends, _fault_of_tokenizer(folder))


def _fault_of_tokenizer(folder: Path) -> str | None:
    if (strange := irregular_in(folder)) is not None:
        return strange
    if not any(True for name in VOCABULARIES for _ in folder.glob(name)):
        return "there is no tokenizer in the folder: no tokenizer.json"
    file = folder / "tokenizer.json"
    try:
        whole = not file.exists() or isinstance(json.loads(regular(file).read_text("utf-8")), dict)
    except (OSError, ValueError) as error:
        return f"its tokenizer.json can't be read ({error})"
    return None if whole else "its tokenizer.json holds no tokenizer"


def _says_something(file: Path) -> bool:
    try:
        return bool(regular(file).read_bytes())
    except OSError:
        return False


def _mapping(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where there is none to be read."""
    try:
        content = json.loads(regular(file).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
