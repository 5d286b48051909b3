"""Beside the fingerprint: what an engine generates with, by its answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import TandemError
from tandem.weights.probe import Answer, Expected, Tolerance
from tests.weights.test_sync import FakeEngine, Trainer

V, K = 12, 5
TOLERANCE = Tolerance(0.01, 0.02)


def told(logits: torch.Tensor, logprobs: bool = True) -> list[Answer]:
    """By an engine with these logits (K, V)."""
    best = logits.log_softmax(-1).max(-1)
    return [
        Answer(int(token), float(value) if logprobs else None)
        for token, value in zip(best.indices, best.values, strict=True)
    ]


def wanted(logits: torch.Tensor) -> Expected:
    best = logits.log_softmax(-1).topk(2)
    prompts = [torch.tensor([i]) for i in range(len(logits))]
    return Expected(prompts, best.indices[:, 0], best.values[:, 0], best.values[:, 1], TOLERANCE)


@given(seed=st.integers(0, 999), noise=st.floats(0.0, 0.5), logprobs=st.booleans())
def test_the_difference_is_never_more_than_the_one_that_there_is(seed: int, noise: float, logprobs: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    right = torch.randn(K, V, generator=generator)
    other = right + noise * torch.randn(K, V, generator=generator)
    most = (other.log_softmax(-1) - right.log_softmax(-1)).abs().max(-1).values
    found = wanted(right).difference(told(other, logprobs))
    assert bool((found <= most + 1e-6).all())
    assert wanted(right).objection(told(right, logprobs)) is None


def test_another_likeliest_token_is_objected_to_by_how_far_it_is_behind() -> None:
    expected = wanted(torch.tensor([[0.0, 1.0, -1.0]] * 4))
    answers = [Answer(0, None), *[Answer(1, None)] * 3]
    assert expected.difference(answers).tolist() == pytest.approx([0.5, 0.0, 0.0, 0.0])
    objection = expected.objection(answers)
    assert objection is not None and "0.125 on average, 0.5 at most" in objection
    near = wanted(torch.tensor([[1.0, 1.001, -1.0]] * 4))
    assert near.objection([Answer(0, None)] * 4) is None


def test_what_is_no_number_is_objected_to() -> None:
    expected = wanted(torch.randn(K, V))
    answers = told(torch.randn(K, V))
    assert expected.objection([Answer(answers[0].token, float("nan")), *answers[1:]]) is not None


class Model(FakeEngine):
    """Generates with the weight ``b`` of what it was sent."""

    def answer(self, prompts: Sequence[torch.Tensor]) -> list[Answer]:
        return told(torch.stack([self.weights["b"] * (1 + int(prompt[0])) for prompt in prompts]))


class OldHead(Model):
    """Answers the fingerprint of all that came, and goes on with the head that it started with."""

    def answer(self, prompts: Sequence[torch.Tensor]) -> list[Answer]:
        self.weights = {"b": torch.tensor([0.0, 0.5, 0.0, 0.0])}
        return super().answer(prompts)


class TrainersProbe:
    def __init__(self, trainer: Trainer, every: int = 1) -> None:
        self.trainer, self.every = trainer, every

    def expected(self, version: int, *, due: bool = False) -> Expected | None:
        if version % self.every and not due:
            return None
        return wanted(torch.stack([self.trainer.live["b"] * (1 + i) for i in range(K)]))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_that_keeps_an_old_head_is_refused_before_it_counts_as_new(overlap: bool) -> None:
    trainer = Trainer()
    engines = {"rollout-0": Model(), "rollout-1": OldHead()}
    sync = trainer.sync(dict(engines), probe=TrainersProbe(trainer), overlap=overlap)
    with pytest.raises(TandemError, match=r"rollout-1 does not generate with weights version 0.*differ.*another model"):
        sync.push(0)
        sync.wait()
    assert trainer.acknowledged == [("rollout-0", 0)]


def test_it_is_compared_with_what_was_sent_whatever_the_trainer_does_meanwhile() -> None:
    trainer = Trainer()
    engine = Model(open_=False)
    sync = trainer.sync({"rollout-0": engine}, probe=TrainersProbe(trainer), overlap=True)
    sync.push(0)
    trainer.live["b"].mul_(-3.0)
    engine.go.set()
    sync.wait()
    assert trainer.acknowledged == [("rollout-0", 0)]
    assert sync.arrived["probe"] >= 0


def test_versions_that_are_not_due_are_not_asked_about() -> None:
    trainer = Trainer()
    engine = OldHead()
    sync = trainer.sync({"rollout-0": engine}, probe=TrainersProbe(trainer, every=3))
    for version in (4, 5):
        trainer.train()
        sync.push(version)
        assert "probe" not in sync.arrived
    with pytest.raises(TandemError, match="version 6"):
        sync.push(6)


def test_one_that_joins_late_is_asked_too() -> None:
    trainer = Trainer()
    sync = trainer.sync({"rollout-0": Model()}, probe=TrainersProbe(trainer))
    sync.push(0)
    with pytest.raises(TandemError, match="rollout-1 does not generate with weights version 0"):
        sync.join("rollout-1", OldHead())
    sync.join("rollout-2", Model())
    assert trainer.acknowledged == [("rollout-0", 0), ("rollout-2", 0)]


def test_one_that_joins_between_two_probes_is_asked_at_the_next_push_and_once() -> None:
    trainer = Trainer()
    sync = trainer.sync({"rollout-0": Model()}, probe=TrainersProbe(trainer, every=10))
    sync.push(1)
    trainer.train()  # what the trainer has when one joins is not what the version has
    sync.join("rollout-1", Model())
    sync.push(2)
    assert "probe" in sync.arrived
    sync.push(3)
    assert "probe" not in sync.arrived
    sync.leave("rollout-1")
    sync.join("rollout-1", OldHead())
    with pytest.raises(TandemError, match="rollout-1 does not generate with weights version 4"):
        sync.push(4)


def test_nobody_is_asked_for_one_that_left_again() -> None:
    trainer = Trainer()
    sync = trainer.sync({"rollout-0": Model()}, probe=TrainersProbe(trainer, every=10))
    sync.push(1)
    sync.join("rollout-1", Model())
    sync.leave("rollout-1")
    sync.push(2)
    assert "probe" not in sync.arrived
