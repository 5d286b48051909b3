"""Weights by name into a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tandem.base.errors import ContractError
from tandem.base.registry import near
from tandem.models.causal_lm import CausalLM
from tandem.models.fingerprint import fingerprint, joined
from tandem.models.lora import adapted_layers, base_weights, is_adapter


@torch.no_grad()
def copy_weights(model: CausalLM, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Copy (Hugging Face name, tensor) pairs in, casting to the model's dtype; every parameter must come.

    A model that is sharded over ranks takes its part of each, one with adapters those alone: what is beside them never
    changes. Gives the names that came, each once. Raises ``ContractError`` naming a weight that the model lacks, one of
    another shape, or those that did not come.
    """
    own = own_weights(model)
    adapters = any(map(is_adapter, own))
    missing = {id(parameter): name for name, parameter in model.model.named_parameters() if name in own}
    came: dict[str, None] = {}
    for name, tensor in weights:
        if name not in own:
            what = "the model takes adapters alone, not" if adapters else "the model has no weight"
            raise ContractError(f"load: {what} {name!r}; {near(name, own)}")
        if own[name].shape != tensor.shape:
            raise ContractError(
                f"load: weight {name!r} is {tuple(tensor.shape)}, the model's is {tuple(own[name].shape)}: "
                "the weights are of another model"
            )
        _copy(own[name], tensor)
        came[name] = None
        missing.pop(id(own[name]), None)
    if missing:
        names = sorted(missing.values())
        raise ContractError(f"load: {len(names)} weights did not come, {names[0]!r} among them: send all of them")
    return list(came)


def take_over(model: CausalLM, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Call ``copy_weights``, then return the fingerprint of what the model has now: what a rollout engine's ``load``
    answers.

    It is that of the names that came, joined with that of the base weights where they are adapters.
    """
    names, own = copy_weights(model, weights), model.model.state_dict()
    loaded = fingerprint((name, own[name]) for name in names)
    return joined(fingerprint(base_weights(model.model)), loaded) if adapted_layers(model) else loaded


def own_weights(model: CausalLM) -> dict[str, torch.Tensor]:
    """Return what ``copy_weights`` fills, by name: adapters alone where there are some, else all parameters and
    buffers.
    """
    parameters = dict(model.model.named_parameters(remove_duplicate=False))
    buffers = {name: tensor for name, tensor in model.model.state_dict().items() if name not in parameters}
    adapters: dict[str, torch.Tensor] = {name: tensor for name, tensor in parameters.items() if is_adapter(name)}
    return adapters or {**parameters, **buffers}


def _copy(own: torch.Tensor, whole: torch.Tensor) -> None:
    if isinstance(own, DTensor):
        mine = distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
        own.to_local().copy_(mine.to_local())
    else:
        own.copy_(whole)
