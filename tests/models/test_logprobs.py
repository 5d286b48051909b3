"""Log-probs and entropies against the naive formula, in value and gradient, for every chunking."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tandem.models.causal_lm import Head
from tandem.models.logprobs import token_logprobs

VOCAB, SIZE = 11, 6


class _Config:
    def __init__(self, **fields: float) -> None:
        self.__dict__.update(fields)


class _Model:
    """What ``Head`` reads of a model."""

    def __init__(self, projection: nn.Linear, **config: float) -> None:
        self.config, self._projection = _Config(**config), projection

    def get_output_embeddings(self) -> nn.Linear:
        return self._projection


def head(seed: int, *, bias: bool = False, dtype: torch.dtype = torch.float64, **config: float) -> Head:
    torch.manual_seed(seed)
    return Head(_Model(nn.Linear(SIZE, VOCAB, bias=bias, dtype=dtype), **config))  # type: ignore[arg-type]


def naive(hidden: torch.Tensor, head: Head, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    every = (logits / temperature).log_softmax(-1)
    return every[torch.arange(len(targets)), targets], -(every.exp() * every).sum(-1)


CONFIGS = [{}, {"final_logit_softcapping": 1.5}, {"logit_scale": 0.25}, {"logits_scaling": 4.0}]


@given(
    seed=st.integers(0, 999),
    tokens=st.integers(0, 9),
    chunk=st.sampled_from([1, 2 * VOCAB, 5 * VOCAB, 10_000]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    config=st.sampled_from(CONFIGS),
    bias=st.booleans(),
    entropy_grad=st.booleans(),
)
def test_value_and_gradient_equal_the_naive_formula(
    seed: int, tokens: int, chunk: int, temperature: float, config: dict[str, float], bias: bool, entropy_grad: bool
) -> None:
    projection = head(seed, bias=bias, **config)
    hidden = torch.randn(tokens, SIZE, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (tokens,))
    weights = torch.randn(2, tokens, dtype=torch.float64)
    inputs = [x for x in (hidden, projection.weight, projection.bias) if x is not None]
    found = token_logprobs(
        hidden,
        projection,
        targets,
        temperature=temperature,
        want_entropy=True,
        entropy_grad=entropy_grad,
        chunk_elements=chunk,
    )
    expected = naive(hidden, projection, targets, temperature)
    assert found[1] is not None
    for a, b in zip(found, expected, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
    assert found[1].requires_grad is entropy_grad

    def loss(values: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        logprobs, entropies = values
        assert logprobs is not None
        assert entropies is not None
        return (weights[0] * logprobs).sum() + ((weights[1] * entropies).sum() if entropy_grad else 0)

    for a, b in zip(torch.autograd.grad(loss(found), inputs), torch.autograd.grad(loss(expected), inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


def test_b26_the_temperature_divides_logits() -> None:
    """Logits [2, 0] at T = 0.5: log p of the first is -0.0181, neither -0.2539 nor -0.1269."""
    projection = Head(_Model(nn.Linear(1, 2, bias=False)))  # type: ignore[arg-type]
    projection.weight = torch.tensor([[2.0], [0.0]])
    logprobs, _ = token_logprobs(torch.ones(1, 1), projection, torch.tensor([0]), temperature=0.5)
    torch.testing.assert_close(logprobs, torch.tensor([-0.018150]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk", [3 * VOCAB, 10_000])
def test_bfloat16_weights_give_float32_softmax(chunk: int) -> None:
    projection = head(0, dtype=torch.bfloat16)
    hidden = torch.randn(8, SIZE, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(VOCAB, (8,))
    logprobs, entropies = token_logprobs(hidden, projection, targets, want_entropy=True, chunk_elements=chunk)
    assert entropies is not None
    assert logprobs.dtype == entropies.dtype == torch.float32
    expected = (hidden @ projection.weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_entropies_are_not_computed_unasked() -> None:
    assert token_logprobs(torch.randn(3, SIZE, dtype=torch.float64), head(1), torch.tensor([0, 1, 2]))[1] is None


@pytest.mark.parametrize("chunk", [4 * VOCAB, 10_000])
def test_autocast_computes_the_product_in_bfloat16(chunk: int) -> None:
    projection = head(0, dtype=torch.float32)
    hidden, targets = torch.randn(8, SIZE, requires_grad=True), torch.randint(VOCAB, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(hidden, projection, targets, chunk_elements=chunk)
    expected = (hidden.bfloat16() @ projection.weight.T.bfloat16()).float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected[torch.arange(8), targets])
    logprobs.sum().backward()
    assert projection.weight.grad is not None
    assert projection.weight.grad.dtype == torch.float32
