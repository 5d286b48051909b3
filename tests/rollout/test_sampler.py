"""Draws: streams of uniforms by seed and counter, the distribution sampled from, and the log-prob that goes with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.rollout.protocol import Sampling
from tandem.rollout.sampler import draw, uniforms

INT63 = st.integers(0, 2**63 - 1)


def sampling(**options: object) -> Sampling:
    return Sampling(n=1, max_tokens=1, **options)  # type: ignore[arg-type]


def numbers(count: int, seed: int = 5) -> torch.Tensor:
    return uniforms(torch.full((count,), seed), torch.arange(count))


def test_uniforms_of_a_published_splitmix_stream() -> None:
    # The stream of state 0 begins with 0xE220A8397B1DCDAF (Vigna's reference); here the seed itself is mixed first.
    mask, x = 2**64 - 1, 0xE220A8397B1DCDAF
    assert mix_of(0x9E3779B97F4A7C15) == x
    expected = [((mix_of((mix_of(9) + k * 0x9E3779B97F4A7C15) & mask) >> 11) + 0.5) / 2**53 for k in (1, 2, 3)]
    assert uniforms(torch.tensor([9, 9, 9]), torch.arange(3)).tolist() == expected


def mix_of(x: int) -> int:
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@given(seeds=st.lists(INT63, min_size=1, max_size=8), counter=st.integers(0, 10**6))
def test_a_number_depends_on_its_seed_and_counter_only(seeds: list[int], counter: int) -> None:
    together = uniforms(torch.tensor(seeds), torch.full((len(seeds),), counter))
    assert bool(((together > 0) & (together < 1)).all())
    for seed, value in zip(seeds, together.tolist(), strict=True):
        assert uniforms(torch.tensor([seed]), torch.tensor([counter])).item() == value


def test_near_seeds_and_near_counters_give_unrelated_numbers() -> None:
    table = torch.stack([numbers(400, seed) for seed in range(400)])
    assert table.unique().numel() == table.numel()
    assert table.mean().item() == pytest.approx(0.5, abs=0.005)
    for rows in (table, table.T):
        centred = rows - 0.5
        assert abs((centred[1:] * centred[:-1]).mean().item()) < 0.001  # 4 standard deviations are 0.0008


@pytest.mark.parametrize("vocabulary", [2, 37, 256, 257, 1000])
def test_frequencies_are_the_distribution(vocabulary: int) -> None:
    count = 40_000
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    tokens, logprobs = draw(logits, sampling(temperature=1.3), numbers(count), torch.zeros(count, dtype=torch.int64))
    expected = (logits[0] / 1.3).log_softmax(-1)
    assert torch.allclose(logprobs, expected[tokens], atol=1e-5)
    frequency = torch.bincount(tokens, minlength=vocabulary) / count
    deviation = (expected.exp() * (1 - expected.exp()) / count).sqrt()
    assert bool(((frequency - expected.exp()).abs() < 5 * deviation + 1e-4).all())


@given(seed=st.integers(0, 1000), rows=st.integers(1, 4), vocabulary=st.integers(1, 600))
def test_owners_draw_what_repeated_rows_draw(seed: int, rows: int, vocabulary: int) -> None:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    owner = torch.arange(rows).repeat_interleave(3)
    uniform = numbers(3 * rows, seed)
    shared, repeated = draw(logits, sampling(), uniform, owner), draw(logits[owner], sampling(), uniform)
    assert torch.equal(shared[0], repeated[0])
    assert torch.equal(shared[1], repeated[1])


@pytest.mark.parametrize("uniform", [2.0**-54, 0.5, 1 - 2.0**-53])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    for place in (0, 1, 299, 599):
        logits = torch.full((1, 600), -torch.inf)
        logits[0, place] = 3.0
        tokens, logprobs = draw(logits, sampling(), torch.tensor([uniform], dtype=torch.float64))
        assert (tokens.item(), logprobs.item()) == (place, 0.0)


def test_b26_temperature_divides_the_logits_not_the_logprob() -> None:
    tokens, logprobs = draw(torch.tensor([[2.0, 0.0]]), sampling(temperature=0.5), torch.tensor([0.3]).double())
    assert tokens.item() == 0
    assert logprobs.item() == pytest.approx(-0.0181, abs=1e-4)
    _, rare = draw(torch.tensor([[2.0, 0.0]]), sampling(temperature=0.5), torch.tensor([0.999]).double())
    assert rare.item() == pytest.approx(math.log(1 - math.exp(-0.0181)), abs=1e-2)


def test_b29_the_logprob_is_of_the_stated_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    everyone = torch.zeros(1000, dtype=torch.int64)
    for of, mass in (("sampled", 0.8), ("full", 1.0)):
        tokens, logprobs = draw(logits, sampling(top_p=0.8, logprobs_of=of), numbers(1000), everyone)
        assert set(tokens.tolist()) == {0, 1}
        expected = torch.tensor([0.5 / mass, 0.3 / mass]).log()
        assert torch.allclose(logprobs, expected[tokens], atol=1e-6)


@given(
    seed=st.integers(0, 100),
    vocabulary=st.sampled_from([5, 300, 3000]),
    top_k=st.sampled_from([-1, 1, 4, 2000]),
    top_p=st.sampled_from([0.05, 0.5, 0.999, 1.0]),
    spread=st.sampled_from([0.001, 3.0]),
)
def test_truncation_keeps_the_fewest_likeliest_tokens(
    seed: int, vocabulary: int, top_k: int, top_p: float, spread: float
) -> None:
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    probs, order = logits[0].double().softmax(-1).sort(descending=True)
    probs = probs[:top_k] if top_k > 0 else probs
    probs = probs / probs.sum()
    allowed = int((probs.cumsum(0) - probs < top_p).sum())
    tokens, logprobs = draw(
        logits, sampling(top_k=top_k, top_p=top_p), numbers(200, seed), torch.zeros(200, dtype=torch.int64)
    )
    ranks = order.argsort()[tokens]
    assert int(ranks.max()) <= allowed  # one more than that only where a float32 sum ends on the other side
    assert torch.allclose(logprobs.exp(), (probs / probs[:allowed].sum())[ranks].float(), rtol=2e-3)


def test_greedy_takes_the_likeliest_token_at_its_own_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 2.0, 1.0]])
    tokens, logprobs = draw(logits, sampling(greedy=True, temperature=0.0, top_p=0.5), numbers(2))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1)[[0, 1], tokens])


def test_half_precision_logits_give_float32_logprobs() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs = draw(logits, sampling(), numbers(4))
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, logits.float().log_softmax(-1)[torch.arange(4), tokens], atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_no_distribution_says_so_and_leaves_the_others_alone(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[0, 7] = bad
    for options in ({}, {"greedy": True}):
        _, logprobs = draw(logits, sampling(**options), numbers(2))
        assert bool(logprobs[0].isnan())
        assert logprobs[1].item() == pytest.approx(-math.log(300), abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"max_tokens": 0}, {"temperature": 0.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_k": -2}],
)
def test_impossible_sampling_is_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ContractError, match=next(iter(options))):
        Sampling(**{"n": 1, "max_tokens": 1, **options})  # type: ignore[arg-type]
