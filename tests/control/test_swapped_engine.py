"""Another engine in a loop of one's own: it serves once it is proven to have the actor's weights, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tandem import ActorRolloutRef, DataProto, build_actor_rollout_ref, compute_grpo_loss
from tandem.base.errors import ConfigError, ContractError, TandemError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.roles.rollout.following import FollowingEngine
from tests.e2e.seven import make_task

PROMPTS = ["1>", "2>", "3>"]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("swapped"))


@contextmanager
def built(task: Path, *words: str) -> Iterator[ActorRolloutRef]:
    usual = ("plugins=[tests.modes.own_engines]", "runtime.threads=true", "trainer.exact=true")
    config = load_words([str(task), *usual, *words], Config)
    made = build_actor_rollout_ref(config.actor_rollout_ref)
    yield made
    if isinstance(made.engine, FollowingEngine):
        made.engine.close()


def trained(made: ActorRolloutRef, *swaps: str | None) -> list[DataProto]:
    """A step a swap, all on what was generated before."""
    found = []
    for name in swaps:
        if name is not None:
            made.swap_rollout(name)
        samples = made.rollout(PROMPTS)
        rewards = torch.randn(len(samples), generator=torch.Generator().manual_seed(0))
        made.actor.step(compute_grpo_loss(samples, rewards, made))
        found.append(samples)
    return found


def rows(samples: DataProto) -> list[list[int]]:
    return [row.tolist() for row in samples.ragged("responses")]


def test_swapping_there_and_back_gives_the_run_without(task: Path) -> None:
    with built(task) as plain, built(task) as swapped:
        ones = trained(plain, None, None, None, None, None)
        others = trained(swapped, None, "test_apart", None, "hf", "test_apart")
        assert [rows(samples) for samples in others] == [rows(samples) for samples in ones]
        for step, samples in enumerate(others):
            assert set(samples.ragged("token_versions").values.tolist()) == {step}
            logprobs = (each.ragged("rollout_logprobs").values for each in (samples, ones[step]))
            assert torch.allclose(*logprobs, atol=1e-5)
        assert all(
            bool((one == other).all())
            for (_, one), (_, other) in zip(plain.actor.export(), swapped.actor.export(), strict=True)
        )


def test_weights_that_other_hands_change_reach_the_engine_too(task: Path) -> None:
    with built(task) as made:
        made.swap_rollout("test_apart")
        before = made.rollout(PROMPTS, temperature=0)
        with torch.no_grad():
            for parameter in made.model.model.parameters():
                parameter.neg_()
        assert rows(made.rollout(PROMPTS, temperature=0)) != rows(before)


@pytest.mark.parametrize("name", ["test_silent", "test_deaf"])
def test_an_engine_that_does_not_have_the_weights_never_serves(task: Path, name: str) -> None:
    with built(task) as made:
        trained(made, None)
        serving = made.engine
        with pytest.raises(TandemError, match=f"{name} (answered no fingerprint|does not generate with)"):
            made.swap_rollout(name)
        assert made.engine is serving
        assert set(made.rollout(PROMPTS).ragged("token_versions").values.tolist()) == {1}


def test_what_the_engine_can_not_do_is_refused_before_it_is_started(task: Path) -> None:
    with built(task) as made:
        serving = made.engine
        for name, key in (("hff", "name"), ("vllm", "name"), ("sglang", "name")):
            with pytest.raises(ConfigError) as caught:
                made.swap_rollout(name)
            assert f"actor_rollout_ref.rollout.{key}" in [problem.key for problem in caught.value.problems]
        with pytest.raises(ConfigError, match="keeps the engine in this process"):
            made.swap_rollout("test_apart", python="nowhere/python")
        assert made.engine is serving


def test_in_a_process_of_its_own_it_serves_and_ends_with_the_next_swap(task: Path) -> None:
    with built(task, "runtime.threads=false") as made:
        ones = rows(made.rollout(PROMPTS, temperature=0))
        made.swap_rollout("test_apart")
        other = made.engine
        assert isinstance(other, FollowingEngine)
        assert rows(made.rollout(PROMPTS, temperature=0)) == ones
        made.swap_rollout("hf")
        with pytest.raises(TandemError):
            list(other.generate([], made.sampling))


def test_a_run_of_its_own_swaps_nothing(task: Path) -> None:
    with built(task) as made:
        made.start_engine = None
        with pytest.raises(ContractError, match="only a loop of one's own"):
            made.swap_rollout("hf")
