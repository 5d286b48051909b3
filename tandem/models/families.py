"""Which route model families take, as far as ``model_type`` alone says it. Importing this costs no torch.

``make families`` runs tiny models of all of them, and tests hold this to what it finds. A family that is not listed is
tried where it is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from tandem.base.errors import DataError
from tandem.base.registry import near

_LINEAR = "its linear attention, state space or convolution layers carry on over the border of a document"
_OWN = "its attention does not go through transformers' attention interface"
_SINK = "its attention has sinks"
_CAP = "its attention caps its scores"
_CHOICE = "its sparse attention chooses among later tokens too, so that a plain forward is not causal"
_STATE = "decoding with its own cache gives other numbers than its forward"

PER_DOCUMENT: dict[str, str] = {
    **dict.fromkeys(
        [
            *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
            *("lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5"),
            *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm"),
            *("zamba", "zamba2"),
        ],
        _LINEAR,
    ),
    **dict.fromkeys(["bloom", "doge", "falcon", "gpt_neo", "mpt", "nemotron", "stablelm", "xglm"], _OWN),
    **dict.fromkeys(["deepseek_v4", "gpt_oss", "granite_swa", "mimo_v2_flash"], _SINK),
    **dict.fromkeys(["gemma2", "vaultgemma"], _CAP),
    **dict.fromkeys(["llama4", "llama4_text", "minimax_m3_vl_text"], "its attention is cut into blocks"),
}
"""Family -> why its documents run a row each."""

WITHOUT_CACHE: dict[str, str] = dict.fromkeys(["nemotron_h", "recurrent_gemma", "rwkv", "xlstm", "zamba2"], _STATE)
"""Family -> why generation runs each row anew for each token."""

REFUSED: dict[str, str] = dict.fromkeys(["axk2", "deepseek_v32", "glm_moe_dsa"], _CHOICE)
"""Family -> why no route gives what a plain forward of a document alone gives."""

BORDERS = frozenset(
    {
        *("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
        *("mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "zamba", "zamba2"),
    }
)
"""Families whose layers can be given the borders of documents, by kernels that run on a device."""


AS_TEXT = frozenset(
    {
        *("dots3_note", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "phi4_multimodal", "qwen3_5"),
        *("qwen3_5_moe", "qwen4_exp"),
    }
)
"""Families that read images or sound too, and that transformers has as language models."""

IMAGE_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"})
"""Families that are run on images: which token is which patch and where it stands is known, and tested."""

_GATED = frozenset({"down_proj", "gate", "gate_proj", "up_proj"})
_NUMBERED = frozenset({"gate", "w1", "w2", "w3"})

FUSED_EXPERTS: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        [
            *("afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe"),
            *("glm4_moe_lite", "hunyuan_v1_moe", "longcat_flash", "olmoe", "qwen3_moe", "qwen3_next", "sarvam_mla"),
            "solar_open",
        ],
        _GATED,
    ),
    **dict.fromkeys(["kimi_linear", "minimax", "minimax_m2", "mixtral", "phimoe"], _NUMBERED),
    **dict.fromkeys(
        ["axk1", "bailing_hybrid", "laguna", "lfm2_moe", "mimo_v2_flash", "qwen2_moe", "qwen3_5_moe_text"],
        frozenset({"gate"}),
    ),
    **dict.fromkeys(["gpt_oss", "jamba", "llama4_text"], frozenset({"router"})),
    **dict.fromkeys(["granitemoe", "granitemoehybrid", "granitemoeshared"], frozenset({"layer"})),
    "minimax_m3_vl_text": frozenset({"gate"}),
}
"""Families whose experts transformers joins into one parameter a layer -> names in their files that mean no module.

Those of experts and routers, and those that PEFT takes for them wherever they stand.
"""

Weighing = Literal["softmax", "renormalised", "scaled", "sigmoid", "chosen"]
"""How a router weighs the experts that it has chosen: by their softmax among all, which the config may have divided by
their sum; always divided; times a factor; by their sigmoid; by their softmax among themselves."""

ROUTED: dict[str, Weighing] = {
    **dict.fromkeys(["flex_olmo", "olmoe", "qwen2_moe", "qwen3_moe"], "softmax"),
    "mixtral": "renormalised",
    "deepseek_v2": "scaled",
    **dict.fromkeys(["deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "solar_open"], "sigmoid"),
    **dict.fromkeys(["granitemoe", "granitemoeshared"], "chosen"),
}
"""Families of mixtures of experts whose routers are watched, balanced and replayed; all of them run packed rows."""

FUSED_NAMES = frozenset({"down_proj", "gate_up_proj"})
"""What the joined parameters are called."""


_STATE_SPACE = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")

UNADAPTED: dict[str, frozenset[str]] = {
    **dict.fromkeys(_STATE_SPACE, frozenset({"out_proj", "conv1d"})),  # PEFT refuses them: their kernels read weights
    "deepseek_v4": frozenset({"o_a_proj", "wo_a"}),  # cut into groups, each with a product of its own
}
"""Family -> modules that look linear and can't have an adapter."""

RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "bailing_hybrid": (
        (".attention.dense", ".self_attn.o_proj"),
        (".attention.f_proj", ".self_attn.forget_gate.f_proj"),
        (".attention.", ".self_attn."),
    )
}
"""Family -> parts of the names in its files, and what transformers calls the modules when it has loaded them."""

SPLIT = frozenset({"llama", "qwen2", "qwen3"})
"""Families whose layers can be split over devices: tensor parallelism of training."""


def loaded_name(families: Iterable[str], module: str) -> str:
    """Return what a ``module`` of the files is called in a loaded model of these ``families``."""
    for family in families:
        for old, new in RENAMED.get(family, ()):
            module = module.replace(old, new)
    return module


def without_adapter(families: Iterable[str], module: str) -> bool:
    """Return whether ``module``, as the files of a model of these ``families`` call it, can't have an adapter."""
    parts = module.split(".")
    expert = any(one == "experts" and other.isdigit() for one, other in pairwise(parts))
    if any(parts[-1] in UNADAPTED.get(family, ()) for family in families):
        return True
    return any(expert or parts[-1] in FUSED_EXPERTS[family] for family in families if family in FUSED_EXPERTS)


def notes_on_adapters(families: Iterable[str]) -> Iterator[str]:
    """Note what adapters on all linear modules leave out in a model of these ``families``."""
    for family in families:
        if family in FUSED_EXPERTS:
            named = ", ".join(sorted(FUSED_EXPERTS[family]))
            yield (
                f"lora_target_modules all-linear leaves out the experts of the family {family}, which are one "
                f"parameter a layer and no linear modules, and what else is called {named}"
            )
        if family in UNADAPTED:
            named = ", ".join(sorted(UNADAPTED[family]))
            yield f"lora_target_modules all-linear leaves out {named} in the family {family}: no adapter fits there"


_CAUSAL = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)^\)", re.DOTALL | re.MULTILINE)


@functools.cache
def language_models() -> frozenset[str]:
    """Return the families that the installed transformers has a language model of, by its source, which is not
    imported; none where it doesn't say.
    """
    spec = importlib.util.find_spec("transformers")
    roots = (spec and spec.submodule_search_locations) or ()
    for source in (Path(root) / "models" / "auto" / "modeling_auto.py" for root in roots):
        if source.is_file() and (table := _CAUSAL.search(source.read_text("utf-8"))) is not None:
            return frozenset(re.findall(r'^\s*\("([^"]+)",', table[1], re.MULTILINE))
    return frozenset()


def fault_of_family(config: Mapping[str, Any]) -> str | None:
    """Return why transformers has no code that runs a model of this ``config.json``; None where it has, or may.

    A model may ship its code, and a plug-in may have registered a family.
    """
    if "auto_map" in config:
        return None
    family, known = config.get("model_type"), language_models()
    if family is None:
        return "its config.json has no model_type, which says what code runs the weights"
    auto = sys.modules.get("transformers.models.auto.configuration_auto")
    registered = () if auto is None else set(auto.CONFIG_MAPPING.keys()) - set(auto.CONFIG_MAPPING_NAMES)
    if not known or family in known or family in registered:
        return None
    close = near(str(family), known)
    return f"its config.json has the model_type {family!r}, of which transformers has no language model" + (
        f" ({close})" if close.startswith("did") else ""
    )


def refuse_family(family: str) -> None:
    """Raise ``DataError`` for a family that no route is right for."""
    if family in REFUSED:
        raise DataError(f"the model family {family!r} can't be trained or sampled: {REFUSED[family]}")


def notes_on_families(families: Iterable[str], *, generates: bool) -> Iterator[str]:
    """Note what is slower or left aside with a model of these ``families``, the names in its config."""
    for family in families:
        if family in AS_TEXT and family not in IMAGE_FAMILIES:
            yield f"models of the family {family} read more than text: they are trained and sampled on text alone"
        if family in PER_DOCUMENT:
            way = "a row per document, prompts not shared: right, and slower than in one row"
            yield f"models of the family {family} run {way} ({PER_DOCUMENT[family]})"
        if generates and family in WITHOUT_CACHE:
            way = "without a cache, each token by its whole row: right, and very slow"
            yield f"the engine hf generates {way}, from the family {family} ({WITHOUT_CACHE[family]})"
