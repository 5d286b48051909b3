"""Groups with one sample more, which is greedy: beside the others, over an abort, and through a process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.models.loading import as_causal_lm
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupRequest, Sampling
from tandem.rollout.wire import pack_sampling, unpack_sampling
from tests.rollout.tiny_models import gpt2, lm, requests, tokens

DRAWN = Sampling(n=2, max_tokens=8, temperature=0.7, stop_token_ids=(0, 1))
WITH = replace(DRAWN, baseline=True)
GREEDY = Sampling(n=1, max_tokens=8, greedy=True, stop_token_ids=(0, 1))


def three(count: int) -> list[GroupRequest]:
    """Requests with a third seed."""
    return [replace(request, seeds=(*request.seeds, 7)) for request in requests(count)]


@pytest.mark.parametrize("exact", [True, False])
def test_the_last_sample_is_greedy_and_the_others_are_drawn_as_ever(exact: bool) -> None:
    found = tokens(list(HfEngine(lm(), max_num_seqs=9, exact=exact).generate(three(7), WITH)))
    drawn = tokens(list(HfEngine(lm(), exact=exact).generate(requests(7), DRAWN)))
    greedy = tokens(list(HfEngine(lm(), exact=exact).generate([replace(r, seeds=(0,)) for r in requests(7)], GREEDY)))
    assert found == {key: [*drawn[key], *greedy[key]] for key in drawn}


def test_its_log_prob_is_the_models_own_at_temperature_1() -> None:
    (output,) = HfEngine(lm()).generate(three(1), WITH)
    (alone,) = HfEngine(lm()).generate([replace(requests(1)[0], seeds=(0,))], GREEDY)
    torch.testing.assert_close(output.samples[2].logprobs, alone.samples[0].logprobs)


def test_an_aborted_group_goes_on_with_its_greedy_sample() -> None:
    engine, long = HfEngine(as_causal_lm(gpt2())), replace(WITH, max_tokens=12, stop_token_ids=())
    whole = tokens(list(HfEngine(as_causal_lm(gpt2())).generate(three(2), long)))
    asked = three(2)

    def source() -> object:
        yield from asked
        for _ in range(4):
            yield None
        engine.pause(abort=True)
        engine.resume()
        yield None

    outputs = list(engine.generate(source(), long))  # type: ignore[arg-type]
    begun = [output.resumed() for output in outputs if output.aborted]
    assert len(begun) == 2 and 0 < len(begun[0].begun[2].token_ids) < 12
    assert tokens(list(engine.generate(begun, long))) == whole


def test_a_group_with_a_greedy_sample_takes_that_much_more_room() -> None:
    with pytest.raises(Exception, match="no room for the 3 samples"):
        HfEngine(lm(), max_num_seqs=2).generate([], WITH)
    assert unpack_sampling(pack_sampling(WITH)) == WITH
    assert (WITH.samples, DRAWN.samples) == (3, 2)
