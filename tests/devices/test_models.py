"""Models on a simulated device give what they give on the CPU."""

from __future__ import annotations

import pytest
import torch

from tandem.base.errors import TandemError
from tandem.models.causal_lm import CausalLM
from tandem.models.device import found_device
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tandem.train.objective import PolicyObjective
from tests.rollout.tiny_models import lm, requests, tokens
from tests.train.conftest import build_batch, build_engine

SAMPLING = Sampling(n=2, max_tokens=8, stop_token_ids=(1,))


@pytest.mark.parametrize("index", [0, 1])
def test_generation_is_that_of_the_cpu(index: int) -> None:
    asked = requests(5)
    here = HfEngine(lm(), max_num_seqs=6).generate(asked, SAMPLING)
    model = lm().to(f"sim:{index}")
    assert isinstance(model, CausalLM)
    there = HfEngine(model, max_num_seqs=6).generate(asked, SAMPLING)
    assert tokens(list(there)) == tokens(list(here))


def test_a_training_step_is_that_of_the_cpu() -> None:
    batch, objective = build_batch([5, 3, 7, 1]), PolicyObjective(kl_coef=0.1, entropy_coef=0.01)
    here, there = build_engine(), build_engine(device="sim:1")
    for engine in (here, there):
        engine.forward_backward(batch, objective)
        assert engine.optim_step(objective.denominator(batch)).applied
    own, other = dict(here.export()), dict(there.export())
    for name, weight in own.items():
        assert str(other[name].device) == "sim:1"
        torch.testing.assert_close(other[name].cpu(), weight, atol=2e-5, rtol=1e-5)
    before, after = (engine.forward(batch, ["logprobs"])["logprobs"].values for engine in (here, there))
    torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-5)


def test_a_device_that_the_process_does_not_see_is_no_device() -> None:
    with pytest.raises(TandemError, match="should compute on sim:99, and it sees 8 sim devices"):
        found_device("sim:99")
    with pytest.raises(TandemError, match="sees no cuda device"):
        found_device("cuda")
