"""A model that is split over ranks is the whole one: same log-probs, losses, gradients and weights within rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tandem.base.errors import DataError
from tandem.models.head.logprobs import sum_pi_squared, token_logprobs, top_logprobs
from tandem.models.head.projection import Head, Transform
from tandem.models.head.vocabulary import SplitVocabulary
from tandem.models.loading import ComputeType, as_causal_lm, new_model
from tandem.models.token_ids import TokenIds
from tandem.train import checkpoint
from tandem.train.sharding import rank_mesh
from tests.train.agreeing import OBJECTIVE, agree, same
from tests.train.conftest import GPT2, LLAMA

MakeAny = Callable[..., Any]

EVEN = {**LLAMA, "vocab_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {
    "llama": {**EVEN, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**EVEN, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**EVEN, "model_type": "qwen3", "head_dim": 8},
}
KNOWN = TokenIds.among([*range(5), *range(6, 21)])
"""Of the 24 that are embedded; the last rows and a hole among the others are no tokens."""


def model_of(shape: dict[str, Any], dtype: ComputeType = "float32") -> Any:
    """Weights of every kind away from where they start: biases are not 0, norms not 1."""
    plain = new_model(shape, seed=0)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise) * 0.1)
    return as_causal_lm(plain, dtype=dtype, tokens=KNOWN)


def test_two_ranks_of_one_model_give_what_one_gives(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny
) -> None:
    whole = make_batch([4, 6, 3, 9])
    whole.batch["responses"] = whole.ragged("responses").like(whole.ragged("responses").values % 5)

    def body(mesh: DeviceMesh, rank: int) -> None:
        mesh = rank_mesh("cpu", 2, 2)
        for shape in SHAPES.values():
            many = make_engine(model=model_of(shape), mesh=mesh, max_tokens=26, gradient_checkpointing=True)
            agree(make_engine(model=model_of(shape)), many, whole, [0, 1, 2, 3])
            embedding = many.shards()["model.embed_tokens.weight"]
            assert embedding.shape == (12, 16)  # each rank has its half alone
        half = make_engine(model=model_of(SHAPES["qwen3"], "bfloat16"), mesh=mesh)
        half.forward_backward(whole, OBJECTIVE)
        assert half.optim_step(OBJECTIVE.denominator(whole)).applied
        expected = make_engine(model=model_of(SHAPES["qwen3"])).forward(whole, ["logprobs"])["logprobs"].values
        found = make_engine(model=model_of(SHAPES["qwen3"], "bfloat16"), mesh=mesh).forward(whole, ["logprobs"])
        torch.testing.assert_close(found["logprobs"].values, expected, atol=0.05, rtol=0.05)
        for shape, words in (
            (GPT2, "the model family 'gpt2' can't be split"),
            (LLAMA, "1 heads of keys and values can't be split over 2 devices"),
        ):
            with pytest.raises(DataError, match=words):
                make_engine(shape, mesh=mesh)

    on_ranks(2, body)


def test_two_models_of_two_ranks_each_give_what_one_gives_and_another_number_goes_on(
    on_ranks: MakeAny, make_batch: MakeAny, make_engine: MakeAny, tmp_path: Path
) -> None:
    """Samples differ between models and not inside one; tags, checkpoints and models beside follow the split."""
    whole, shape, root = make_batch([4, 6, 3, 9, 12]), SHAPES["qwen3"], tmp_path / "checkpoints"
    whole.batch["responses"] = whole.ragged("responses").like(whole.ragged("responses").values % 5)

    def first(mesh: DeviceMesh, rank: int) -> None:
        mesh = rank_mesh("cpu", 4, 2)
        one = make_engine(model=model_of(shape))
        many = make_engine(model=model_of(shape), mesh=mesh, max_tokens=20)
        agree(one, many, whole, [[0, 1, 2, 3], [4]][rank // 2])
        checkpoint.save(root, 1, tensors={"actor": many.state_dict()}, facts={}, keep=1)
        other = make_engine(shape, seed=5)
        tag = many.shards_of(dict(other.model.model.named_parameters()))
        for name, shard in many.shards().items():
            shard.copy_(tag[name])
        same(other, many)
        beside = many.beside(as_causal_lm(new_model(GPT2, seed=3)))
        alone = make_engine(GPT2, seed=3).forward(whole, ["logprobs"])["logprobs"].values
        torch.testing.assert_close(beside.forward(whole, ["logprobs"])["logprobs"].values, alone, atol=2e-5, rtol=1e-4)

    def second(mesh: DeviceMesh, rank: int) -> None:
        one, many = make_engine(shape, seed=7), make_engine(shape, seed=8, mesh=rank_mesh("cpu", 2, 2))
        for engine in (one, many):
            state = {"actor": engine.state_dict()}
            checkpoint.open_checkpoint(root / "step_00000001").load_tensors(state)
            engine.load_state_dict(state["actor"])
            assert engine.updates == 1
        same(one, many)
        agree(one, many, whole, [0, 1, 2, 3, 4])

    on_ranks(4, first)
    on_ranks(2, second)


def test_what_is_read_off_a_split_head_is_what_the_whole_one_gives(on_ranks: MakeAny) -> None:
    """In float64, with holes, a bias, a softcap, a temperature, several tokens in each place, chunks of each size."""

    def body(mesh: DeviceMesh, rank: int) -> None:
        noise = torch.Generator().manual_seed(0)
        for case in range(8):
            rows, places = 3 + case, 7
            own = slice(rank * rows, (rank + 1) * rows)
            shapes = ((2 * rows, 4), (2 * rows,), (places, 4))
            weight, bias, hidden = (torch.randn(shape, generator=noise).double() for shape in shapes)
            holes = torch.tensor([1, 2 * rows - 1])
            targets = torch.randint(2 * rows, (places, 2), generator=noise)
            targets[torch.isin(targets, holes)] = 0
            holes_here = holes[(holes >= own.start) & (holes < own.stop)] - own.start
            split = SplitVocabulary(mesh.get_group(), own.start, rows, holes_here)
            rest = (Transform(0.5, 3.0 if case % 2 else None), 2 * rows, holes)
            chunk = (1, 2 * rows, 10_000)[case % 3]
            expected = read_off(Head(weight, bias, *rest), hidden, targets, chunk)
            found = read_off(Head(weight[own], bias[own], *rest, split), hidden, targets, chunk)
            expected[-2:] = [gradient[own] for gradient in expected[-2:]]
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)

    on_ranks(2, body)


def read_off(head: Head, hidden: torch.Tensor, targets: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """Everything that is read off a head, and gradients of its input, weight and bias."""
    assert head.bias is not None
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head.weight, head.bias)]
    states, head = leaves[0], replace(head, weight=leaves[1], bias=leaves[2])
    most = head.size - 1
    logprobs, entropies = token_logprobs(
        states, head, targets, temperature=0.7, entropy_grad=True, chunk_elements=chunk
    )
    assert entropies is not None
    (logprobs.sin().sum() + entropies.square().sum()).backward()
    top = top_logprobs(states, head, most // 2, below=most, temperature=0.7, chunk_elements=chunk)
    squares = sum_pi_squared(states, head, temperature=0.7, chunk_elements=chunk)
    return [logprobs, entropies, *top, squares, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
