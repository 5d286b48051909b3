"""Where each weight of a Hugging Face model lies in Megatron-core's parameters, as one of several ranks has them.

Megatron-core fuses what is multiplied with the same input. Of the heads that share keys and values, a *group*, it has
the queries, then the key, then the value; of a gated MLP each rank has its part of the gate, then its part of what is
gated. Other matrices have other names only. What is said here of a parameter holds of anything of its shape, such as a
gradient or a moment estimate: each weight is a view of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """A weight of a Hugging Face model: a part of what Megatron-core calls ``parameter``.

    ``shape`` is that of the whole weight, ``seen`` the same with its rows taken apart into groups, where the parameter
    has other rows between them. ``cut``: the dimension of ``seen`` that ranks share; None: each has all. ``rows``
    (start, end) are those of the parameter's ``per`` rows, counted on one rank: of each group, where there are some,
    else of all; None: it is the whole parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    seen: tuple[int, ...]
    cut: int | None = None
    rows: tuple[int, int] | None = None
    per: int = 0

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the weight, a view of ``parameter``, shaped as ``seen`` but for ``cut``."""
        if self.rows is None:
            return parameter
        start, end = self.rows
        if len(self.seen) == len(self.shape):
            return parameter.narrow(0, start, end - start)
        groups: torch.Tensor = parameter.unflatten(0, (-1, self.per))
        return groups.narrow(1, start, end - start)

    def part(self, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return what ``rank`` of ``ranks`` has of a ``whole`` weight, shaped as what ``of`` returns."""
        apart = whole.reshape(self.seen)
        if self.cut is None:
            return apart
        size = self.seen[self.cut] // ranks
        return apart.narrow(self.cut, size * rank, size)


def pieces(config: Any, ranks: int, *, tied: bool, biased: bool, normed: bool) -> Iterator[tuple[str, Piece]]:
    """Yield each weight by its Hugging Face name, in the order of the model, for ``ranks`` that split it.

    ``config`` is the model's of transformers; ``tied``: the head is the embedding; ``biased``: queries, keys and values
    have a bias; ``normed``: queries and keys have a norm.
    """
    hidden, vocabulary = config.hidden_size, (config.vocab_size, config.hidden_size)
    embedding, last = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
    yield "model.embed_tokens.weight", Piece(embedding, vocabulary, vocabulary, 0)
    for layer in range(config.num_hidden_layers):
        for name, piece in _layer(config, ranks, biased, normed):
            own = f"decoder.layers.{layer}.{piece.parameter}"
            yield (
                f"model.layers.{layer}.{name}",
                Piece(own, piece.shape, piece.seen, piece.cut, piece.rows, piece.per),
            )
    yield "model.norm.weight", Piece(last, (hidden,), (hidden,))
    yield "lm_head.weight", Piece(embedding if tied else "output_layer.weight", vocabulary, vocabulary, 0)


def head_size(config: Any) -> int:
    """Return the size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _layer(config: Any, ranks: int, biased: bool, normed: bool) -> Iterator[tuple[str, Piece]]:
    hidden, inside, size = config.hidden_size, config.intermediate_size, head_size(config)
    for name, own in (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "pre_mlp_layernorm")):
        yield f"{name}.weight", Piece(f"{own}.weight", (hidden,), (hidden,))
    yield from _attention(config, biased)
    for name in ("q", "k") if normed else ():
        yield f"self_attn.{name}_norm.weight", Piece(f"self_attention.{name}_layernorm.weight", (size,), (size,))
    across = (hidden, config.num_attention_heads * size)
    yield "self_attn.o_proj.weight", Piece("self_attention.linear_proj.weight", across, across, 1)
    own = inside // ranks
    for place, name in enumerate(("gate_proj", "up_proj")):
        rows = (place * own, (place + 1) * own)
        yield (
            f"mlp.{name}.weight",
            Piece("mlp.linear_fc1.weight", (inside, hidden), (inside, hidden), 0, rows, 2 * own),
        )
    yield "mlp.down_proj.weight", Piece("mlp.linear_fc2.weight", (hidden, inside), (hidden, inside), 1)


def _attention(config: Any, biased: bool) -> Iterator[tuple[str, Piece]]:
    """Yield queries, keys and values: of each group so many rows of the fused parameter."""
    size, groups = head_size(config), config.num_key_value_heads
    queries = config.num_attention_heads // groups * size
    borders = {"q": (0, queries), "k": (queries, queries + size), "v": (queries + size, queries + 2 * size)}
    for name, (start, end) in borders.items():
        for kind, behind in {"weight": (config.hidden_size,), **({"bias": ()} if biased else {})}.items():
            rows = end - start
            yield (
                f"self_attn.{name}_proj.{kind}",
                Piece(
                    f"self_attention.linear_qkv.{kind}",
                    (groups * rows, *behind),
                    (groups, rows, *behind),
                    0,
                    (start, end),
                    queries + 2 * size,
                ),
            )
