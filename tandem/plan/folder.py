"""What the files of a model's folder say of its weights and its tokenizer, read without loading either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.models.stored import header_of, packed_weight
from tandem.models.tokenizer import PLAIN_CLASSES

LOADED = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The names under which transformers looks for weights, in this order: it takes the first that is there."""

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


def faults_of_weights(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, what is wrong with it) for weights that are missing or cut; a file's header says how long it must
    be.
    """
    names = {path.name for path in folder.glob("*.safetensors")}
    for index in sorted([*folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model.bin.index.json")]):
        listed = _mapping(index).get("weight_map")
        if not isinstance(listed, dict):
            yield index.name, "can't be read"
            continue
        names |= {str(name) for name in listed.values()}
    if not any((folder / name).is_file() for name in LOADED):
        unread = f", and {min(names)} is not looked at" if names else ""
        yield " or ".join(LOADED[:3]), f"there are no weights in the folder under such a name{unread}"
    for name in sorted(names):
        if fault := _fault_of(folder / name):
            yield name, fault


def _fault_of(file: Path) -> str | None:
    """Return what is wrong with a safetensors file (eight bytes of length, a JSON header, the tensors); None if nothing
    is.
    """
    try:
        size = file.stat().st_size
        if file.suffix != ".safetensors":
            return None  # whether a pickle is whole, only loading it tells
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
        if length > size:
            return f"is cut or no safetensors file: {size} bytes, and its header alone has {length}"
        header = header_of(file)
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
        packed = packed_weight(header)
    except FileNotFoundError:
        return "is missing, and the index lists it"
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return f"can't be read ({error})"
    needed = 8 + length + max(ends, default=0)
    if size != needed:
        return f"is cut: {size} of {needed} bytes" if size < needed else "is too long"
    return packed


def fault_of_generation(folder: Path) -> str | None:
    """Return what is wrong with ``generation_config.json``, whose end tokens would be lost; None if nothing is."""
    file = folder / "generation_config.json"
    try:
        content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"its {file.name} can't be read ({error})"
    if not isinstance(content, dict):
        return f"its {file.name} holds no JSON object"
    config = _mapping(folder / "config.json")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    size, ends = text.get("vocab_size"), content.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if type(token) is not int or token < 0 or (isinstance(size, int) and token >= size):
            return f"its {file.name} has the eos_token_id {token!r}, which is no id of its vocabulary ({size})"
    return None


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
    written = (folder / "chat_template.jinja").is_file() or any(folder.glob("chat_templates/*.jinja"))
    template = written or bool(declared.get("chat_template") or _mapping(folder / "chat_template.json"))
    ends: bool | None = named is not None or any(
        _mapping(folder / name).get("eos_token_id") is not None for name in ("generation_config.json", "config.json")
    )
    if not ends and declared.get("tokenizer_class") not in PLAIN_CLASSES:
        ends = None  # other classes bring an end token of their own
    return TokenizerFacts(template, ends, _fault_of_tokenizer(folder))


def _fault_of_tokenizer(folder: Path) -> str | None:
    if not any(True for name in VOCABULARIES for _ in folder.glob(name)):
        return "there is no tokenizer in the folder: no tokenizer.json"
    file = folder / "tokenizer.json"
    try:
        whole = not file.exists() or isinstance(json.loads(file.read_text("utf-8")), dict)
    except (OSError, ValueError) as error:
        return f"its tokenizer.json can't be read ({error})"
    return None if whole else "its tokenizer.json holds no tokenizer"


def _mapping(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where there is none to be read."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
