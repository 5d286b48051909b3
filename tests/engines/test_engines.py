"""vLLM and SGLang behind the protocol: they generate with what they were sent, and tell of what they drew from."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.base.errors import ContractError, EngineDiedError, TandemError
from tandem.models.fingerprint import fingerprint
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import GroupOutput, GroupRequest, LogprobsOf, Sampling
from tandem.rollout.registry import capabilities_of
from tests.engines.conftest import Installed
from tests.engines.models import difference, requests, tokens, weights

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")

FULL, HALF = 2e-5, 0.25
"""What rounding explains, in nats."""

WAYS = [
    Sampling(n=3, max_tokens=12, temperature=0.6),
    Sampling(n=3, max_tokens=12),
    Sampling(n=3, max_tokens=12, temperature=1.5),
    Sampling(n=3, max_tokens=12, greedy=True),
    Sampling(n=2, max_tokens=12, temperature=0.7, baseline=True),
    Sampling(n=3, max_tokens=12, temperature=1.2, top_k=5),
    Sampling(n=3, max_tokens=12, temperature=1.2, top_p=0.8),
    Sampling(n=3, max_tokens=12, top_k=20, top_p=0.7),
    Sampling(n=3, max_tokens=40, stop_token_ids=tuple(range(9))),
]
LONG = Sampling(n=2, max_tokens=40)


def told_by(installed: Installed, sampling: Sampling) -> Sampling:
    """The same, with log-probs of a distribution that the engine can tell of."""
    declared = capabilities_of(installed.name)
    assert declared is not None
    return replace(sampling, logprobs_of="sampled" if "sampled" in declared.logprobs else "full")


def test_it_generates_nothing_before_its_first_weights(engine: ProcessEngine) -> None:
    if engine.version >= 0:
        pytest.skip("weights were sent before")
    with pytest.raises(TandemError, match="load a complete set"):
        list(engine.generate(requests(1, 3), WAYS[0]))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sampling", WAYS, ids=str)
def test_b27_b29_logprobs_are_those_of_the_weights_that_were_sent(
    engine: ProcessEngine, installed: Installed, version: int, sampling: Sampling
) -> None:
    """Its head is tied to its embeddings, and vLLM packs them apart; the second weights differ everywhere."""
    sampling = told_by(installed, sampling)
    if engine.version != version:
        assert engine.load(weights(version), version) == fingerprint(weights(version))
    assert engine.ping(20.0) == engine.version == version
    outputs = list(engine.generate(requests(4, sampling.samples), sampling))
    assert len(outputs) == 4 and difference(outputs, sampling) < FULL
    assert {int(v) for o in outputs for s in o.samples for v in s.versions} == {version}
    for sample in (sample for output in outputs for sample in output.samples):
        ended = int(sample.token_ids[-1]) in sampling.stop_token_ids
        assert sample.finish_reason == ("stop" if ended else "length")
        assert ended or len(sample.token_ids) == sampling.max_tokens
        assert not set(sample.token_ids[:-1].tolist()) & set(sampling.stop_token_ids)


def test_b40_no_keys_of_old_weights_are_reused_for_the_same_prompt(engine: ProcessEngine) -> None:
    same = requests(2, 2, shortest=70)
    for version in (1, 2, 2, 1):  # also where a version comes again with the weights of another
        engine.load(weights(version), version)
        for _ in range(2):
            assert difference(list(engine.generate(same, LONG)), LONG) < FULL


def test_a_samples_stream_is_a_function_of_its_seed(engine: ProcessEngine) -> None:
    wanted = requests(5, 3)
    first = tokens(list(engine.generate(wanted, WAYS[1])))
    assert tokens(list(engine.generate(wanted[::-1], WAYS[1]))) == first
    assert tokens(list(engine.generate(wanted[2:3], WAYS[1]))) == {2: first[2]}
    assert len({tuple(sample) for sample in first[2]}) == 3
    again = [GroupRequest(r.key, r.prompt_ids, tuple(s + 7000 for s in r.seeds)) for r in wanted]
    assert tokens(list(engine.generate(again, WAYS[1]))) != first


def changed(engine: ProcessEngine, abort: bool) -> list[GroupOutput]:
    """A generation under weights 1 that weights 2 meet in the middle: its groups end one after the other."""
    engine.load(weights(1), 1)
    outputs: list[GroupOutput] = []
    for output in engine.generate(requests(GROUPS, 2, longest=20), ENDING):
        if not outputs:
            if abort:
                engine.pause(abort=True)
            engine.load(weights(2), 2)
            if abort:
                engine.resume()
        outputs.append(output)
    assert len(outputs) == GROUPS
    return outputs


GROUPS = 60  # so that generation is under way when it is met, however slowly the answers are read
ENDING = Sampling(n=2, max_tokens=100, stop_token_ids=(0, 1))


def test_an_aborted_generation_goes_on_under_the_new_weights(engine: ProcessEngine) -> None:
    halves = [output for output in changed(engine, abort=True) if output.aborted]
    assert any(len(sample.token_ids) for half in halves for sample in half.samples)
    outputs = list(engine.generate([half.resumed() for half in halves], ENDING))
    assert len(outputs) == len(halves) and not any(output.aborted for output in outputs)
    assert difference(outputs, ENDING) < FULL
    by_key = {half.request.key: half for half in halves}
    for output in outputs:
        for sample, half in zip(output.samples, by_key[output.request.key].samples, strict=True):
            kept = len(half.token_ids)
            assert sample.token_ids[:kept].tolist() == half.token_ids.tolist()
            assert sample.versions.tolist() == [1] * kept + [2] * (len(sample.token_ids) - kept)
            assert kept < 5 or sample.token_ids[kept : 2 * kept].tolist() != half.token_ids.tolist()


def test_b52_made_anew_every_sample_has_one_version_and_its_own_tokens(engine: ProcessEngine) -> None:
    halves = [output for output in changed(engine, abort=True) if output.aborted]
    outputs = list(engine.generate([half.restarted() for half in halves], ENDING))
    assert outputs and difference(outputs, ENDING) < FULL
    assert {int(v) for o in outputs for s in o.samples for v in s.versions} == {2}


def versions_within(outputs: list[GroupOutput]) -> set[int]:
    """How many versions the samples have."""
    return {len(set(sample.versions.tolist())) for output in outputs for sample in output.samples}


def test_under_keep_a_sample_goes_on_with_the_keys_of_the_old_weights(engine: ProcessEngine) -> None:
    outputs = changed(engine, abort=False)
    assert versions_within(outputs) == {1, 2}
    assert difference(outputs, ENDING, old_kv=True) < FULL < difference(outputs, ENDING)


def test_a_probe_is_answered_beside_a_generation(engine: ProcessEngine) -> None:
    engine.load(weights(2), 2)
    asked: list[list[GroupOutput]] = []
    greedy = Sampling(n=1, max_tokens=1, greedy=True)

    def source() -> Iterator[GroupRequest]:
        for request in requests(6, 2):
            yield request
            if request.key == 2:
                asked.append(list(engine.generate(requests(4, 1, seed=9), greedy)))

    outputs = list(engine.generate(source(), LONG))
    assert len(outputs) == 6 and difference(outputs, LONG) < FULL
    assert len(asked[0]) == 4 and difference(asked[0], greedy) < FULL


def test_weights_that_do_not_fit_are_named_and_a_whole_set_mends_it(engine: ProcessEngine) -> None:
    sent = dict(weights(1))
    for wrong, name in (
        ({k: w for k, w in sent.items() if k != "model.norm.weight"}, r"model\.norm\.weight"),
        ({**sent, "model.nom.weight": torch.ones(64)}, r"no weight 'model\.nom\.weight'.*model\.norm\.weight"),
        ({**sent, "model.norm.weight": torch.ones(65)}, r"'model\.norm\.weight' is \(65,\)"),
    ):
        with pytest.raises(ContractError, match=name):
            engine.load(wrong.items(), 3)
        with pytest.raises(TandemError, match="half-way"):
            list(engine.generate(requests(1, 2), LONG))
    engine.load(weights(1), 1)
    assert difference(list(engine.generate(requests(2, 2), LONG)), LONG) < FULL


def test_b39_weights_that_come_while_it_sleeps_are_those_after_it_wakes(engine: ProcessEngine) -> None:
    engine.load(weights(1), 1)
    engine.sleep()
    with pytest.raises(TandemError, match="asleep"):
        engine.generate(requests(1, 2), LONG)
    engine.load(weights(2), 2)
    engine.wake()
    assert difference(list(engine.generate(requests(2, 2), LONG)), LONG) < FULL


def test_what_it_cannot_do_is_refused_by_name(engine: ProcessEngine, installed: Installed) -> None:
    declared = capabilities_of(installed.name)
    assert declared is not None
    other: LogprobsOf = "sampled" if "full" in declared.logprobs else "full"
    for sampling, name in (
        (Sampling(n=2, max_tokens=4, temperature=declared.lowest_temperature / 2), "temperature"),
        (Sampling(n=2, max_tokens=4, top_p=0.5, logprobs_of=other), "logprobs_of"),
        (Sampling(n=13, max_tokens=4), "max_num_seqs"),
        (Sampling(n=2, max_tokens=126), "128"),
    ):
        with pytest.raises(ContractError, match=name):
            list(engine.generate(requests(1, sampling.n), sampling))
    assert len(list(engine.generate(requests(2, 2), LONG))) == 2


def test_more_groups_than_it_has_room_for_are_all_answered(engine: ProcessEngine) -> None:
    outputs = list(engine.generate(requests(30, 5, longest=20), Sampling(n=5, max_tokens=6)))
    assert sorted(tokens(outputs)) == list(range(30))


def test_b83_in_half_precision_it_agrees_within_rounding_and_its_death_is_heard_of(installed: Installed) -> None:
    with installed.start(dtype="bfloat16", max_num_batched_tokens=8, keep_kv="recompute") as engine:
        outputs = changed(engine, abort=False)
        assert versions_within(outputs) == {1, 2}
        assert difference(outputs, ENDING) < HALF < difference(outputs, ENDING, old_kv=True)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            list(engine.generate(requests(1, 2), LONG))


def test_a_model_that_it_cannot_run_is_named(installed: Installed, tmp_path: Path) -> None:
    with installed.start(model=str(tmp_path)) as engine, pytest.raises(TandemError, match="can't start"):
        engine.wait_until_ready()
