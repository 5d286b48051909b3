"""Models from folders, from the hub or fresh, and back into Hugging Face folders."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from tandem.base.errors import DataError
from tandem.base.folders import whole_folder
from tandem.base.manifest import write_manifest
from tandem.base.regular import irregular_in
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.adapters import read_base, with_adapters
from tandem.models.causal_lm import CausalLM, decoder_of
from tandem.models.families import IMAGE_FAMILIES, refuse_family
from tandem.models.folder.described import fault_of_config, fault_of_generation
from tandem.models.folder.hub import where_from
from tandem.models.folder.stored import faults_of_weights, header_of, packed_weight, weight_files
from tandem.models.head.projection import measured_transform
from tandem.models.lora import merged_weights
from tandem.models.precision import Precision
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from peft import PeftModel

ComputeType = Literal["float32", "bfloat16"]


def _auto(family: str) -> Any:
    """Return the class of transformers that loads a ``family`` whole."""
    return AutoModelForImageTextToText if family in IMAGE_FAMILIES else AutoModelForCausalLM


def load_model(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a plain transformers causal LM in float32, in eval mode: ``model(input_ids=..., labels=...)`` works.

    ``path`` is a Hugging Face folder or a hub id. Raises ``DataError`` where there is no model.
    """
    return from_pretrained(path, trust_remote_code)


def load_causal_lm(
    path: str | Path,
    *,
    dtype: ComputeType = "float32",
    trust_remote_code: bool = False,
    adapter: AdapterSpec | None = None,
    tokens: TokenIds | None = None,
) -> CausalLM:
    """Load the model in ``path`` (folder or hub id) as Tandem runs it, with an ``adapter`` if one is asked for.

    Weights are float32. ``dtype`` is what the forward computes in: with bfloat16 each matrix product casts its weights.
    ``tokens`` are the ids that can be sampled; None: all that are embedded.
    """
    plain = from_pretrained(path, trust_remote_code)
    return as_causal_lm(plain if adapter is None else with_adapters(plain, adapter), dtype=dtype, tokens=tokens)


def describe_causal_lm(
    path: str | Path, *, trust_remote_code: bool = False, tokens: TokenIds | None = None
) -> CausalLM:
    """Return the model in ``path`` without its weights: all that is needed to name, count and save those of others."""
    _refuse_described(path)
    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            described = _auto(config.model_type).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _unreadable(path, error) from error
    with suppress(OSError):  # a model need not have such a config
        described.generation_config = GenerationConfig.from_pretrained(str(path))
    return as_causal_lm(described, tokens=tokens)


def as_causal_lm(
    model: PreTrainedModel | PeftModel, *, dtype: ComputeType = "float32", tokens: TokenIds | None = None
) -> CausalLM:
    """Wrap a model, which from then on is run by layouts; its weights are shared, not copied.

    ``tokens`` are the ids that can be sampled, and the log-probs those of a distribution over them alone: rows that pad
    an embedding are no tokens. None: all. Raises ``DataError`` for a model of a family that can't be run so, whose head
    can't, or that embeds fewer tokens.
    """
    plain = prepared(_without_peft(model))
    embedded = int(plain.get_input_embeddings().weight.shape[0])  # type: ignore[index]
    if tokens is not None and tokens.count > embedded:
        raise DataError(
            f"the model {plain.name_or_path!r} embeds {embedded} tokens, and the tokenizer has the ids {tokens}: use "
            "the tokenizer that the model was saved with, or resize the model's embedding and save it"
        )
    for family in {plain.config.model_type, plain.config.get_text_config().model_type}:
        refuse_family(family)
    if plain.device.type == "meta":  # nothing to measure, and nothing that will run
        return CausalLM(plain, getattr(torch, dtype), tokens=tokens)
    with torch.autocast(plain.device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        transform = measured_transform(plain, decoder_of(plain))
    return CausalLM(plain, getattr(torch, dtype), transform=transform, tokens=tokens)


def prepared(plain: PreTrainedModel) -> PreTrainedModel:
    """Return the model itself, in eval mode, with a config of its own.

    A config object may belong to several models, and holds the attention setting, which is changed later.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(plain.config, copies)
    for module in plain.modules():
        if id(getattr(module, "config", None)) in copies:
            module.config = copies[id(module.config)]
    plain.eval()
    return plain


def new_model(shape: Mapping[str, Any], *, seed: int) -> PreTrainedModel:
    """Make a fresh model with random float32 weights that depend on ``seed`` only.

    ``shape`` is what a ``config.json`` holds: ``model_type`` (such as ``"llama"``) and the fields of its config.
    """
    if "model_type" not in shape:
        raise DataError(f"a new model needs model_type: write model_type: llama beside {', '.join(shape)}")
    config = AutoConfig.for_model(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _auto(config.model_type).from_config(config, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def save_pretrained_atomic(
    model: PreTrainedModel | PeftModel | CausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    precision: Precision | None = None,
) -> None:
    """Write a Hugging Face folder that plain transformers loads; it appears whole or not at all.

    Adapters are merged. ``weights`` replaces the model's own by full tensors under their Hugging Face names: those
    that an engine exports. ``precision``: the dtypes that are written; None: those that there are.
    """
    plain = model.model if isinstance(model, CausalLM) else _without_peft(model)
    state = dict(merged_weights(plain) if weights is None else weights)
    if precision is not None:
        state = precision.cast(state.items())
    with whole_folder(folder) as scratch:
        plain.save_pretrained(scratch, state_dict=state)
        if precision is not None:
            precision.write_into(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        for name in _PROCESSORS:
            if plain.config.model_type in IMAGE_FAMILIES and (file := Path(str(plain.name_or_path)) / name).is_file():
                shutil.copyfile(file, scratch / name)
        write_manifest(scratch)


_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What a model that sees images needs beside its weights."""


def merge_adapter(folder: Path, out: Path) -> None:
    """Write the base model of the adapters in ``folder`` with them merged, as ``save_pretrained_atomic`` does.

    Raises ``DataError`` where the base model, which their config names, is not there.
    """
    spec = AdapterSpec(path=str(folder))
    model = load_causal_lm(read_base(folder), adapter=spec)
    tokenizer = load_tokenizer(str(folder)) if (folder / "tokenizer_config.json").is_file() else None
    save_pretrained_atomic(model, tokenizer, out)


def check_weight_files(folder: Path) -> None:
    """Raise ``DataError`` unless the folder has safetensors files, all of those that its index lists, each whole."""
    if (strange := irregular_in(folder)) is not None:
        raise DataError(f"{folder}: {strange}")
    names = {path.name for path in folder.glob("*.safetensors")}
    for index in folder.glob("*.safetensors.index.json"):
        names |= set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    if not names:
        raise DataError(f"{folder}: has no weights (*.safetensors)")
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="pt"):
                pass  # the header says how long the file must be
        except (SafetensorError, OSError) as error:
            raise DataError(f"{folder / name}: not a whole file of weights ({_first_line(error)})") from error


def nothing_added(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Require all weights of a model to be in its files."""
    del model
    return missing


_COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids)$|\.attention\.bias$")
"""Tables that older files hold and that a model makes by itself."""


def nothing_left(model: PreTrainedModel, surplus: set[str]) -> set[str]:
    """Require all weights in the files to be the model's own, but for what it computes and what predicts further
    tokens.
    """
    text = model.config.get_text_config()
    layers, ahead = (getattr(text, name, None) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    behind = {f"layers.{layers + i}." for i in range(ahead)} | {"mtp."}
    return {name for name in surplus if not _COMPUTED.search(name) and not any(part in name for part in behind)}


def below_another_head(model: PreTrainedModel, surplus: set[str]) -> set[str]:
    """Return the weights beneath the old head of a model that got another one: they must be its own."""
    beneath = f"{model.base_model_prefix}."
    return {name for name in surplus if name.startswith(beneath) or any(part.isdigit() for part in name.split("."))}


def from_pretrained(
    path: str | Path,
    trust_remote_code: bool,
    *,
    auto: Any = None,
    complete: Callable[[PreTrainedModel, set[str]], set[str]] = nothing_added,
    spare: Callable[[PreTrainedModel, set[str]], set[str]] = nothing_left,
    **options: Any,
) -> PreTrainedModel:
    """Call ``auto.from_pretrained`` in float32 and eval mode, where a failure says what is wrong with the folder; None:
    that of the class that loads the family as it is run.

    ``complete`` gets the model and the names of the weights that its files lack; it sets those that it may and gives
    the others back. ``spare`` gets the names in the files that the model has no weight for (transformers knows which
    its architectures never need), and gives back those that must not be lost.
    """
    local = Path(path)
    if local.is_dir() and not (local / "config.json").exists():
        raise DataError(f"model path {str(path)!r}: the folder has no config.json, so it holds no Hugging Face model")
    _refuse_described(path)
    config = _checked_config(path, trust_remote_code)
    auto = _auto(config.model_type) if auto is None else auto
    options |= where_from(path)
    try:
        loaded: Any = auto.from_pretrained(
            str(path), dtype=torch.float32, trust_remote_code=trust_remote_code, output_loading_info=True, **options
        )
    except Exception as error:  # whatever a broken folder provokes in transformers: many types, none documented
        raise _unreadable(path, error) from error
    model, found = loaded
    if missing := sorted(complete(model, set(found["missing_keys"]))):
        # transformers would go on with random values in their place
        raise DataError(
            f"model path {str(path)!r}: {len(missing)} weights that config.json asks for are not in its files, "
            f"{missing[0]!r} among them. Save the whole model, or name a folder whose config.json fits its weights"
        )
    if surplus := sorted(spare(model, set(found["unexpected_keys"]))):
        # transformers would leave them out, and what is trained and saved would lack them
        raise DataError(
            f"model path {str(path)!r}: {len(surplus)} weights in its files are not in the model that config.json "
            f"describes, {surplus[0]!r} among them. Write a config.json that fits the weights (its number of layers, "
            "say), or save the model again"
        )
    assert isinstance(model, PreTrainedModel)
    _refuse_broken(model, path)
    model.eval()
    return model


def fault_of_model(folder: Path) -> str | None:
    """Return what is wrong with a model's folder, as far as its files say it without being loaded; None if nothing
    is.
    """
    if (strange := irregular_in(folder)) is not None:
        return strange
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        return f"its config.json can't be read ({error})"
    if not isinstance(config, dict):
        return "its config.json holds no JSON object"
    weights = (f"{name}: {fault}" for name, fault in faults_of_weights(folder))
    return fault_of_config(config) or fault_of_generation(folder, ids=False) or next(weights, None)


def _refuse_described(path: str | Path) -> None:
    """Raise ``DataError`` for a folder whose files say that it holds no model; those of a hub id are not here yet."""
    folder = Path(path)
    if folder.is_dir() and (fault := fault_of_model(folder)) is not None:
        raise DataError(f"model path {str(path)!r}: {fault}. Mend the file, or save or download the model again")


def _refuse_broken(model: PreTrainedModel, path: str | Path) -> None:
    """Raise ``DataError`` for weights that were read and are none: packed ones, which no section of the config tells
    of, and those that hold NaN or infinity, which few tokens may meet.
    """
    config: Any = Path(path) / "config.json"
    if not Path(path).is_dir():
        config = cached_file(str(path), config.name, local_files_only=True)
    folder = Path(config).parent
    packed = (packed_weight(header_of(file)) for file in weight_files(folder))
    reason = fault_of_generation(folder, ids=False) or next((found for found in packed if found is not None), None)
    if reason is None and _has_two_tables(model):
        reason = (
            "its config.json says tie_word_embeddings, and its files hold a head that is not the embedding: whoever "
            "ties the two runs another model. Write tie_word_embeddings: false"
        )
    for name, weight in model.named_parameters():
        if reason is None and weight.numel() and not all(bound.isfinite() for bound in torch.aminmax(weight)):
            reason = f"{name} holds numbers that are not finite"
    if reason is not None:
        raise DataError(f"model path {str(path)!r}: {reason}. Save or download the model again, in full precision")


def _has_two_tables(model: PreTrainedModel) -> bool:
    """Return whether a model that ties its head to its embedding, by its config, was read with two of them."""
    table: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head is None or table is None or not model._tied_weights_keys:
        return False
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    return bool(tied) and head.weight is not table.weight and not torch.equal(head.weight, table.weight)


def _checked_config(path: str | Path, trust_remote_code: bool) -> Any:
    """Return the config. Raises ``DataError`` for weights that are packed: transformers would run them, or take the
    packed numbers as they are.
    """
    try:
        more = where_from(path)
        config: Any = AutoConfig.from_pretrained(str(path), trust_remote_code=trust_remote_code, **more)
    except Exception as error:  # as where the weights are read
        raise _unreadable(path, error) from error
    section = getattr(config, "quantization_config", None)
    if section:
        method = section.get("quant_method") if isinstance(section, Mapping) else getattr(section, "quant_method", None)
        raise DataError(
            f"model path {str(path)!r}: its weights are quantized ({method or 'no method is named'}), and weights are "
            "trained and pushed in full precision. Name the model that it was made of, or save it dequantized"
        )
    return config


def _unreadable(path: str | Path, error: Exception) -> DataError:
    folder = Path(path).is_dir()
    reason = "it could not be read" if folder else "there is no such folder, and no such model on the hub"
    return DataError(
        f"model path {str(path)!r}: {reason} ({_first_line(error)}). Write the path of a Hugging Face "
        "folder (with config.json and weights) or a hub id such as Qwen/Qwen3-0.6B"
    )


def _first_line(error: Exception) -> str:
    """Return the kind of an error and its first line, with the next one where that only announces it."""
    lines = [line.strip() for line in str(error).splitlines()]
    parts = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return ": ".join([type(error).__name__, " ".join(parts)]) if parts else type(error).__name__


def _without_peft(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the model itself; adapters are inside its layers."""
    plain = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    assert isinstance(plain, PreTrainedModel)
    return plain
