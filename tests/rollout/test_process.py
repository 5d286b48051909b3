"""An engine in a process of its own answers as one here does; its weights travel through shared memory."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.base.errors import ContractError, DataError, TandemError
from tandem.models.causal_lm import CausalLM
from tandem.models.fingerprint import fingerprint
from tandem.models.loading import as_causal_lm
from tandem.models.shared_weights import SharedWeights
from tandem.rollout.capabilities import EngineCapabilities
from tandem.rollout.hf import HfEngine
from tandem.rollout.host import build_engine
from tandem.rollout.process import ProcessEngine
from tandem.rollout.protocol import EngineStats, GroupOutput, GroupRequest, RolloutEngine, Sampling
from tandem.rollout.registry import register_engine
from tandem.rollout.spec import EngineSpec
from tests.rollout.tiny_models import bits, llama, requests, tokens

SAMPLING = Sampling(n=2, max_tokens=8, stop_token_ids=(0, 1))
STAGGERED = Sampling(n=2, max_tokens=70, stop_token_ids=(0,))
LONG = Sampling(n=2, max_tokens=70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama(0, tied=True).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ProcessEngine]:
    spec = EngineSpec(model=str(folder), exact=True, max_num_seqs=4, threads=1)
    with ProcessEngine("rollout-0", spec, deadline_s=60.0) as engine:
        yield engine


@pytest.fixture(autouse=True)
def known_weights(engine: ProcessEngine) -> None:
    engine.load(weights(0).items(), engine.version + 1)


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in llama(seed, tied=True).named_parameters()}


def here(seed: int = 0) -> HfEngine:
    return HfEngine(as_causal_lm(llama(seed, tied=True)), exact=True, max_num_seqs=4)


def test_groups_are_those_of_an_engine_here_bit_by_bit(engine: ProcessEngine) -> None:
    wanted = requests(9)
    outputs = list(engine.generate(wanted, SAMPLING))
    assert bits(outputs) == bits(list(here().generate(wanted, SAMPLING)))
    assert sorted(int(o.request.key) for o in outputs) == list(range(9))
    assert all(o.request is wanted[int(o.request.key)] for o in outputs)
    sample = outputs[0].samples[0]
    assert (sample.token_ids.dtype, sample.logprobs.dtype, sample.versions.dtype) == (
        torch.int64,
        torch.float32,
        torch.int32,
    )


def test_it_is_another_process_and_satisfies_the_protocol(engine: ProcessEngine) -> None:
    typed: RolloutEngine = engine
    assert isinstance(typed, EngineStats)
    assert engine.pid != os.getpid()
    assert engine.ping(20.0) == engine.version
    engine.check()


def test_requests_are_sent_ahead_only_as_there_is_room(engine: ProcessEngine) -> None:
    pulled = 0

    def source() -> Iterator[GroupRequest]:
        nonlocal pulled
        for request in requests(14):
            pulled += 1
            yield request

    for finished, _ in enumerate(engine.generate(source(), SAMPLING), start=1):
        assert pulled <= finished + 3 * 2  # two groups in flight, a window of two that wait, and one under way
    assert pulled == 14


def test_a_source_with_nothing_right_now_is_asked_again(engine: ProcessEngine) -> None:
    first, second = requests(2)
    answered: list[GroupOutput] = []
    asked = 0

    def source() -> Iterator[GroupRequest | None]:
        nonlocal asked
        yield first  # half of the room: the engine wants more at once
        while not answered:
            asked += 1
            yield None
        yield second

    for output in engine.generate(source(), LONG):
        answered.append(output)
    assert asked
    assert tokens(answered) == tokens(list(here().generate([first, second], LONG)))


def test_a_source_that_neither_waits_nor_ends_is_refused(engine: ProcessEngine) -> None:
    with pytest.raises(ContractError, match="must wait"):
        list(engine.generate([None], SAMPLING))
    twins = [requests(1)[0], requests(1)[0]]
    with pytest.raises(ContractError, match="have the key 0"):
        list(engine.generate(twins, SAMPLING))


def test_errors_that_name_the_prompt_come_through_and_leave_the_engine_well(engine: ProcessEngine) -> None:
    with pytest.raises(ContractError, match="'empty' has no tokens"):
        list(engine.generate([GroupRequest("empty", torch.empty(0, dtype=torch.int64), (1, 2))], SAMPLING))
    with pytest.raises(ContractError, match="max_num_seqs"):
        engine.generate([], Sampling(n=5, max_tokens=1))
    assert len(list(engine.generate(requests(2), SAMPLING))) == 2


def test_an_iterator_may_be_left_early(engine: ProcessEngine) -> None:
    outputs = engine.generate(requests(12), SAMPLING)
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    engine.sleep()
    with pytest.raises(TandemError, match="asleep"):
        engine.generate(requests(1), SAMPLING)
    engine.wake()
    assert bits(list(engine.generate(requests(3), SAMPLING))) == bits(list(here().generate(requests(3), SAMPLING)))


def test_loaded_weights_are_the_ones_that_generate_and_their_fingerprint_is_answered(engine: ProcessEngine) -> None:
    for tied_twice in (False, True):
        sent = weights(3)
        if tied_twice:
            sent["lm_head.weight"] = sent["model.embed_tokens.weight"]
        version = engine.version + 1
        assert engine.load(sent.items(), version) == fingerprint(sent.items())
        assert engine.version == engine.ping(20.0) == version
        assert engine.applied_s > 0
        outputs = list(engine.generate(requests(4), SAMPLING))
        assert tokens(outputs) == tokens(list(here(3).generate(requests(4), SAMPLING)))
        assert {int(v) for o in outputs for s in o.samples for v in s.versions} == {version}


def test_b51_buffers_may_be_overwritten_as_soon_as_load_returns(engine: ProcessEngine) -> None:
    buffer = torch.empty(10_000)

    def through_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights(3).items():
            view = buffer[: weight.numel()].view(weight.shape)
            view.copy_(weight)
            yield name, view
            buffer.fill_(torch.nan)

    assert engine.load(through_one_buffer(), engine.version + 1) == fingerprint(weights(3).items())
    assert tokens(list(engine.generate(requests(2), SAMPLING))) == tokens(list(here(3).generate(requests(2), SAMPLING)))


def test_b51_shared_memory_that_is_handed_over_may_be_overwritten_too(engine: ProcessEngine) -> None:
    shared = SharedWeights(bucket_bytes=4096)
    shared.write(weights(3).items())
    answer = engine.load(shared, engine.version + 1)
    shared.write((name, torch.full_like(w, torch.nan)) for name, w in weights(3).items())
    assert answer == fingerprint(weights(3).items())
    assert tokens(list(engine.generate(requests(2), SAMPLING))) == tokens(list(here(3).generate(requests(2), SAMPLING)))


def test_a_source_of_weights_that_fails_leaves_the_engine_as_it_was(engine: ProcessEngine) -> None:
    version = engine.version

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(3).items())[:3]
        raise ConnectionError("the sender died")

    with pytest.raises(ConnectionError):
        engine.load(dying(), version + 1)
    assert engine.ping(20.0) == version
    assert bits(list(engine.generate(requests(2), SAMPLING))) == bits(list(here().generate(requests(2), SAMPLING)))


def test_weights_that_do_not_fit_are_refused_and_a_whole_set_mends_it(engine: ProcessEngine) -> None:
    sent = weights(3)
    sent.pop("model.norm.weight")
    with pytest.raises(ContractError, match=r"model\.norm\.weight"):
        engine.load(sent.items(), engine.version + 1)
    with pytest.raises(TandemError, match="half-way"):
        list(engine.generate(requests(1), SAMPLING))
    with pytest.raises(ContractError, match="load\\(weights, version\\)"):
        engine.load(None, 9)


def test_under_keep_tokens_of_one_sample_carry_two_versions(engine: ProcessEngine) -> None:
    old = engine.version
    outputs: list[GroupOutput] = []
    for output in engine.generate(requests(12), STAGGERED):
        outputs.append(output)
        engine.load(weights(len(outputs)).items(), engine.version + 1)
    labels = [s.versions.tolist() for o in outputs for s in o.samples]
    assert all(versions == sorted(versions) for versions in labels)
    assert min(versions[0] for versions in labels) == old
    assert any(len(set(versions)) == 2 for versions in labels)


def test_an_aborted_generation_goes_on_where_it_was(engine: ProcessEngine) -> None:
    waiting = requests(4)
    outputs: list[GroupOutput] = []
    unanswered = 0
    started = threading.Event()

    def source() -> Iterator[GroupRequest | None]:
        nonlocal unanswered
        while waiting or unanswered:
            if waiting:
                unanswered += 1
                started.set()
                yield waiting.pop(0)
            else:
                yield None

    def interrupt() -> None:
        assert started.wait(30)
        steps = engine.steps
        while engine.steps == steps:  # a sign of life that tells of tokens
            time.sleep(0.01)
        engine.pause(abort=True)
        engine.resume()

    other = threading.Thread(target=interrupt, daemon=True)
    other.start()
    aborted = 0
    for output in engine.generate(source(), LONG):
        unanswered -= 1
        if output.aborted:
            aborted += 1
            waiting.append(output.resumed())
        else:
            outputs.append(output)
            if not aborted:
                waiting.append(GroupRequest(f"more {len(outputs)}", output.request.prompt_ids, output.request.seeds))
    other.join(30)
    assert not other.is_alive()
    assert aborted
    expected = tokens(list(here().generate(requests(4), LONG)))
    assert {k: v for k, v in tokens(outputs).items() if k in expected} == expected


def test_nothing_is_made_while_it_is_paused(engine: ProcessEngine) -> None:
    outputs: list[GroupOutput] = []
    engine.pause()
    worker = threading.Thread(target=lambda: outputs.extend(engine.generate(requests(2), SAMPLING)), daemon=True)
    worker.start()
    engine.load(weights(3).items(), engine.version + 1)
    engine.ping(20.0)
    assert outputs == []
    engine.resume()
    worker.join(30)
    assert not worker.is_alive()
    assert tokens(outputs) == tokens(list(here(3).generate(requests(2), SAMPLING)))
    assert {int(v) for o in outputs for s in o.samples for v in s.versions} == {engine.version}


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with (
        ProcessEngine("rollout-1", EngineSpec(model=str(tmp_path / "nothing"), threads=1)) as engine,
        pytest.raises(DataError, match=r"'rollout-1' can't start: .*nothing"),
    ):
        engine.generate(requests(1), SAMPLING)


def test_an_engine_may_live_in_another_environment_and_load_the_model_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "numbers.py").write_text("raise RuntimeError('a file of the user, called as one of Python')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "own")])
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nELSEWHERE=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    spec = EngineSpec(
        model=str(folder),
        engine="test_elsewhere",
        plugins=("tests.rollout.process_engines",),
        python=str(python),
        max_num_seqs=4,
        threads=1,
    )
    with ProcessEngine("rollout-0", spec, deadline_s=60.0) as engine:
        assert tokens(list(engine.generate(requests(2), SAMPLING))) == tokens(
            list(here().generate(requests(2), SAMPLING))
        )
        assert engine.load(weights(2).items(), 1) == fingerprint(weights(2).items())


def test_an_engine_whose_package_is_not_there_says_so_where_it_is_made(folder: Path) -> None:
    can = EngineCapabilities(weights=("own",), package="no-such-package", versions=">=2")

    @register_engine("test_needs_package", capabilities=can)
    def needs_package(model: CausalLM) -> HfEngine:
        raise AssertionError

    with pytest.raises(TandemError, match=r"'test_needs_package' needs the package no-such-package>=2"):
        build_engine(EngineSpec(model=str(folder), engine="test_needs_package"))


def test_what_is_drawn_is_told_from_the_other_process_token_by_token(engine: ProcessEngine) -> None:
    told: dict[tuple[int | str, int], list[tuple[int, float]]] = {}
    calls = 0

    def watched(request: GroupRequest) -> GroupRequest:
        def watch(sample: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
            nonlocal calls
            calls += 1
            told.setdefault((request.key, sample), []).extend(zip(ids, logprobs, strict=True))

        return replace(request, watch=watch if request.key != 0 else None)

    outputs = list(engine.generate([watched(request) for request in requests(3)], SAMPLING))
    expected = {
        (output.request.key, i): list(zip(sample.token_ids.tolist(), sample.logprobs.tolist(), strict=True))
        for output in outputs
        for i, sample in enumerate(output.samples)
        if output.request.key != 0
    }
    assert told == expected and calls == sum(map(len, expected.values()))
