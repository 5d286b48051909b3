"""Weight tags: bit-exact, always switched back, never trained under another tag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.weights.store import WeightStore


def live_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 4, generator=generator),
        "b": torch.randn(5, generator=generator).bfloat16(),
    }


def bits(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    views = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    return [t.view(views[t.dtype]).flatten().tolist() for t in weights.values()]


def test_switch_is_bit_exact_and_returns() -> None:
    live = live_weights()
    store = WeightStore(live)
    store.save("ref")
    reference = bits(live)
    live["a"].mul_(1.1)
    trained = bits(live)
    with store.using("ref"):
        assert bits(live) == reference
        assert store.in_place == "ref"
    assert bits(live) == trained
    assert store.in_place == "actor"


def test_switches_back_on_error() -> None:
    live = live_weights()
    store = WeightStore(live)
    store.save("ref")
    live["a"].add_(1)
    trained = bits(live)
    with pytest.raises(RuntimeError, match="forward failed"), store.using("ref"):
        raise RuntimeError("forward failed")
    assert bits(live) == trained
    store.require_actor("step")


def test_b37_nothing_but_the_actor_is_trained_or_published() -> None:
    store = WeightStore(live_weights())
    store.save("ref")
    with store.using("ref"), pytest.raises(ContractError, match="'ref' is in place"):
        store.require_actor("publish weights")


def test_unknown_tag_is_named() -> None:
    store = WeightStore(live_weights())
    with pytest.raises(ContractError, match="'teacher' was never saved"), store.using("teacher"):
        pass


def test_copies_do_not_alias() -> None:
    live = live_weights()
    store = WeightStore(live)
    store.save("actor")
    store.copy("actor", "ref")
    before = bits(live)
    live["a"].zero_()
    store.save("actor")
    with store.using("ref"):
        assert bits(live) == before


@given(st.lists(st.sampled_from(["train", "save_ref", "use_ref", "nested"]), max_size=12))
def test_any_history_leaves_the_actor_in_place(history: list[str]) -> None:
    live = live_weights()
    store = WeightStore(live)
    store.save("ref")
    for event in history:
        before = bits(live)
        if event == "train":
            live["a"].add_(0.5)
            continue
        if event == "save_ref":
            store.save("ref")
        else:
            with store.using("ref"), store.using("ref"):
                pass
        assert bits(live) == before
    restored = WeightStore(live_weights(1))
    restored.load_state_dict(store.state_dict())
    assert restored.tags == ["ref"]


def test_a_defined_tag_costs_no_copy_and_returns_on_error() -> None:
    live, switched = live_weights(), []

    @contextmanager
    def off() -> Iterator[None]:
        switched.append(True)
        try:
            yield
        finally:
            switched.pop()

    store = WeightStore(live)
    store.define("ref", off)
    assert store.tags == ["ref"]
    with pytest.raises(RuntimeError, match="forward failed"), store.using("ref"):
        assert switched
        assert store.in_place == "ref"
        with pytest.raises(ContractError, match="'ref' is in place"):
            store.require_actor("train")
        raise RuntimeError("forward failed")
    assert not switched
    store.require_actor("train")
    assert store.state_dict() == {}
    assert store.tags == ["ref"]  # the actor was never backed up


def test_a_defined_tag_becomes_a_copy_when_it_is_saved() -> None:
    live = live_weights()
    store = WeightStore(live)
    store.define("ref", lambda: pytest.fail("the definition is forgotten"))
    store.save("ref")
    saved = bits(live)
    live["a"].add_(1)
    with store.using("ref"):
        assert bits(live) == saved
