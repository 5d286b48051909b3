"""The dtype in which a trained model is written: that of the folder which it came from, or one that is asked for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.models.folder.stored import header_of

ExportDtype = Literal["auto", "float32", "bfloat16", "float16"]

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""What safetensors calls them."""


@dataclass(frozen=True)
class Precision:
    """Floats are written as ``main``, but for those ``named``: some families keep a few weights wider than the rest."""

    main: torch.dtype = torch.float32
    named: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def asked_for(cls, dtype: ExportDtype, folder: Path | None) -> Precision:
        """Return ``dtype`` for all, or with ``auto`` as in the files of ``folder``; float32 where nothing says."""
        return cls.of(folder) if dtype == "auto" else cls(getattr(torch, dtype))

    @classmethod
    def of(cls, folder: Path | None) -> Precision:
        """Return what most floats in the files of ``folder`` are, and which are others; else what its config says."""
        if folder is None:
            return cls()
        stored: dict[str, torch.dtype] = {}
        sizes: Counter[torch.dtype] = Counter()
        for file in sorted(folder.glob("*.safetensors")):
            for name, entry in header_of(file).items():
                dtype = _STORED.get(str(entry.get("dtype")))
                if dtype is not None:
                    stored[name] = dtype
                    sizes[dtype] += prod(entry["shape"])
        if not sizes:
            return cls(_configured(folder))
        (main, _), *_ = sizes.most_common(1)
        return cls(main, {name: dtype for name, dtype in stored.items() if dtype != main})

    def cast(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the ``weights`` as they are written; those that share memory still do."""
        found: dict[str, torch.Tensor] = {}
        made: dict[tuple[Any, ...], torch.Tensor] = {}
        for name, tensor in weights:
            dtype = self.named.get(name, self.main) if tensor.is_floating_point() else tensor.dtype
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, dtype)
            found[name] = made.setdefault(key, tensor.to(dtype)) if tensor.numel() else tensor.to(dtype)
        return found

    def write_into(self, folder: Path) -> None:
        """Let the ``config.json`` in ``folder`` name ``main``, for whoever loads the model as it was saved."""
        file = folder / "config.json"
        config = json.loads(file.read_text("utf-8"))
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            for key in ("dtype", "torch_dtype"):
                if key in part:
                    part[key] = str(self.main).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _configured(folder: Path) -> torch.dtype:
    """Return the dtype that ``config.json`` names."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        name = config.get("dtype") or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        return torch.float32
    return next((dtype for dtype in _STORED.values() if str(dtype) == f"torch.{name}"), torch.float32)
