"""What sleep gives up is seen in the account of the device; what comes back is what went."""

from __future__ import annotations

import gc

import pytest
import torch

from tandem.config.flags import TRAIN_FLAGS
from tandem.roles.train_rank import TrainRank
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tandem.train.objective import SftObjective
from tests.devices import sim
from tests.rollout.tiny_models import lm, requests, tokens
from tests.train.conftest import build_batch, build_engine


def allocated(index: int) -> int:
    gc.collect()
    return sim.accounts[index].allocated


def test_a_sleeping_actor_has_its_weights_on_the_device_and_nothing_else() -> None:
    batch, objective = build_batch([4, 6]), SftObjective()
    resting, other = build_engine(device="sim:5"), build_engine()
    weights = sum(p.nbytes for p in resting.model.parameters())
    for engine in (resting, other):
        for _ in range(3):
            engine.forward_backward(batch, objective)
            assert engine.optim_step(objective.denominator(batch)).applied
            engine.sleep()
            if engine is resting:
                steps = 4 * len(list(engine.model.parameters()))  # AdamW counts the steps of each tensor on the device
                assert allocated(5) <= weights + steps + 4096  # what the model computes for itself, such as rotations
            engine.wake()
    assert allocated(5) >= 3 * weights
    for (name, weight), (_, here) in zip(resting.export(), other.export(), strict=True):
        torch.testing.assert_close(weight.cpu(), here, atol=2e-5, rtol=1e-5, msg=name)


def test_a_sleeping_engine_holds_nothing_on_the_device_and_takes_new_weights() -> None:
    asked, sampling = requests(3), Sampling(n=2, max_tokens=6)
    engine = HfEngine(lm(0).to("sim:6"))  # type: ignore[arg-type]
    list(engine.generate(asked, sampling))
    assert allocated(6) > 0
    engine.sleep()
    assert allocated(6) == 0
    engine.load(lm(1).model.state_dict().items(), 1)
    assert allocated(6) == 0
    engine.wake()
    assert tokens(list(engine.generate(asked, sampling))) == tokens(list(HfEngine(lm(1)).generate(asked, sampling)))


@pytest.mark.parametrize(("place", "held"), [("cpu", 0), ("device", 2)])
def test_tags_are_kept_where_they_are_asked_for(place: str, held: int) -> None:
    batch = build_batch([4, 6])
    rank = TrainRank(build_engine(device="sim:7"), tag_device=place)  # type: ignore[arg-type]
    weights, before = sum(p.nbytes for p in rank.engine.model.parameters()), allocated(7)
    rank.save_tag("ref")
    first = rank.forward(batch, ["logprobs"])["logprobs"].values
    rank.forward_backward(batch, SftObjective())
    rank.optim_step(10.0)
    rank.engine.sleep()
    trained = rank.forward(batch, ["logprobs"])["logprobs"].values
    assert torch.equal(rank.forward(batch, ["logprobs"], tag="ref")["logprobs"].values, first)
    assert torch.equal(rank.forward(batch, ["logprobs"])["logprobs"].values, trained)
    assert held * weights <= allocated(7) - before <= held * weights + 4096


def test_what_is_given_up_in_turns_has_a_flag() -> None:
    assert {TRAIN_FLAGS["offload_train"], TRAIN_FLAGS["offload_rollout"]} == {
        "actor_rollout_ref.actor.offload",
        "actor_rollout_ref.rollout.offload",
    }
