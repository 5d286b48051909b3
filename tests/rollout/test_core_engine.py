"""What an engine does around the steps of a core, over one that draws by a rule: every token can be told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContractError, TandemError
from tandem.models.fingerprint import fingerprint
from tandem.models.layouts.positions import Context
from tandem.rollout.cores import sglang, vllm
from tandem.rollout.cores.core import Drawn, Wanted
from tandem.rollout.cores.engine import CoreEngine, stream
from tandem.rollout.protocol import EngineStats, GroupOutput, GroupRequest, KeepKV, RolloutEngine, Sampling
from tandem.rollout.registry import capabilities_of

V = 50


def rule(weights: int, tokens: Sequence[int]) -> int:
    """The token that weights draw after some others."""
    return (weights * 31 + sum(tokens) * 7 + len(tokens) * 13) % V


class RuleCore:
    """Draws by ``rule`` from the whole sequence; ``begun`` are all requests that were ever made."""

    context = Context(60, "there are 60")

    def __init__(self) -> None:
        self.weights = self.version = 0
        self.going: dict[str, tuple[list[int], Wanted, int]] = {}
        self.begun: list[Wanted] = []
        self.told: list[str] = []
        self.turn = threading.Lock()

    def objection(self, sampling: Sampling) -> str | None:
        return "top_k = 7: there are no 7" if sampling.top_k == 7 else None

    def add(self, key: str, tokens: Sequence[int], wanted: Wanted) -> None:
        with self.alone():
            self.going[key] = list(tokens), wanted, 0
            self.begun.append(wanted)

    def abort(self, keys: Sequence[str]) -> None:
        with self.alone():
            for key in keys:
                del self.going[key]

    def step(self) -> list[Drawn]:
        with self.alone():
            return [self._draw(key) for key in list(self.going)]

    def _draw(self, key: str) -> Drawn:
        tokens, wanted, drawn = self.going[key]
        token = rule(self.weights, tokens)
        ended: Literal["stop", "length"] | None = "length" if drawn + 1 == wanted.max_tokens else None
        ended = "stop" if token in wanted.stop_token_ids else ended
        self.going[key] = [*tokens, token], wanted, drawn + 1
        if ended:
            del self.going[key]
        return Drawn(key, [token], [-token / V], ended)

    def take_over(self, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
        with self.alone():
            self.weights, self.version = int(dict(weights)["w"]), version

    def sleep(self) -> None:
        self.told.append("sleep")

    def wake(self, part: str) -> None:
        self.told.append(part)

    def alone(self) -> threading.Lock:
        """A core is called by one thread at a time."""
        assert not self.turn.locked()
        return self.turn


def made(**options: Any) -> tuple[CoreEngine, RuleCore]:
    core = RuleCore()
    usual: dict[str, Any] = {
        "version": 0,
        "whole": True,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "keep_kv": "old",
        "patience": 20.0,
    }
    return CoreEngine(core, None, **(usual | options)), core


def load(engine: CoreEngine, version: int) -> str | None:
    return engine.load([("w", torch.tensor(version))], version)


def wanted(count: int, n: int) -> list[GroupRequest]:
    return [
        GroupRequest(i, torch.arange(i, i + 3 + i % 4), tuple(10 * i + sample for sample in range(n)))
        for i in range(count)
    ]


def check(output: GroupOutput, sampling: Sampling) -> None:
    """Each token is what the weights of its version draw after those before it."""
    for sample in output.samples:
        tokens = output.request.prompt_ids.tolist()
        for token, logprob, version in zip(sample.token_ids, sample.logprobs, sample.versions, strict=True):
            assert int(token) == rule(int(version), tokens)
            assert float(logprob) == pytest.approx(-int(token) / V)
            tokens.append(int(token))
        last = int(sample.token_ids[-1])
        full = len(sample.token_ids) == sampling.max_tokens
        assert sample.finish_reason == ("stop" if last in sampling.stop_token_ids else "length")
        assert full or sample.finish_reason == "stop"


@settings(max_examples=60)
@given(
    count=st.integers(0, 7),
    n=st.integers(1, 3),
    length=st.integers(1, 12),
    events=st.dictionaries(st.integers(1, 30), st.sampled_from(["load", "abort", "restart"]), max_size=5),
    keep_kv=st.sampled_from(["old", "recompute"]),
)
def test_every_token_is_of_the_weights_that_it_tells_whatever_happens_on_the_way(
    count: int, n: int, length: int, events: dict[int, str], keep_kv: KeepKV
) -> None:
    engine, core = made(keep_kv=keep_kv)
    sampling = Sampling(n=n, max_tokens=length, stop_token_ids=(3, 4))
    waiting, unanswered, asked = wanted(count, n), 0, 0
    again = "restart" in events.values()

    def source() -> Iterator[GroupRequest | None]:
        nonlocal unanswered, asked
        while waiting or unanswered:
            asked += 1
            if (event := events.get(asked)) is not None:
                if event != "load":
                    engine.pause(abort=True)
                load(engine, engine.version + 1)
                engine.resume()
            if waiting:
                unanswered += 1
                yield waiting.pop(0)
            else:
                yield None

    finished: list[GroupOutput] = []
    for output in engine.generate(source(), sampling):
        unanswered -= 1
        if output.aborted:
            waiting.append(output.restarted() if again else output.resumed())
        else:
            finished.append(output)
    assert sorted(int(output.request.key) for output in finished) == list(range(count))
    for output in finished:
        check(output, sampling)
    assert core.going == {}


def test_each_sample_has_a_seed_and_what_goes_on_has_another_stream() -> None:
    engine, core = made()
    sampling = Sampling(n=2, max_tokens=9, baseline=True, temperature=0.7, top_p=0.9, top_k=5)
    (request,) = wanted(1, 3)

    def source() -> Iterator[GroupRequest | None]:
        yield request
        yield None
        yield None
        engine.pause(abort=True)
        engine.resume()
        yield None

    (half,) = engine.generate(source(), sampling)
    (whole,) = engine.generate([half.resumed()], sampling)
    assert half.aborted and not whole.aborted
    first, second = core.begun[: len(core.begun) // 2], core.begun[len(core.begun) // 2 :]
    drawn = [len(sample.token_ids) for sample in half.samples]
    for begun, done in ((first, [0, 0, 0]), (second, drawn)):
        for asked, seed, made_before, place in zip(begun, request.seeds, done, range(3), strict=True):
            assert asked.max_tokens == 9 - made_before
            assert asked.greedy == (place == 2)
            assert (asked.temperature, asked.top_p, asked.top_k) == (0.7, 0.9, 5)
            assert asked.seed == stream(seed, made_before)


@given(seed=st.integers(-(2**63), 2**63 - 1), drawn=st.integers(0, 5000))
def test_a_stream_is_one_that_an_engine_takes(seed: int, drawn: int) -> None:
    assert 0 <= stream(seed, drawn) < 2**63  # -1 would be none
    assert stream(seed, drawn) == stream(seed, drawn)
    assert stream(seed, 1) != stream(seed, 2) != stream(seed + 1, 2)


def test_what_a_core_objects_to_is_refused() -> None:
    engine, core = made()
    with pytest.raises(ContractError, match="sampling top_k = 7: there are no 7"):
        list(engine.generate(wanted(1, 1), Sampling(n=1, max_tokens=1, top_k=7)))
    assert core.begun == []


@pytest.mark.parametrize(("name", "core"), [("vllm", vllm), ("sglang", sglang)])
def test_what_the_plan_refuses_is_what_the_core_objects_to(name: str, core: Any) -> None:
    declared = capabilities_of(name)
    assert declared is not None and declared.lowest_temperature == core.LOWEST_TEMPERATURE
    (other,) = {"sampled", "full"} - set(declared.logprobs)
    usual: dict[str, Any] = {"n": 1, "max_tokens": 1, "logprobs_of": other}
    assert core.objection(Sampling(**usual)) is None
    assert core.objection(Sampling(**usual, top_p=0.5, greedy=True)) is None
    assert "temperature" in core.objection(Sampling(**usual, temperature=declared.lowest_temperature / 2))
    for cut in ({"top_p": 0.5}, {"top_k": 5}):
        assert core.objection(Sampling(**{**usual, "logprobs_of": "either"}, **cut)) is None
        assert "logprobs_of" in core.objection(Sampling(**usual, **cut))
        assert core.objection(Sampling(**{**usual, "logprobs_of": declared.logprobs[0]}, **cut)) is None


def test_two_generations_share_the_steps() -> None:
    engine, core = made(max_num_seqs=4)
    sampling = Sampling(n=2, max_tokens=20)
    both: dict[str, list[GroupOutput]] = {}

    def run(name: str) -> None:
        both[name] = list(engine.generate(wanted(12, 2), sampling))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for outputs in both.values():
        assert sorted(int(output.request.key) for output in outputs) == list(range(12))
        for output in outputs:
            check(output, sampling)
    assert len(both) == 2 and core.going == {}


def test_what_is_left_early_is_not_made_any_more() -> None:
    engine, core = made()
    outputs = iter(engine.generate(wanted(6, 2), Sampling(n=2, max_tokens=20)))
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert core.going == {}
    engine.sleep()
    engine.wake()


def test_weights_come_to_a_sleeping_engine_that_wakes_for_them_alone() -> None:
    engine, core = made()
    engine.sleep()
    engine.sleep()
    load(engine, 3)
    assert core.version == 3
    engine.wake()
    engine.wake()
    assert core.told == ["sleep", "weights", "weights", "kv_cache"]
    (output,) = engine.generate(wanted(1, 2), Sampling(n=2, max_tokens=4))
    assert set(output.samples[0].versions.tolist()) == {3}


def test_an_engine_of_noise_generates_nothing_and_answers_for_what_came() -> None:
    typed: RolloutEngine = made(version=-1, whole=False)[0]
    assert isinstance(typed, EngineStats)
    with pytest.raises(TandemError, match="load a complete set"):
        list(typed.generate(wanted(1, 2), Sampling(n=2, max_tokens=4)))
    assert typed.load([("w", torch.tensor(1))], 0) == fingerprint([("w", torch.tensor(1))])
    assert len(list(typed.generate(wanted(1, 2), Sampling(n=2, max_tokens=4)))) == 1
    with pytest.raises(ContractError, match="parameters of its own"):
        typed.load(None, 1)


def test_an_engine_that_was_never_given_weights_says_so() -> None:
    engine, _ = made(version=-1, whole=False)
    with pytest.raises(TandemError, match="no weights have been loaded yet: load a complete set"):
        list(engine.generate(wanted(1, 1), Sampling(n=1, max_tokens=2)))
    load(engine, 0)
    assert len(list(engine.generate(wanted(1, 1), Sampling(n=1, max_tokens=2)))) == 1


def test_what_is_drawn_is_told_at_once() -> None:
    engine, _ = made()
    told: dict[tuple[int | str, int], list[int]] = {}

    def watched(request: GroupRequest) -> GroupRequest:
        return replace(request, watch=lambda i, ids, _: told.setdefault((request.key, i), []).extend(ids))

    sampling = Sampling(n=2, max_tokens=6)
    for output in engine.generate([watched(request) for request in wanted(3, 2)], sampling):
        for i, sample in enumerate(output.samples):
            assert told[output.request.key, i] == sample.token_ids.tolist()
