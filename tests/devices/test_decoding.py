"""A decode step asks the device for the drawn tokens and nothing else."""

from __future__ import annotations

import pytest

from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import Sampling
from tests.devices import sim
from tests.rollout.tiny_models import lm, requests, tokens


@pytest.mark.parametrize("n", [1, 3])
def test_each_step_has_one_copy_to_the_host(n: int) -> None:
    sampling, asked = Sampling(n=n, max_tokens=12), requests(4, n)
    engine = HfEngine(lm().to("sim:2"), max_num_seqs=4 * n)
    with sim.accounts[2].watched() as copies:
        there = tokens(list(engine.generate(asked, sampling)))
    assert there == tokens(list(HfEngine(lm(), max_num_seqs=4 * n).generate(asked, sampling)))
    to_host = [copy for copy in copies if copy.direction == "to_host"]
    assert {copy.size for copy in to_host} == {4 * n * 2 * 8}  # of each row a token and a log-prob, as float64
    assert len(to_host) == 12  # the prefill draws the first tokens of all, then a step each
