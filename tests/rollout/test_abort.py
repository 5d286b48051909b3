"""Generations that meet new weights: aborted and resumed, aborted and made anew, or kept running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from tandem.base.errors import ContractError
from tandem.models.loading import as_causal_lm
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, SampleOutput, Sampling
from tandem.rollout.sampler import uniforms
from tests.rollout.tiny_models import bits, gpt2, llama, requests

# The name that all supported releases of transformers take.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
VERSIONS = 4
KINDS: dict[str, Callable[[int], PreTrainedModel]] = {"llama": llama, "gpt2": gpt2}
# Float64, so that no draw is near a rounding error.
MODELS = {kind: [build(version).double() for version in range(VERSIONS)] for kind, build in KINDS.items()}


def engine_of(kind: str, **options: object) -> HfEngine:
    return HfEngine(as_causal_lm(KINDS[kind](0).double()), **options)  # type: ignore[arg-type]


def load(engine: HfEngine, kind: str, version: int) -> None:
    engine.load(MODELS[kind][version].named_parameters(), version)


def drawn(logits: torch.Tensor, seed: int, place: int) -> tuple[int, float]:
    """By inversion of the whole distribution function."""
    probs = logits.softmax(-1)
    uniform = uniforms(torch.tensor([seed]), torch.tensor([place]))
    token = int(torch.searchsorted(probs.cumsum(-1), uniform, right=True))
    return token, float(probs[token].log())


@torch.no_grad()
def check_recomputed(kind: str, output: GroupOutput) -> None:
    """Each token is the one that the weights of its version draw from the whole sequence before it."""
    for seed, sample in zip(output.request.seeds, output.samples, strict=True):
        ids = torch.cat([output.request.prompt_ids, sample.token_ids])[None, :-1]
        logits = {
            version: MODELS[kind][version](ids, use_cache=False).logits[0] for version in set(sample.versions.tolist())
        }
        for place, version in enumerate(sample.versions.tolist()):
            token, logprob = drawn(logits[version][len(output.request.prompt_ids) - 1 + place], seed, place)
            assert int(sample.token_ids[place]) == token
            assert float(sample.logprobs[place]) == pytest.approx(logprob, abs=2e-5)


@torch.no_grad()
def check_old_kv(kind: str, output: GroupOutput) -> None:
    """The same, where each token's keys and values are those of the weights that first saw it."""
    for seed, sample in zip(output.request.seeds, output.samples, strict=True):
        cache, fresh = DynamicCache(), output.request.prompt_ids
        for place, version in enumerate(sample.versions.tolist()):
            result = MODELS[kind][version](fresh[None], past_key_values=cache, use_cache=True)
            token, logprob = drawn(result.logits[0, -1], seed, place)
            assert int(sample.token_ids[place]) == token
            assert float(sample.logprobs[place]) == pytest.approx(logprob, abs=2e-5)
            fresh = sample.token_ids[place : place + 1]


def run_aborting(
    kind: str,
    engine: HfEngine,
    wanted: list[GroupRequest],
    sampling: Sampling,
    abort_at: list[int],
    again: Callable[[GroupOutput], GroupRequest],
) -> tuple[list[GroupOutput], int]:
    """Load the next weights, aborting, whenever the source has been asked so often; finished groups, and aborted."""
    waiting = list(wanted)
    asked = aborted = unanswered = 0

    def source() -> Iterator[GroupRequest | None]:
        nonlocal asked, unanswered
        while waiting or unanswered:
            asked += 1
            if asked in abort_at:
                engine.pause(abort=True)
                load(engine, kind, engine.version + 1)
                engine.resume()
            if waiting:
                unanswered += 1
                yield waiting.pop(0)
            else:
                yield None

    finished = []
    for output in engine.generate(source(), sampling):
        unanswered -= 1
        if output.aborted:
            aborted += 1
            waiting.append(again(output))
        else:
            finished.append(output)
    return finished, aborted


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_sample_equals_a_reference_under_piecewise_weights(kind: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3), "n")
    sampling = Sampling(n=n, max_tokens=data.draw(st.integers(2, 16)), stop_token_ids=(0, 1, 2))
    wanted = requests(data.draw(st.integers(1, 5)), n=n, seed=data.draw(st.integers(0, 99)))
    engine = engine_of(
        kind,
        max_num_seqs=20,
        exact=data.draw(st.booleans(), "exact"),
        max_num_batched_tokens=data.draw(st.integers(1, 60)),
    )
    abort_at = data.draw(st.lists(st.integers(2, 25), max_size=VERSIONS - 1, unique=True), "abort at")
    finished, _ = run_aborting(kind, engine, wanted, sampling, abort_at, GroupOutput.resumed)
    assert sorted(o.request.key for o in finished) == [r.key for r in wanted]
    for output in finished:
        assert all(list(s.versions) == sorted(s.versions) for s in output.samples)
        check_recomputed(kind, output)


def test_tokens_of_one_resumed_sample_carry_the_versions_that_drew_them() -> None:
    finished, aborted = run_aborting(
        "llama",
        engine_of("llama", max_num_seqs=20),
        requests(4),
        Sampling(n=2, max_tokens=30),
        [8, 20, 30],
        GroupOutput.resumed,
    )
    assert aborted >= 8
    assert {tuple(s.versions.unique().tolist()) for o in finished for s in o.samples} == {(0, 1, 2, 3)}


def test_b52_made_anew_every_sample_has_one_version_and_its_own_tokens() -> None:
    sampling = Sampling(n=2, max_tokens=12, stop_token_ids=tuple(range(6)))
    finished, aborted = run_aborting(
        "llama", engine_of("llama", max_num_seqs=20), requests(6), sampling, [9, 14], GroupOutput.restarted
    )
    assert aborted
    assert len({int(s.versions[0]) for o in finished for s in o.samples}) > 1
    for output in finished:
        assert len({int(v) for s in output.samples for v in s.versions}) == 1
        check_recomputed("llama", output)


def test_an_abort_without_new_weights_changes_no_token() -> None:
    engine, sampling = engine_of("llama", max_num_seqs=6), Sampling(n=2, max_tokens=20, stop_token_ids=(0, 1))
    expected = {o.request.key: o for o in engine.generate(requests(5), sampling)}
    waiting: list[GroupRequest] = requests(5)
    while waiting:
        outputs = engine.generate(waiting, sampling)
        waiting = []
        for i, output in enumerate(outputs):
            if i == 0:
                engine.pause(abort=True)
                engine.resume()
            if output.aborted:
                waiting.append(output.resumed())
                continue
            for sample, whole in zip(output.samples, expected[output.request.key].samples, strict=True):
                assert sample.token_ids.tolist() == whole.token_ids.tolist()
                assert torch.allclose(sample.logprobs, whole.logprobs, atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("keep_kv", ["old", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_running_tokens_of_one_sample_carry_two_versions(kind: str, keep_kv: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 3))
    sampling = Sampling(n=n, max_tokens=16, stop_token_ids=(0, 1))
    engine = engine_of(kind, keep_kv=keep_kv, max_num_seqs=data.draw(st.integers(n, 12)))
    load_at = data.draw(st.lists(st.integers(2, 18), min_size=1, max_size=3, unique=True))
    wanted, asked = requests(4, n=n), 0

    def source() -> Iterator[GroupRequest | None]:
        nonlocal asked
        while wanted or in_flight:
            asked += 1
            if asked in load_at:
                load(engine, kind, engine.version + 1)
            if wanted:
                in_flight.append(wanted[0].key)
                yield wanted.pop(0)
            else:
                yield None

    in_flight: list[int | str] = []
    check = check_old_kv if keep_kv == "old" else check_recomputed
    for output in engine.generate(source(), sampling):
        in_flight.remove(output.request.key)
        check(kind, output)


def test_under_keep_a_running_sample_meets_the_new_weights() -> None:
    for keep_kv in ("old", "recompute"):
        engine = engine_of("llama", keep_kv=keep_kv)
        outputs = engine.generate(requests(4), Sampling(n=2, max_tokens=30, stop_token_ids=tuple(range(8))))
        next(outputs)
        load(engine, "llama", 1)
        labels = [tuple(s.versions.unique().tolist()) for o in outputs for s in o.samples]
        assert (0, 1) in labels


def test_an_abort_ends_a_generation_that_is_paused_already() -> None:
    engine = engine_of("llama")
    outputs: list[GroupOutput] = []
    under_way = threading.Event()

    def source() -> Iterator[GroupRequest | None]:
        yield requests(1)[0]
        while not outputs:
            under_way.set()
            yield None

    worker = threading.Thread(
        target=lambda: outputs.extend(engine.generate(source(), Sampling(n=2, max_tokens=70))), daemon=True
    )
    worker.start()
    assert under_way.wait(30)
    engine.pause()
    assert worker.is_alive()
    engine.pause(abort=True)
    worker.join(30)
    assert not worker.is_alive()
    assert outputs[0].aborted
    assert [s.finish_reason for s in outputs[0].samples] == ["aborted"] * 2
    engine.resume()
    (whole,) = engine.generate([outputs[0].resumed()], Sampling(n=2, max_tokens=70))
    check_recomputed("llama", whole)


def test_requests_that_have_not_started_wait_and_start_under_the_new_weights() -> None:
    engine = engine_of("llama", max_num_seqs=4)
    outputs = engine.generate(requests(8), Sampling(n=2, max_tokens=12, stop_token_ids=tuple(range(10))))
    for _ in range(3):
        next(outputs)
    engine.pause(abort=True)
    load(engine, "llama", 1)
    engine.resume()
    rest = list(outputs)
    assert len(rest) == 5
    assert 1 <= sum(o.aborted for o in rest) <= 2
    started_under = [{int(v) for s in o.samples for v in s.versions} for o in rest if not o.aborted]
    assert all(len(versions) == 1 for versions in started_under)
    assert started_under[-2:] == [{1}, {1}]


def test_finished_samples_of_an_aborted_group_are_taken_over_bit_by_bit() -> None:
    engine, sampling = engine_of("llama"), Sampling(n=3, max_tokens=10)
    (request,) = requests(1, n=3)
    (whole,) = engine.generate([request], sampling)
    part = replace(
        whole.samples[1],
        token_ids=whole.samples[1].token_ids[:4],
        logprobs=whole.samples[1].logprobs[:4],
        versions=whole.samples[1].versions[:4],
        finish_reason="aborted",
    )
    begun = (whole.samples[0], part, whole.samples[2])
    (resumed,) = engine.generate([replace(request, begun=begun)], sampling)
    assert resumed.samples[0] is whole.samples[0] and resumed.samples[2] is whole.samples[2]
    assert resumed.samples[1].token_ids.tolist() == whole.samples[1].token_ids.tolist()
    (same,) = engine.generate([replace(request, begun=whole.samples)], sampling)
    assert bits([same]) == bits([whole])


def test_a_sample_aborted_before_its_first_token_begins_at_the_prompt() -> None:
    engine, sampling = engine_of("llama"), Sampling(n=2, max_tokens=6)
    (request,) = requests(1)
    empty = SampleOutput(
        torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0, dtype=torch.int32), "aborted"
    )
    (resumed,) = engine.generate([replace(request, begun=(empty, empty))], sampling)
    check_recomputed("llama", resumed)


def test_what_was_begun_must_fit_the_sampling() -> None:
    engine, sampling = engine_of("llama"), Sampling(n=2, max_tokens=6)
    (request,) = requests(1)
    (whole,) = engine.generate([request], sampling)
    with pytest.raises(ContractError, match="1 begun samples for n = 2"):
        list(engine.generate([replace(request, begun=whole.samples[:1])], sampling))
    cut = tuple(replace(s, finish_reason="aborted") for s in whole.samples)
    with pytest.raises(ContractError, match="sample 0: 6 begun tokens leave none of max_tokens 6"):
        list(engine.generate([replace(request, begun=cut)], sampling))
