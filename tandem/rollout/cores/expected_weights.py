"""Which weights a model has, found without making any: for an engine whose own tensors have other names and shapes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tandem.base.errors import ContractError
from tandem.base.registry import near


@dataclass(frozen=True)
class ExpectedWeights:
    """``shapes`` by Hugging Face name, buffers too. Each of ``parameters`` must come, under one of the names it has."""

    shapes: Mapping[str, tuple[int, ...]]
    parameters: Sequence[frozenset[str]]

    @classmethod
    def of(cls, path: str, trust_remote_code: bool) -> ExpectedWeights | None:
        """Return the weights of the model in ``path``; None for one that transformers doesn't know as a language
        model.
        """
        transformers: Any = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        try:
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        except ValueError:
            return None
        names: dict[int, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(name)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        return cls(shapes, [frozenset(tied) for tied in names.values()])

    def check(self, came: Mapping[str, torch.Tensor]) -> None:
        """Raise ``ContractError`` naming a weight that the model lacks, one of another shape, or what is missing."""
        for name, tensor in came.items():
            if name not in self.shapes:
                raise ContractError(f"load: the model has no weight {name!r}; {near(name, self.shapes)}")
            if self.shapes[name] != tuple(tensor.shape):
                raise ContractError(
                    f"load: weight {name!r} is {tuple(tensor.shape)}, the model's is {self.shapes[name]}: "
                    "the weights are of another model"
                )
        missing = sorted(min(tied) for tied in self.parameters if not tied & came.keys())
        if missing:
            example = missing[0]
            raise ContractError(f"load: {len(missing)} weights did not come, {example!r} among them: send all of them")
