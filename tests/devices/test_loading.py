"""A model of several ranks goes to their devices layer by layer: none of them ever has it whole."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init

from tandem.models.loading import as_causal_lm, new_model
from tests.devices import sim
from tests.train.conftest import LLAMA, build_engine, on_ranks

__all__ = ["on_ranks"]

LAYERS = 6


def moved(params: Sequence[nn.Parameter], buffers: Sequence[torch.Tensor], device: torch.device) -> None:
    """What ``fully_shard`` does before it cuts a layer; torch's own writes ``.data``, which ``sim`` lacks."""
    for tensor in (*params, *buffers):
        there = tensor.detach().to(device)
        param = isinstance(tensor, nn.Parameter)
        torch.utils.swap_tensors(tensor, nn.Parameter(there, tensor.requires_grad) if param else there)


def test_a_device_has_its_shards_and_one_layer_at_most_while_a_model_is_loaded(
    on_ranks: Callable[..., None],
) -> None:
    """Embedding and head, of their own or one, are cut as one more layer. Each rank is a process with a ``sim:0``."""

    def loaded(rank: int, tied: bool) -> None:
        torch.get_device_module("sim").set_device(0)
        shape = {**LLAMA, "num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
        model = as_causal_lm(new_model(shape, seed=0))
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
        total = sum(p.nbytes for p in whole.values())
        layer = sum(p.nbytes for p in model.layers[0].parameters())
        rest = total - LAYERS * layer
        gc.collect()
        account = sim.accounts[0]
        account.reset_peak()
        before = account.allocated
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_fsdp_init, "_move_states_to_device", moved)
            engine = build_engine(model=model, mesh=init_device_mesh("sim", (2,)), device="sim:0")
        gc.collect()
        buffers = sum(b.nbytes for b in model.buffers())
        assert account.allocated - before <= total // 2 + buffers + 1024
        peak = account.peak - before
        assert peak <= total // 2 + 2 * max(layer, rest) + buffers + 1024 < total
        for name, p in engine.model.named_parameters():
            part = whole[name].chunk(2)[rank]
            assert torch.equal(p.to_local().cpu()[: len(part)], part), name  # type: ignore[attr-defined]

    def body(mesh: DeviceMesh, rank: int) -> None:
        for tied in (False, True):
            loaded(rank, tied)

    on_ranks(2, body)
