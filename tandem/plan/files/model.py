"""What a model's folder says of it, read without loading it: context, sizes, number of parameters."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.base.regular import regular
from tandem.config.model import ModelConfig
from tandem.models.families import fault_of_family, loaded_name
from tandem.models.folder.described import fault_of_config, text_part
from tandem.models.folder.stored import header_of, weight_files
from tandem.models.layouts.positions import Context
from tandem.models.megatron import fault_for_megatron
from tandem.models.token_ids import TokenIds

_STACKS = ("layers", "h", "blocks")
"""What families call the list of their layers."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families call the number of their experts."""

_SENSES = frozenset({"vision", "visual", "vit", "image", "video", "audio", "speech"})

_TABLES = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out)\.weight$")
"""Matrices with a row for each id of the vocabulary."""

_OTHER_PARTS = re.compile("vision|visual|audio|encoder|tower|mtp|module")

_OTHER_HEADS = re.compile("For(MaskedLM|(Sequence|Token)Classification|QuestionAnswering|MultipleChoice)$")

_REPEATED = re.compile("loop|cycle|recur|repeat", re.IGNORECASE)
"""In keys of families that go through the same layers several times, and count each time."""


@dataclass(frozen=True)
class ModelFacts:
    """What ``config.json`` and the headers of the weight files tell of a model; None where they don't say."""

    parameters: int | None
    context: Context | None
    hidden: int | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    vocabulary: int | None
    matrices: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Module -> (rows, columns) of its weight, for those that have two; empty where the files don't say."""
    families: tuple[str, ...] = ()
    """What transformers calls the architecture, and that of its text part where it has others."""
    inside: int | None = None
    """Width of a layer's MLP that a token goes through: of all its experts together where there are some."""
    senses: tuple[str, ...] = ()
    """Sections of its config for what else it reads than text, such as ``vision_config``."""
    quantized: str | None = None
    """How its weights are quantized, in its config's word; None where they are not."""
    misfit: str | None = None
    """Why the weight files are not those of ``config.json``, or no model is; None where nothing is known of it."""
    other_kind: str | None = None
    """What the model is, by its config, if it is none that goes on with a text."""
    unknown: str | None = None
    """Why transformers has no code for a model of its family; None where it has."""
    not_by_megatron: str | None = None
    """Why the engine on Megatron-core can't train it; None where it can."""
    heads: int | None = None
    """Heads of its attention; ``kv_heads`` of them have keys and values of their own."""
    routed: bool = False
    """Whether it has experts that a router chooses among."""


def looks_like_path(path: str) -> bool:
    """Return whether a model's name can only be a folder: a hub id is ``name`` or ``owner/name``."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path or path.endswith("/")


def model_folder(path: str) -> Path | None:
    """Return the folder with the model's files: the path itself, or its place in the hub's cache; None if neither is
    there.
    """
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return folder
    if not path or looks_like_path(path):
        return None
    cached = hub_cache() / f"models--{path.replace('/', '--')}" / "snapshots"
    snapshots = sorted(cached.glob("*/config.json"))
    return snapshots[-1].parent if snapshots else None


def hub_cache() -> Path:
    """Return the folder where downloaded models are kept, by the variables of the ``huggingface_hub`` package."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"])
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(home).expanduser() / "hub"


def offline() -> bool:
    """Return whether the hub may not be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


def read_model(folder: Path) -> ModelFacts:
    """Read the shape of a model. Raises ``ValueError`` or ``OSError`` where ``config.json`` is missing or no JSON
    object.
    """
    config = json.loads(regular(folder / "config.json").read_text("utf-8"))
    if not isinstance(config, dict):
        raise ValueError("config.json holds no JSON object")
    text = text_part(config)
    hidden, heads = _number(text, "hidden_size", "n_embd", "d_model"), _number(text, "num_attention_heads", "n_head")
    dim = _number(text, "head_dim") or (hidden // heads if hidden and heads else None)
    shapes = shapes_in_files(folder)
    families = tuple(dict.fromkeys(str(part["model_type"]) for part in (config, text) if "model_type" in part))
    return ModelFacts(
        parameters=sum(map(math.prod, shapes.values())) or None,
        context=Context.of(text),
        hidden=hidden,
        layers=_number(text, "num_hidden_layers", "n_layer"),
        kv_heads=_number(text, "num_key_value_heads") or heads,
        head_dim=dim,
        vocabulary=_number(text, "vocab_size"),
        matrices={
            loaded_name(families, name.removesuffix(".weight")): (shape[0], shape[1])
            for name, shape in shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        },
        inside=_inside(text),
        senses=tuple(_senses(config)),
        misfit=fault_of_config(config) or _misfit(text, shapes) or _other_vocabulary(text, shapes),
        other_kind=_other_kind(config),
        unknown=fault_of_family(config),
        families=families,
        quantized=_quantized(config) or _quantized(text),
        heads=heads,
        routed=_number(text, *_EXPERTS) is not None,
        not_by_megatron=fault_for_megatron(config),
    )


def _senses(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of sections, or of parts of a name, for what else is read than text; empty ones are for
    nothing.
    """
    for key, value in config.items():
        words = set(key.split("_"))
        if not value or key == "text_config":
            continue
        if isinstance(value, Mapping):
            if words & _SENSES or (key.endswith("_config") and any(_senses(value))):
                yield key
        elif "tower" in words and words & _SENSES:
            yield key


def _other_kind(config: Mapping[str, Any]) -> str | None:
    """Name what kind of model it is where it is none that continues a text: an encoder with a decoder, another head."""
    if config.get("is_encoder_decoder") is True:
        return "an encoder with a decoder (is_encoder_decoder)"
    named = config.get("architectures")
    if isinstance(named, list) and named and all(_OTHER_HEADS.search(str(name)) for name in named):
        return str(named[0])
    return None


def _quantized(config: Mapping[str, Any]) -> str | None:
    """Return the method of the section that quantized models have; it may be empty."""
    section = config.get("quantization_config")
    if not section:
        return None
    return str(section.get("quant_method", "quantized")) if isinstance(section, Mapping) else "quantized"


def _other_vocabulary(text: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> str | None:
    """Return why the embedding or the head is not of the config's vocabulary; None where nothing is known of it."""
    size = _number(text, "vocab_size")
    for name, shape in shapes.items():
        known = _TABLES.search(name) and not _OTHER_PARTS.search(name) and len(shape) == 2
        if size is not None and known and shape[0] != size:
            return f"its config.json has a vocab_size of {size}, and {name} has {shape[0]} rows"
    return None


def _inside(text: Mapping[str, Any]) -> int | None:
    """Return the MLP's width, or that of the experts that a token is sent to."""
    experts, width = _number(text, "num_experts_per_tok", "top_k"), _number(text, "moe_intermediate_size")
    dense = _number(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    if experts is None or _number(text, *_EXPERTS) is None:
        return dense
    shared = _number(text, "n_shared_experts") or 0
    one = width or dense
    return None if one is None else one * (experts + shared) + (_number(text, "shared_expert_intermediate_size") or 0)


def _misfit(text: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return why the ``names`` of weights are not those of the config's layers; other parts have counts of their own.

    Layers that predict further tokens stand behind the last one.
    """
    layers = _number(text, "num_hidden_layers", "n_layer")
    places = {number: name for name in names if (number := _layer(name)) is not None}
    if layers is None or not places:
        return None
    last = max(places)
    if last >= layers + (_number(text, "num_nextn_predict_layers") or 0):
        return f"its config.json has {layers} layers, and there are weights of more, {places[last]} among them"
    if last < layers - 1 and not any(_REPEATED.search(key) for key in text):
        return f"its config.json has {layers} layers, and there are weights of {last + 1}, up to {places[last]}"
    return None


def _layer(name: str) -> int | None:
    """Return the number of the layer that a weight belongs to; None where it belongs to none of the language
    model's.
    """
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    listed = place > 0 and parts[place - 1] in _STACKS and not _OTHER_PARTS.search(".".join(parts[:place]))
    return int(parts[place]) if listed else None


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    found = (config[name] for name in names if name in config)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def shapes_in_files(folder: Path) -> dict[str, list[int]]:
    """Return every tensor's shape by the headers of the files that are loaded; none if one is bad."""
    shapes: dict[str, list[int]] = {}
    try:
        for file in weight_files(folder):
            found = {name: tensor["shape"] for name, tensor in header_of(file).items()}
            sum(map(math.prod, found.values()))  # anything but lists of numbers is refused here
            shapes |= found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return shapes


def vocabulary_of(folder: Path) -> dict[str, int] | None:
    """Map tokens to ids by ``tokenizer.json``, added tokens included; None where the folder has none that can be
    read.
    """
    file = folder / "tokenizer.json"
    try:
        state = file.stat()
        return _read_vocabulary(file, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def vocab_size(folder: Path) -> int | None:
    """Return how many ids the model in ``folder`` embeds, by its ``config.json``; None where it doesn't say."""
    try:
        config = json.loads(regular(folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return _number(text_part(config), "vocab_size") if isinstance(config, dict) else None


def sampled_tokens(model: ModelConfig, facts: ModelFacts | None) -> int | None:
    """Return the number of ids that can be sampled: those of the tokenizer that the model embeds; None if no file
    says.
    """
    folder = model_folder(model.tokenizer)
    own = None if folder is None else vocabulary_of(folder)
    count = None if own is None else TokenIds.among(own.values()).count
    embedded = None if facts is None else facts.vocabulary
    return embedded if count is None else count if embedded is None else min(count, embedded)


@functools.lru_cache(maxsize=4)
def _read_vocabulary(file: Path, changed: int, size: int) -> dict[str, int]:
    """Read the file again only when it has changed: ``changed`` and ``size`` make a file that was written anew another
    one.
    """
    del changed, size
    content = json.loads(regular(file).read_text("utf-8"))
    listed = content["model"]["vocab"]
    own = {entry[0]: place for place, entry in enumerate(listed)} if isinstance(listed, list) else dict(listed)
    return own | {token["content"]: token["id"] for token in content.get("added_tokens", [])}
