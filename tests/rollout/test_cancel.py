"""Groups that nobody wants any more are ended where they are; what goes on beside them is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.models.loading import as_causal_lm
from tandem.rollout.hf import HfEngine
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import Cancelling, GroupOutput, GroupRequest, Sampling
from tandem.rollout.scheduler import as_it_is
from tandem.rollout.sound import sound_outputs
from tandem.rollout.spec import EngineSpec
from tests.rollout.test_core_engine import check, made, wanted
from tests.rollout.tiny_models import llama, requests

SAMPLING = Sampling(n=2, max_tokens=12)
MODEL = as_causal_lm(llama(0).double())  # so that no draw is near a rounding error


def told(outputs: list[GroupOutput]) -> dict[int | str, list[list[int]]]:
    return {output.request.key: [sample.token_ids.tolist() for sample in output.samples] for output in outputs}


@cache
def undisturbed() -> dict[int | str, list[list[int]]]:
    """What five requests are answered."""
    return told(list(HfEngine(MODEL, shares_weights=True).generate(requests(5), SAMPLING)))


@settings(max_examples=40, deadline=None)
@given(
    at=st.integers(1, 20),
    keys=st.sets(st.integers(0, 6), max_size=5),
    room=st.sampled_from([4, 6, 100]),
    exact=st.booleans(),
)
def test_the_groups_that_go_on_are_those_of_a_run_in_which_nothing_is_cancelled(
    at: int, keys: set[int], room: int, exact: bool
) -> None:
    everything = undisturbed()
    engine = HfEngine(MODEL, shares_weights=True, max_num_seqs=room, exact=exact)
    left = at
    ids = iter(requests(5))

    def source() -> Iterator[GroupRequest | None]:
        """Asked between two tokens, as long as there may be more."""
        nonlocal left
        while True:
            left -= 1
            if left == 0:
                engine.cancel(keys)
            if (request := next(ids, None)) is not None:
                yield request
            elif left > 0:
                yield None
            else:
                return

    outputs = []
    for output in engine.generate(source(), SAMPLING):
        outputs.append(output)
        if len(outputs) == 5:
            left = min(left, 1)
    found = told(outputs)
    assert found.keys() == everything.keys()
    for output in outputs:
        key = output.request.key
        if output.aborted:
            assert key in keys
            pairs = zip(found[key], everything[key], strict=True)
            assert all(part == whole[: len(part)] for part, whole in pairs)
        else:
            assert found[key] == everything[key]


@pytest.mark.parametrize("cancelled", [{1}, {0, 1}, {0, 1, 2, 3}])
def test_an_engine_of_another_package_has_its_requests_aborted(cancelled: set[int]) -> None:
    """Two groups fit: the others wait, and are ended before they have begun."""
    engine, core = made(max_num_seqs=4)
    sampling = Sampling(n=2, max_tokens=20)
    count = 0

    def source() -> Iterator[GroupRequest]:
        yield from wanted(4, 2)

    outputs = []
    step = core.step

    def counted() -> object:
        nonlocal count
        count += 1
        if count == 5:
            engine.cancel(cancelled)
        return step()

    core.step = counted  # type: ignore[method-assign,assignment]
    outputs = list(engine.generate(source(), sampling))
    by_key = {output.request.key: output for output in outputs}
    assert sorted(by_key) == [0, 1, 2, 3]
    assert {key for key, output in by_key.items() if output.aborted} >= cancelled & {0, 1}
    for key, output in by_key.items():
        if not output.aborted:
            check(output, sampling)
        elif key in (0, 1):
            assert [len(sample.token_ids) for sample in output.samples] == [5, 5]
        else:
            assert [len(sample.token_ids) for sample in output.samples] == [0, 0]
    assert core.going == {}


def test_word_of_it_reaches_an_engine_in_another_process(tmp_path: Path) -> None:
    llama(0).save_pretrained(tmp_path)
    spec = EngineSpec(model=str(tmp_path), threads=1)
    endless = Sampling(n=2, max_tokens=70)
    with ProcessEngine("rollout-0", spec, deadline_s=20.0) as engine:
        assert isinstance(engine, Cancelling)
        drawn: list[int] = []

        def watch(sample: int, ids: object, logprobs: object) -> None:
            drawn.append(sample)
            if len(drawn) == 4:
                engine.cancel([0, 77])

        first, second = requests(2, longest=4)
        watched = GroupRequest(first.key, first.prompt_ids, first.seeds, watch=watch)
        outputs = {output.request.key: output for output in engine.generate([watched, second], endless)}
    assert outputs[0].aborted and 2 <= len(outputs[0].samples[0].token_ids) < 70
    assert not outputs[1].aborted and len(outputs[1].samples[0].token_ids) == 70


def test_a_group_that_nobody_wants_takes_no_room() -> None:
    """One fits at a time; the first is cancelled after three tokens, and the second begins with the next."""
    engine = HfEngine(MODEL, shares_weights=True, max_num_seqs=2)
    steps: list[int] = []

    def watching(key: int, then: Callable[[], None]) -> Callable[[int, object, object], None]:
        def watch(sample: int, ids: object, logprobs: object) -> None:
            if sample == 0:
                steps.append(key)
                if steps.count(key) == 3:
                    then()

        return watch

    first, second = (
        GroupRequest(r.key, r.prompt_ids, r.seeds, watch=watching(int(r.key), lambda: engine.cancel([0])))
        for r in requests(2)
    )
    outputs = list(engine.generate([first, second], SAMPLING))
    assert [output.aborted for output in outputs] == [True, False]
    assert steps == [0, 0, 0, *[1] * 12]
    assert torch.equal(outputs[0].samples[0].versions, torch.zeros(3, dtype=torch.int32))


def test_a_group_that_has_not_begun_is_sound_where_experts_are_recorded() -> None:
    class Ending:
        def generate(self, wanted: Iterator[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
            return (as_it_is(request, sampling.routes) for request in wanted)

    sampling = Sampling(n=2, max_tokens=3, routes=4)
    (output,) = sound_outputs(Ending(), requests(1), sampling)  # type: ignore[arg-type]
    assert output.aborted and not len(output.samples[0].token_ids)
