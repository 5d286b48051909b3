"""What a ``config.json`` or ``generation_config.json`` says of a model that none can have: it is found without loading
one, by the plan and by every load alike. Importing this costs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tandem.base.registry import near
from tandem.base.regular import regular
from tandem.models.layouts.positions import ropes

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "n_embd",
    "n_head",
    "n_layer",
    "n_positions",
)
"""Fields that are 1 or more where they are numbers; some families have one for each layer, or none."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

_POSITIVE = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "norm_epsilon",
    "rope_theta",
    "rope_local_base_freq",
    "global_rope_theta",
    "local_rope_theta",
    "rotary_emb_base",
    "partial_rotary_factor",
    "rotary_pct",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
"""Fields that are divided by, or that a root or a logarithm is taken of: above 0, and finite, where they are there.

Some families have a list of them, one for each layer.
"""

_FACTORS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
)
"""Fields that something is multiplied with or divided by: no 0, which would leave nothing of it."""

_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "is_encoder_decoder")
"""Fields that are true or false: a text such as ``"false"`` is neither, and would count as true."""

_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "mamba_hidden_act")

ACTIVATIONS = frozenset(
    {
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
        *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    }
)
"""The activations that transformers has."""

ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "axial": (),
    "mrope": (),
    "xdrope": (),
    "proportional": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kind of rope -> the parameters that it can't be computed without. ``su`` is the old name of ``longrope``."""

LARGEST_RANK = 2**16

_ODD = 4
"""Up to this size transformers lets odd heads pass: tests use them."""

_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
"""Parameters of ropes that are finite and above 0 where they are there."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a ``config.json`` that is about text: all of it, where it is of nothing else."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def fault_of_config(config: Mapping[str, Any]) -> str | None:
    """Return why there is no model as its ``config.json`` describes it; None where there may be one.

    What a model that ships code makes of a name, only its code knows: its names are left to it.
    """
    text = text_part(config)
    found = [_sizes(text), _heads(text), _numbers(text)]
    if "auto_map" not in config:
        found += [_activations(text), *map(_rope, ropes(text))]
    return next((f"its config.json has {fault}" for faults in found for fault in faults), None)


def _sizes(text: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes that no model has."""
    for name in _SIZES:
        value = text.get(name)
        if isinstance(value, (str, bool, float)) or (isinstance(value, int) and value < 1):
            yield f"the {name} {value!r}, which is no whole number of 1 or more"
    window = text.get("sliding_window")
    if isinstance(window, (str, float)) or (isinstance(window, int) and window < 0):
        yield f"the sliding_window {window!r}, which is no whole number of 0 or more"
    each = text.get("num_experts_per_tok")
    count = next((text[name] for name in _EXPERTS if isinstance(text.get(name), int)), None)
    if isinstance(each, int) and count and each > count:  # a model without experts may have any number here
        yield f"the num_experts_per_tok {each!r}, of {count} experts"
    layers, kinds = text.get("num_hidden_layers"), text.get("layer_types")
    if isinstance(layers, int) and isinstance(kinds, list) and len(kinds) != layers:
        yield f"{layers} num_hidden_layers, and layer_types for {len(kinds)}"


def _heads(text: Mapping[str, Any]) -> Iterator[str]:
    """Yield which heads have no whole width, share no whole number of keys, or can't be turned by a rope."""
    hidden, heads, shared = (text.get(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if not isinstance(heads, int):
        return
    if isinstance(shared, int) and heads % shared:
        yield f"{heads} num_attention_heads, which {shared} num_key_value_heads can't be shared by"
    width = any("head_dim" in name and value is not None for name, value in text.items())
    if isinstance(hidden, int) and hidden % heads and not width:
        yield f"no head_dim, and a hidden_size of {hidden} has no {heads} equal heads"
    own = text.get("head_dim")
    size = own if isinstance(own, int) else hidden // heads if isinstance(hidden, int) and not width else 0
    turned = "rope_theta" in text or any(ropes(text))
    if size % 2 and size > _ODD and turned and not any("partial" in name or "_pct" in name for name in text):
        yield f"heads of {size} (head_dim), and a rope turns pairs: an odd one has none left for its last"


def _numbers(text: Mapping[str, Any]) -> Iterator[str]:
    """Yield numbers that nothing can be computed with, and switches that are neither on nor off."""
    yield from _not_positive(text, _POSITIVE)
    for name in _FACTORS:
        value = text.get(name)
        if value is not None and (not _is_number(value) or value == 0):
            yield f"the {name} {value!r}, which is no finite number other than 0"
    for name in _SWITCHES:
        value = text.get(name)
        if value is not None and not isinstance(value, bool):
            yield f"the {name} {value!r}, which is neither true nor false"


def _not_positive(section: Mapping[str, Any], names: Iterable[str], of: str = "") -> Iterator[str]:
    for name in names:
        value = section.get(name)
        listed: list[Any] = value if isinstance(value, list) and value else [value]
        if value is not None and not all(_is_number(one) and one > 0 for one in listed):
            yield f"the {name} {value!r}{of}, which is no finite number above 0"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _activations(text: Mapping[str, Any]) -> Iterator[str]:
    """Yield activations that transformers lacks: it would stop with the bare name."""
    for name in _ACTIVATION_FIELDS:
        value = text.get(name)
        if value is not None and (not isinstance(value, str) or value not in ACTIVATIONS):
            yield f"the {name} {value!r}, which transformers lacks: {near(str(value), ACTIVATIONS)}"


def _rope(rope: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the parameters of one rope: its kind, what that needs, and its numbers."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None:
        if rope.get("factor") is not None:
            yield f"the rope factor {rope['factor']!r} without a rope_type, so that it would do nothing"
    elif not isinstance(kind, str) or kind not in ROPES:
        yield f"the rope_type {kind!r}, which transformers lacks: {near(str(kind), ROPES)}"
    else:
        for name in ROPES[kind]:
            if rope.get(name) is None:
                yield f"the rope_type {kind!r} without its {name}"
    of = f" of its rope ({kind or 'default'})"
    yield from _not_positive(rope, _ROPE_NUMBERS, of)
    for name in ("short_factor", "long_factor"):
        listed = rope.get(name)
        if listed is not None and not (isinstance(listed, list) and all(_is_number(one) and one > 0 for one in listed)):
            yield f"a {name}{of} that is no list of numbers above 0"
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if kind == "llama3" and low is not None and high is not None and high <= low:
        yield f"the high_freq_factor {high!r}{of}, which must be above its low_freq_factor {low!r}"


def fault_of_adapter(config: Mapping[str, Any]) -> str | None:
    """Return why no LoRA adapter can be as its ``adapter_config.json`` says; None where one may be."""
    return next(_adapter(config), None)


def _adapter(config: Mapping[str, Any]) -> Iterator[str]:
    ranks, alphas = (config.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
    for rank in [config.get("r", 8), *(ranks.values() if isinstance(ranks, Mapping) else [ranks])]:
        if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
            yield f"the rank {rank!r}, which is no whole number of 1 to {LARGEST_RANK}"
    for alpha in [config.get("lora_alpha"), *(alphas.values() if isinstance(alphas, Mapping) else [alphas])]:
        if alpha is not None and (not _is_number(alpha) or alpha <= 0):
            yield f"the lora_alpha {alpha!r}, which is no finite number above 0: nothing of it would be learned"
    dropout, stable = config.get("lora_dropout"), config.get("use_rslora")
    if dropout is not None and not (_is_number(dropout) and 0 <= dropout < 1):
        yield f"the lora_dropout {dropout!r}, which is no number from 0 to below 1"
    if stable is not None and not isinstance(stable, bool):
        yield f"the use_rslora {stable!r}, which is neither true nor false"
    if config.get("target_modules") == [] and not config.get("target_parameters"):
        yield "no target_modules, so that nothing is adapted"


def fault_of_generation(folder: Path, *, ids: bool = True) -> str | None:
    """Return what is wrong with ``generation_config.json``, whose end tokens would be lost; None if nothing is.

    ``ids``: an end token beyond the vocabulary is a fault too, and not only a file that says nothing.
    """
    file = folder / "generation_config.json"
    try:
        content = json.loads(regular(file).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"its {file.name} can't be read ({error})"
    if not isinstance(content, dict):
        return f"its {file.name} holds no JSON object"
    try:
        config = json.loads(regular(folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = {}  # another check says what is wrong with it
    size = text_part(config).get("vocab_size") if isinstance(config, dict) else None
    ends = content.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if type(token) is not int or token < 0 or (ids and isinstance(size, int) and token >= size):
            return f"its {file.name} has the eos_token_id {token!r}, which is no id of its vocabulary ({size})"
    return None
