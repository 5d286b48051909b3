"""Keys and values take no more memory than the engine may give them; prompts wait, and get the same answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContractError, DeadlineError
from tandem.models.causal_lm import CausalLM
from tandem.models.kv_cost import KVCost, Rows
from tandem.models.kv_measure import measured_cost
from tandem.models.layouts.kv_store import KVStore
from tandem.rollout.hf import HfEngine
from tandem.rollout.kv_room import KVRoom
from tandem.rollout.protocol import GroupRequest, Sampling
from tests.rollout.tiny_models import bits, lm, requests, tokens

MODEL = lm()
TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values of 2 layers, 2 heads of 8, float32
SLOT = TOKEN + TOKEN // 4  # and the copy of one tensor


class Watched:
    """The bytes of keys and values that are there, looked at whenever some are taken."""

    def __init__(self) -> None:
        self.most = 0
        self._tensors: WeakSet[torch.Tensor] = WeakSet()

    def note(self, tensor: torch.Tensor) -> None:
        self._tensors.add(tensor)
        self.most = max(self.most, sum(t.nbytes for t in self._tensors))


@contextmanager
def watched() -> Iterator[Watched]:
    found, allocate = Watched(), KVStore._allocate

    def noting(self: KVStore, sized: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        made = allocate(self, sized, like)
        found.note(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVStore, "_allocate", noting)
        yield found


def engine(bound: int | None, model: CausalLM = MODEL, **options: Any) -> HfEngine:
    return HfEngine(model, kv_cache_gib=1.0 if bound is None else bound / 2**30, **options)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[GroupRequest], Sampling, int]:
    """Requests with limits of their own, and a bound that the largest of them alone needs, or a little more."""
    n, most = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 70))
    asked = requests(draw(st.integers(1, 5)), n, shortest=1, longest=20, seed=draw(st.integers(0, 99)))
    asked = [replace(request, max_tokens=draw(st.integers(1, 70))) for request in asked]
    sampling = Sampling(n=n, max_tokens=most, stop_token_ids=draw(st.sampled_from([(), (0, 1, 2)])))
    cost = KVCost(TOKEN, TOKEN // 4)
    each = [Rows(n, len(r.prompt_ids), r.limit(sampling), shared=n > 1) for r in asked]
    return asked, sampling, int(max(cost.apart([one]) for one in each) * draw(st.sampled_from([1.0, 1.3, 2.2])))


@given(streams(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_memory_stays_within_the_bound_and_answers_are_the_same(
    stream: tuple[list[GroupRequest], Sampling, int], exact: bool
) -> None:
    asked, sampling, bound = stream
    bounded = engine(bound, exact=exact, max_num_seqs=12)
    with watched() as seen:
        found, again = (list(bounded.generate(few, sampling)) for few in (asked, asked[:1]))
    assert 0 < seen.most <= bound
    compared = bits if exact else tokens
    assert compared(found) == compared(list(engine(None, exact=exact, max_num_seqs=12).generate(asked, sampling)))
    assert compared(again).items() <= compared(found).items()


def test_a_cost_is_measured_as_the_model_runs() -> None:
    assert measured_cost(lm()) == KVCost(TOKEN, TOKEN // 4)
    model = lm()
    model.take("rows")
    assert measured_cost(model) == KVCost(TOKEN, TOKEN // 4, 0, tables=False)


def test_rows_with_caches_of_their_own_wait_for_room_too() -> None:
    model, sampling = lm(), Sampling(n=2, max_tokens=10)
    asked = [replace(request, max_tokens=4 + request.key % 5) for request in requests(6)]
    model.take("rows")
    bound = 4 * (20 + 10) * SLOT  # two prompts and their samples, at the longest
    bounded, most = engine(bound, model), 0
    counted = iter(bounded.generate(asked, sampling))
    found = []
    for output in counted:
        found.append(output)
        assert bounded._memory is not None
        most = max(most, sum(bounded._memory._held.values()))
    assert 0 < most <= bound
    assert tokens(found) == tokens(list(engine(None, lm()).generate(asked, sampling)))


def test_a_prompt_that_never_fits_is_refused_with_its_tokens_and_bytes() -> None:
    asked, sampling = requests(1, 2, shortest=20), Sampling(n=2, max_tokens=70)
    need = (2 * 128 + 64) * SLOT
    reason = (
        rf"^prompt 0: keys and values of 20 prompt tokens and 2 x 70 answer tokens take {need} bytes \({TOKEN} a "
        rf"token\), and there are {need - 1} for them, as kv_cache_gib says: lower max_response_length or n, or raise "
        r"actor_rollout_ref\.rollout\.kv_cache_gib$"
    )
    with pytest.raises(ContractError, match=reason):
        list(engine(need - 1).generate(asked, sampling))
    assert len(list(engine(need).generate(asked, sampling))) == 1


def test_the_first_that_waits_is_not_passed_by_a_smaller_one() -> None:
    asked = [replace(r, max_tokens=limit) for r, limit in zip(requests(3, 1), (60, 60, 1), strict=True)]
    asked = [replace(r, prompt_ids=r.prompt_ids[:length]) for r, length in zip(asked, (3, 4, 5), strict=True)]
    order = [o.request.key for o in engine(64 * SLOT).generate(asked, Sampling(n=1, max_tokens=60))]
    assert order == [0, 1, 2]


def test_a_generation_without_room_waits_for_another_and_says_so() -> None:
    asked = [replace(request, max_tokens=limit) for request, limit in zip(requests(2), (5, 40), strict=True)]
    wide, sampling = requests(1, 3), Sampling(n=2, max_tokens=40)
    shared = engine((3 * 128 + 64) * SLOT, patience=0.2)
    first = shared.generate(asked, sampling)
    found = [next(first)]  # the other one is in flight, and its turn doesn't come
    with pytest.raises(
        DeadlineError, match=r"waited 0\.2 s for memory of keys and values; blocked by another generate"
    ):
        list(shared.generate(wide, Sampling(n=3, max_tokens=70)))
    found += first
    assert tokens(found) == tokens(list(engine(None).generate(asked, sampling)))


def test_two_generations_share_the_memory() -> None:
    asked, sampling = requests(4), Sampling(n=2, max_tokens=40)
    both: dict[str, Any] = {}
    bound = (2 * 64 + 64) * SLOT
    shared = engine(bound)

    def run(name: str) -> None:
        both[name] = tokens(list(shared.generate(asked, sampling)))

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in ("a", "b")]
    with watched() as seen:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert both["a"] == both["b"] == tokens(list(engine(None).generate(asked, sampling)))
    assert seen.most <= bound


def test_a_generation_that_nobody_ends_keeps_no_room() -> None:
    asked, sampling = requests(4, 2), Sampling(n=2, max_tokens=40)
    once = engine((2 * 64 + 64) * SLOT, patience=0.2)
    left = once.generate(asked, sampling)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert len(list(once.generate(asked, sampling))) == 4


def test_samples_of_a_prompt_have_its_keys_and_values_once() -> None:
    cost = KVCost(100, 10)
    assert cost.together([Rows(8, 64, 128, shared=True)]) == 110 * (8 * 128 + 64)
    assert cost.together([Rows(8, 64, 64, shared=False)]) == 110 * 8 * 128
    assert KVRoom(cost, None, "", apart=False).slots is None
