"""A causal LM with Megatron-core's transformer, run as every other one: packed rows, attention by layout, one head.

What is Megatron's: the layers, their splitting over ranks (Shoeybi et al., arXiv 1909.08053), the embedding and the
head. In the place of its attention kernels stands the layout, which knows where documents begin and end, and positions
come with the tokens. So nothing here needs Transformer Engine, whose kernels of packed rows are for GPUs alone.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore  # what torch.distributed.HashStore is; mypy can't see that one
from torch.nn import functional

from tandem.base.device_kinds import CPU
from tandem.base.errors import ContractError, DataError
from tandem.columns.ragged import Ragged
from tandem.models.causal_lm import CausalLM
from tandem.models.head.logprobs import token_logprobs
from tandem.models.head.projection import Head
from tandem.models.head.vocabulary import SplitVocabulary
from tandem.models.layouts.attention import AttentionLayout
from tandem.models.layouts.packing import PackedSamples, pack_samples
from tandem.models.megatron import fault_for_megatron
from tandem.models.probe import next_tokens, ordinary_tokens
from tandem.train.megatron.names import head_size, pieces
from tandem.train.tensor_parallel import holes_among

_TOLERANCE = 1e-3
"""Largest difference of states and log-probs from those of transformers, in units of their spread."""


class MegatronLM(CausalLM):
    """The model of ``source``, which transformers made, as the ranks of ``group`` have it among them; None: this one.

    It takes the weights over, on ``device``, and leaves ``source`` without any. Raises ``DataError`` for a model that
    Megatron-core does not run as transformers does, which a few tokens show.
    """

    def __init__(self, source: CausalLM, group: dist.ProcessGroup | None, device: torch.device) -> None:
        super().__init__(
            source.model,
            source.compute_dtype,
            route=source.route,
            transform=source.transform,
            tokens=source.tokens,
        )
        self._require_runnable(source)
        if device.type == CPU:  # what it recommends for CUDA's streams
            warnings.filterwarnings("ignore", "When using async grad allreduce", UserWarning)
        self._rank, self.ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        attention: Any = source.layers[0].self_attn
        rotary: Any = source.decoder.rotary_emb
        config = source.model.config
        tied = source.model.get_output_embeddings().weight is source.model.get_input_embeddings().weight
        biased, normed = attention.q_proj.bias is not None, hasattr(attention, "q_norm")
        self.pieces = dict(pieces(config, self.ranks, tied=tied, biased=biased, normed=normed))
        core = _core_model(config, group, tied=tied, biased=biased, normed=normed)
        self.core = MegatronDecoder(core, rotary.inv_freq, config)
        self.tied, self.vocabulary = tied, int(config.vocab_size)
        if group is not None and self.ranks > 1:
            rows = self.vocabulary // self.ranks
            first = rows * self._rank
            self.split = SplitVocabulary(group, first, rows, holes_among(source.tokens, first, rows, device))
        self.load(dict(source.model.named_parameters(remove_duplicate=False)))
        self.core.to(device)
        if self.holes is not None:
            self.holes = self.holes.to(device)
        self._require_same(source)
        plain: Any = self.model
        plain.to("meta")
        plain.tie_weights()

    # --- weights -----------------------------------------------------------------------------------------------------

    @property
    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by the names that Megatron-core has for them."""
        return dict(self.core.gpt.named_parameters())

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of each whole weight, by Hugging Face names."""
        own = self.parameters_by_name
        for name, piece in self.pieces.items():
            piece.of(own[piece.parameter]).copy_(self.own_part(name, weights))

    def own_part(self, name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's part of the whole weight ``name``, one of ``weights``."""
        piece = self.pieces[name]
        if name not in weights or tuple(weights[name].shape) != piece.shape:
            has = f"is {tuple(weights[name].shape)}" if name in weights else "is missing"
            raise ContractError(f"weight {name!r} {has}, the trained one is {piece.shape}")
        return piece.part(weights[name].detach(), self._rank, self.ranks)

    # --- the model's parts -------------------------------------------------------------------------------------------

    @property
    def decoder(self) -> Any:
        """Megatron-core's embedding and layers."""
        return self.core

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of Megatron-core's decoder."""
        found: nn.ModuleList = self.core.gpt.decoder.layers
        return found

    @property
    def head(self) -> Head:
        """What is read off the hidden states: this rank's part of the vocabulary."""
        gpt = self.core.gpt
        weight = gpt.shared_embedding_or_output_weight() if self.tied else gpt.output_layer.weight
        count = self.vocabulary if self.tokens is None else self.tokens.count
        return Head(weight, None, self.transform, count, self.holes, self.split)

    def computing(self) -> torch.autocast:
        """Return the context in which matrix products run in ``compute_dtype``; weights stay as they are."""
        device = self.core.inv_freq.device.type
        return torch.autocast(device, dtype=self.compute_dtype, enabled=self.compute_dtype == torch.bfloat16)

    # --- that it is the same model -----------------------------------------------------------------------------------

    def _require_runnable(self, source: CausalLM) -> None:
        reason = fault_for_megatron(source.model.config.to_dict())
        if reason is None and source.route != "packed":
            reason = "its documents can't stand in one row"
        if reason is not None:
            raise DataError(f"strategy megatron can't train this model: {reason}. Write strategy: fsdp2")

    @torch.no_grad()
    def _require_same(self, source: CausalLM) -> None:
        """Refuse weights that come to something else here than in transformers."""
        compute = self.compute_dtype
        self.compute_dtype = source.compute_dtype = torch.float32
        try:
            found = self._probed(self, self.core.inv_freq.device)
            expected = self._probed(source, source.model.device)
        finally:
            self.compute_dtype = source.compute_dtype = compute
        for what, own, other in zip(("hidden states", "log-probs"), found, expected, strict=True):
            off, spread = float((own - other).abs().max()), float(other.std(correction=0))
            if not off <= _TOLERANCE * spread + 1e-6:
                raise DataError(
                    f"strategy megatron can't train a model of the family {source.family!r}: its {what} differ from "
                    f"those of transformers by {off / (spread or 1.0):.2g} of their spread. Write strategy: fsdp2"
                )

    def _probed(self, model: CausalLM, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        samples = _probe(model, device)

        def read(hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
            states = hidden[samples.read]
            return states, token_logprobs(states, head, samples.targets)[0]

        states, logprobs = model(samples.input_ids, samples.positions, samples.layout, read)
        return states.float().cpu(), logprobs.float().cpu()


class MegatronDecoder(nn.Module):
    """Megatron-core's embedding and layers, called as a decoder of transformers is. ``inv_freq`` is the latter's."""

    inv_freq: torch.Tensor

    def __init__(self, gpt: nn.Module, inv_freq: torch.Tensor, config: Any) -> None:
        super().__init__()
        self.gpt: Any = gpt
        self.config = config
        self.register_buffer("inv_freq", inv_freq.detach().clone().float(), persistent=False)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: AttentionLayout, use_cache: bool = False
    ) -> SimpleNamespace:
        """Run a row of tokens (1, T) at positions (1, T); ``last_hidden_state`` is (1, T, d)."""
        angles = position_ids[0, :, None].float() * self.inv_freq
        rotary = torch.cat((angles, angles), dim=-1)[:, None, None]  # (T, 1, 1, size of a head)
        states = self.gpt.embedding(input_ids=input_ids, position_ids=None)  # (T, 1, d): Megatron's order
        # What says who sees whom travels where Megatron-core has its mask.
        states = self.gpt.decoder(hidden_states=states, attention_mask=layout, rotary_pos_emb=rotary)
        return SimpleNamespace(last_hidden_state=states.transpose(0, 1))


class LayoutAttention(nn.Module):
    """What Megatron-core's layers call in the place of its attention kernels; delegates to the layout."""

    def __init__(self, config: Any, layer_number: int, **options: Any) -> None:
        super().__init__()
        self._layer = layer_number - 1

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
    ) -> torch.Tensor:
        """Attend: (T, 1, H, D), (T, 1, K, D) and (T, 1, K, D) give (T, 1, H D)."""
        rows = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        found: torch.Tensor = attention_mask.attend(self._layer, *rows, query.shape[-1] ** -0.5, None)
        return found.transpose(0, 1).flatten(2)


class _Alone:
    """A group of this rank only: Megatron-core asks such a group for nothing else."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _core_model(config: Any, group: dist.ProcessGroup | None, *, tied: bool, biased: bool, normed: bool) -> nn.Module:
    """Return Megatron-core's model of the shape that ``config`` of transformers has, its weights not set."""
    if not dist.is_initialized():  # it takes no group of ranks for one otherwise
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no Transformer Engine and no Apex
        core: Any = importlib.import_module("megatron.core.models.gpt")
        specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        groups: Any = importlib.import_module("megatron.core.process_groups_config")
        layer = specs.get_gpt_layer_local_spec(qk_layernorm=normed, normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = LayoutAttention
        alone: Any = _Alone()
        others = dict.fromkeys(("pp", "cp", "tp_cp", "ep", "dp", "dp_cp"), alone)
        found: nn.Module = core.GPTModel(
            _shape(config, 1 if group is None else dist.get_world_size(group), biased, normed),
            layer,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type="none",  # positions come with the tokens
            share_embeddings_and_output_weights=tied,
            pg_collection=groups.ProcessGroupCollection(tp=alone if group is None else group, embd=None, **others),
        )
    return found


def _shape(config: Any, ranks: int, biased: bool, normed: bool) -> Any:
    """Return Megatron-core's config: a decoder of Llama's kind, without dropout and without fused CUDA kernels."""
    shapes: Any = importlib.import_module("megatron.core.transformer")
    return shapes.TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=biased,
        qk_layernorm=normed,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )


def _probe(model: CausalLM, device: torch.device) -> PackedSamples:
    """Return two short prompts with two answers each."""
    known = model.tokens
    tokens = (t for t in ordinary_tokens(model) if known is None or (t < known.count and t not in known.holes))
    prompts = [next_tokens(tokens, length) for length in (4, 3)]
    responses = [next_tokens(tokens, length) for length in (3, 2, 3, 2)]
    return pack_samples(
        Ragged.from_rows([prompts[0], prompts[0], prompts[1], prompts[1]]),
        Ragged.from_rows(responses),
        Ragged.from_rows([torch.ones(len(response), dtype=torch.bool) for response in responses]),
        device=device,
    )
