"""Log-probs and entropies against the naive formula, in value and gradient, for every chunking."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tandem.models.head.logprobs import sum_pi_squared, token_logprobs, top_logprobs
from tandem.models.head.projection import Head, Transform, measured_transform
from tandem.models.loading import new_model

VOCAB, SIZE = 11, 6


def head(seed: int, *, bias: bool = False, dtype: torch.dtype = torch.float64, **transforms: float) -> Head:
    torch.manual_seed(seed)
    projection = nn.Linear(SIZE, VOCAB, bias=bias, dtype=dtype)
    return Head(projection.weight, projection.bias, Transform(**transforms))


def naive(hidden: torch.Tensor, head: Head, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.transform.scale
    if head.transform.softcap is not None:
        logits = head.transform.softcap * torch.tanh(logits / head.transform.softcap)
    every = (logits / temperature).log_softmax(-1)
    return every[torch.arange(len(targets)), targets], -(every.exp() * every).sum(-1)


TRANSFORMS = [{}, {"softcap": 1.5}, {"scale": 0.25}, {"scale": 4.0, "softcap": 2.0}]


@given(
    seed=st.integers(0, 999),
    tokens=st.integers(0, 9),
    chunk=st.sampled_from([1, 2 * VOCAB, 5 * VOCAB, 10_000]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    transforms=st.sampled_from(TRANSFORMS),
    bias=st.booleans(),
)
def test_sums_of_squared_probabilities_equal_the_naive_formula(
    seed: int, tokens: int, chunk: int, temperature: float, transforms: dict[str, float], bias: bool
) -> None:
    projection = head(seed, bias=bias, **transforms)
    hidden = torch.randn(tokens, SIZE, dtype=torch.float64, requires_grad=True)
    found = sum_pi_squared(hidden, projection, temperature=temperature, chunk_elements=chunk)
    every = [naive(hidden, projection, torch.full((tokens,), token), temperature)[0] for token in range(VOCAB)]
    torch.testing.assert_close(found, torch.stack(every).exp().square().sum(0).detach())
    assert not found.requires_grad


@given(
    seed=st.integers(0, 999),
    tokens=st.integers(0, 9),
    chunk=st.sampled_from([1, 2 * VOCAB, 5 * VOCAB, 10_000]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    transforms=st.sampled_from(TRANSFORMS),
    bias=st.booleans(),
    entropy_grad=st.booleans(),
)
def test_value_and_gradient_equal_the_naive_formula(
    seed: int, tokens: int, chunk: int, temperature: float, transforms: dict[str, float], bias: bool, entropy_grad: bool
) -> None:
    projection = head(seed, bias=bias, **transforms)
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
    projection = Head(torch.tensor([[2.0], [0.0]]))
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


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "gemma2", "final_logit_softcapping": 0.05},
        {"model_type": "granite", "logits_scaling": 8.0},
        {"model_type": "cohere", "logit_scale": 0.0625},
    ],
)
def test_the_head_does_to_logits_what_the_architecture_does(shape: dict[str, object]) -> None:
    model = new_model({**SMALL, **shape}, seed=0)
    ids = torch.tensor([[1, 2, 3, 4]])
    hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0]
    expected = model(input_ids=ids).logits[0]
    output = model.get_output_embeddings()
    found = Head(output.weight, output.bias, measured_transform(model, model.get_decoder()))
    torch.testing.assert_close(found.logits(hidden), expected)
    logprobs, _ = token_logprobs(hidden, found, ids[0])
    torch.testing.assert_close(logprobs, expected.log_softmax(-1).gather(1, ids.T)[:, 0])


@pytest.mark.parametrize("chunk", [1, 3 * VOCAB, 10_000])
@pytest.mark.parametrize("transforms", TRANSFORMS)
def test_several_targets_in_a_place_are_the_naive_formula(chunk: int, transforms: dict[str, float]) -> None:
    """Also where a token is asked for twice."""
    projection = head(5, bias=True, **transforms)
    hidden = torch.randn(6, SIZE, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (6, 4))
    targets[0] = 3
    weights = torch.randn(6, 4, dtype=torch.float64)
    found, _ = token_logprobs(hidden, projection, targets, temperature=0.7, chunk_elements=chunk)
    expected = torch.stack([naive(hidden, projection, column, 0.7)[0] for column in targets.T], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    inputs = [x for x in (hidden, projection.weight, projection.bias) if x is not None]
    pairs = (torch.autograd.grad((weights * x).sum(), inputs) for x in (found, expected))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("chunk", [1, 3 * VOCAB, 10_000])
def test_the_likeliest_tokens_are_those_of_the_whole_softmax(chunk: int) -> None:
    projection, hidden = head(2, softcap=1.5), torch.randn(7, SIZE, dtype=torch.float64)
    every = torch.stack([naive(hidden, projection, torch.full((7,), v), 0.7)[0] for v in range(VOCAB)], dim=1)
    for below in (VOCAB, 6):
        values, ids = top_logprobs(hidden, projection, 4, below=below, temperature=0.7, chunk_elements=chunk)
        best = every[:, :below].topk(4)
        assert torch.equal(ids, best.indices)
        torch.testing.assert_close(values, best.values, atol=1e-12, rtol=1e-10)
