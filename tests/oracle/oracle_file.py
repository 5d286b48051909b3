"""Reading files of the format ``hybrid-oracle/1``: expected values from an independent implementation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}


class Inputs(Mapping[str, Any]):
    """Named values that remember who was asked for: what an adapter leaves unread has had no say in its answer."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {key: Inputs(value) if isinstance(value, dict) else value for key, value in values.items()}
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        """Asking whether a value is there doesn't read it."""
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def plain(self) -> dict[str, Any]:
        """A dict of all, which reads them."""
        return {key: value.plain() if isinstance(value, Inputs) else value for key, value in self.items()}

    def forget(self) -> None:
        """As if nothing had been read."""
        self._read.clear()
        for value in self._values.values():
            if isinstance(value, Inputs):
                value.forget()

    def unread(self) -> list[str]:
        """Names that nobody read, with a dot for those inside another."""
        names = [name for name in self._values if name not in self._read]
        for name in self._read:
            value = self._values.get(name)
            if isinstance(value, Inputs):
                names += [f"{name}.{inner}" for inner in value.unread()]
        return names


@dataclass(frozen=True)
class Case:
    """One call of the reference: named ``inputs``, and either named results or ``raises``."""

    id: str
    section: str
    fn: str
    scenario: str
    inputs: Inputs
    expected: dict[str, Any]
    random: bool

    @property
    def refused(self) -> bool:
        """The reference raised."""
        return "raises" in self.expected

    def mask(self, name: str = "response_mask") -> torch.Tensor:
        """The input ``name`` as a bool mask."""
        mask: torch.Tensor = self.inputs[name].bool()
        return mask


def number(value: Any) -> Any:
    """A JSON value with its non-finite numbers restored."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def decode(value: Any, pool: dict[str, Any]) -> Any:
    """Tensors, arrays (as lists), pool references and nested values."""
    if isinstance(value, list):
        return [decode(item, pool) for item in value]
    if not isinstance(value, dict):
        return number(value)
    if "$" in value:
        return decode(pool[value["$"]], pool)
    if "__tensor__" in value:
        flat = torch.tensor([number(x) for x in value["data"]], dtype=DTYPES[value["__tensor__"]])
        return flat.reshape(value["shape"])
    if "__array__" in value:
        return [number(x) for x in value["data"]]
    return {key: decode(item, pool) for key, item in value.items()}


def read_cases(path: Path) -> list[Case]:
    """All cases of the file, in order."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] != "hybrid-oracle/1":
        raise ValueError(f"{path} has format {content['format']!r}: this harness reads 'hybrid-oracle/1'")
    pool = content["pool"]
    return [
        Case(
            id=raw["id"],
            section=raw["section"],
            fn=raw["fn"],
            scenario=raw["scenario"],
            inputs=Inputs(decode(raw["inputs"], pool)),
            expected=decode(raw["expected"], pool),
            random=bool(raw.get("rng")),
        )
        for raw in content["cases"]
    ]
