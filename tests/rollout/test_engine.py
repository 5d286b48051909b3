"""The engine as its caller sees it: admission, versions, weights, pause, sleep, and errors that name the prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from tandem.base.errors import ContractError, DeadlineError, TandemError
from tandem.models.fingerprint import fingerprint
from tandem.models.layouts.cache import KVStore
from tandem.models.loading import as_causal_lm
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupRequest, RolloutEngine, Sampling
from tests.rollout.tiny_models import V, gpt2, llama, lm, requests, tokens

SAMPLING = Sampling(n=2, max_tokens=8, stop_token_ids=(0, 1))


def weights(seed: int, *, tied: bool = False) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in llama(seed, tied=tied).named_parameters()}


def test_requests_are_pulled_as_room_appears() -> None:
    pulled: list[int] = []

    def source() -> Iterator[GroupRequest]:
        for request in requests(12):
            pulled.append(int(request.key))
            yield request

    engine = HfEngine(lm(), max_num_seqs=4)  # two groups at a time, and as many that wait
    outputs = engine.generate(source(), SAMPLING)
    assert pulled == []
    for finished in range(1, 13):
        next(outputs)
        assert len(pulled) <= finished + 4
    assert next(outputs, None) is None
    assert sorted(pulled) == list(range(12))


def test_a_source_with_nothing_right_now_is_asked_again_after_the_next_token() -> None:
    first, second = requests(2)
    asked = 0

    def source() -> Iterator[GroupRequest | None]:
        nonlocal asked
        yield first
        for _ in range(3):
            asked += 1
            yield None
        yield second

    sampling = Sampling(n=2, max_tokens=8)
    outputs = list(HfEngine(lm()).generate(source(), sampling))
    assert asked == 3
    assert tokens(outputs) == tokens(list(HfEngine(lm()).generate([first, second], sampling)))
    assert [o.request.key for o in outputs] == [0, 1]


def test_a_source_that_neither_waits_nor_ends_is_refused() -> None:
    with pytest.raises(ContractError, match="must wait"):
        list(HfEngine(lm()).generate([None], SAMPLING))


def test_short_prompts_of_a_window_start_first_and_a_long_one_is_not_overtaken_for_ever() -> None:
    long = GroupRequest("long", torch.ones(30, dtype=torch.int64), (1, 2))

    def source() -> Iterator[GroupRequest]:
        yield long
        yield from requests(9, longest=5)

    outputs = HfEngine(lm(), max_num_seqs=4).generate(source(), Sampling(n=2, max_tokens=3))
    assert "long" in [next(outputs).request.key for _ in range(4)]


def test_many_prompts_and_samples_share_few_rows() -> None:
    sampling = Sampling(n=3, max_tokens=9, stop_token_ids=(0, 1, 2))
    wide = tokens(list(HfEngine(lm(), max_num_seqs=100).generate(requests(20, n=3), sampling)))
    for limit in (3, 7, 11):
        narrow = HfEngine(lm(), max_num_seqs=limit, max_num_batched_tokens=limit)
        assert tokens(list(narrow.generate(requests(20, n=3), sampling))) == wide


def test_b82_samples_of_a_group_differ_and_do_not_depend_on_the_worker() -> None:
    prompt, seeds = requests(1)[0].prompt_ids, tuple(range(8))
    sampling = Sampling(n=8, max_tokens=12)
    whole = tokens(list(HfEngine(lm()).generate([GroupRequest("p", prompt, seeds)], sampling)))["p"]
    assert len({tuple(answer) for answer in whole}) == 8
    halves: list[list[int]] = []
    for part in (seeds[:4], seeds[4:]):
        torch.manual_seed(0)  # what a worker process would start from
        halves += tokens(
            list(HfEngine(lm()).generate([GroupRequest("p", prompt, part)], Sampling(n=4, max_tokens=12)))
        )["p"]
    assert halves == whole


def test_generation_neither_reads_nor_moves_the_global_random_state() -> None:
    engine, wanted = HfEngine(lm()), requests(3)
    before = torch.random.get_rng_state()
    list(engine.generate(wanted, SAMPLING))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_b34_absolute_positions_are_right_beside_longer_rows() -> None:
    model, plain = as_causal_lm(gpt2()), gpt2()
    wanted = requests(6, shortest=3, longest=40)
    for output in HfEngine(model, max_num_seqs=8).generate(wanted, Sampling(n=2, max_tokens=20)):
        for sample in output.samples:
            ids = torch.cat([output.request.prompt_ids, sample.token_ids])
            logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1)
            start = len(output.request.prompt_ids) - 1
            expected = logprobs[torch.arange(start, len(ids) - 1), sample.token_ids]
            assert torch.allclose(sample.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_b27_logprobs_equal_the_models_own_at_that_temperature(temperature: float) -> None:
    plain = llama()
    for output in HfEngine(lm()).generate(requests(4), Sampling(n=2, max_tokens=10, temperature=temperature)):
        for sample in output.samples:
            ids = torch.cat([output.request.prompt_ids, sample.token_ids])
            logits = plain(ids[None]).logits[0, len(output.request.prompt_ids) - 1 : -1]
            expected = (logits / temperature).log_softmax(-1).gather(1, sample.token_ids[:, None])[:, 0]
            assert torch.allclose(sample.logprobs, expected, atol=1e-4)


def test_answers_can_be_trained_on() -> None:
    output = next(iter(HfEngine(lm()).generate(requests(1), SAMPLING)))
    ratio = (torch.zeros_like(output.samples[0].logprobs, requires_grad=True) - output.samples[0].logprobs).exp()
    ratio.sum().backward()
    assert torch.is_grad_enabled()


def test_the_callers_grad_mode_and_the_models_training_mode_survive() -> None:
    model = lm().train()
    for _ in HfEngine(model, shares_weights=True).generate(requests(3), SAMPLING):
        assert torch.is_grad_enabled()
        assert model.training


def test_each_token_carries_the_version_that_drew_it() -> None:
    engine = HfEngine(lm(1), max_num_seqs=4)
    sampling = Sampling(n=2, max_tokens=10, stop_token_ids=tuple(range(4)))
    seen: set[tuple[int, ...]] = set()
    for version, output in enumerate(engine.generate(requests(8), sampling), start=1):
        for sample in output.samples:
            labels = sample.versions.tolist()
            assert labels == sorted(labels)
            assert labels[-1] <= engine.version
            seen.add(tuple(sorted(set(labels))))
        engine.load(weights(version).items(), version)
    assert engine.version == 8
    assert any(len(labels) > 1 for labels in seen)


def test_after_a_load_a_running_sample_goes_on_under_the_new_weights() -> None:
    engine = HfEngine(lm(1))
    pair = [GroupRequest(key, torch.tensor([5, 6, 7]), (key,)) for key in range(2)]
    outputs = engine.generate(pair, Sampling(n=1, max_tokens=12, stop_token_ids=tuple(range(20))))
    first = next(outputs)
    new = {name: torch.zeros_like(w) for name, w in weights(1).items()}
    engine.load(new.items(), 5)  # a model of zeros is uniform
    second = next(outputs)
    assert set(first.samples[0].versions.tolist()) == {0}
    after = second.samples[0].versions == 5
    assert bool(after.any())
    assert torch.allclose(second.samples[0].logprobs[after], torch.tensor(1 / V).log())


def test_loaded_weights_are_the_ones_that_generate() -> None:
    for tied in (False, True):
        engine = HfEngine(as_causal_lm(llama(0, tied=tied)))
        answer = engine.load(weights(3, tied=tied).items(), 7)
        fresh = llama(3, tied=tied)
        assert answer == fingerprint(fresh.named_parameters())
        assert engine.version == 7
        expected = list(HfEngine(as_causal_lm(fresh)).generate(requests(4), SAMPLING))
        assert tokens(list(engine.generate(requests(4), SAMPLING))) == tokens(expected)


def test_a_tied_head_may_be_sent_under_both_names() -> None:
    engine = HfEngine(as_causal_lm(llama(0, tied=True)))
    sent = weights(3, tied=True)
    sent["lm_head.weight"] = sent["model.embed_tokens.weight"]
    assert engine.load(sent.items(), 1) == fingerprint(sent.items())


def test_b51_buffers_may_be_overwritten_as_soon_as_load_returns() -> None:
    engine, buffer = HfEngine(lm(0)), torch.empty(10_000)

    def through_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights(3).items():
            view = buffer[: weight.numel()].view(weight.shape)
            view.copy_(weight)
            yield name, view
            buffer.fill_(torch.nan)

    answer = engine.load(through_one_buffer(), 1)
    assert answer == fingerprint(llama(3).named_parameters())
    assert tokens(list(engine.generate(requests(2), SAMPLING))) == tokens(
        list(HfEngine(lm(3)).generate(requests(2), SAMPLING))
    )


def test_b39_after_sleep_and_wake_the_weights_are_those_of_the_last_load() -> None:
    expected = tokens(list(HfEngine(lm(3)).generate(requests(3), SAMPLING)))
    for order in ("load asleep", "load awake"):
        engine = HfEngine(lm(0))
        list(engine.generate(requests(3), SAMPLING))
        if order == "load awake":
            engine.load(weights(3).items(), 1)
        engine.sleep()
        if order == "load asleep":
            engine.load(weights(3).items(), 1)
        with pytest.raises(TandemError, match="wake"):
            engine.generate(requests(3), SAMPLING)
        engine.wake()
        assert engine.version == 1
        assert tokens(list(engine.generate(requests(3), SAMPLING))) == expected


def test_b40_no_keys_of_old_weights_are_reused_for_the_same_prompt() -> None:
    engine = HfEngine(lm(0))
    list(engine.generate(requests(3), SAMPLING))
    engine.load(weights(3).items(), 1)
    again = list(engine.generate(requests(3), SAMPLING))
    assert tokens(again) == tokens(list(HfEngine(lm(3)).generate(requests(3), SAMPLING)))


def test_an_engine_on_the_trainers_parameters_follows_them_without_a_copy() -> None:
    model = lm(0)
    engine = HfEngine(model, shares_weights=True)
    pointers = [p.data_ptr() for p in model.parameters()]
    list(engine.generate(requests(2), SAMPLING))
    model.model.load_state_dict(llama(3).state_dict())  # an optimizer step
    assert engine.load(None, 4) is None
    assert engine.version == 4
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert tokens(list(engine.generate(requests(2), SAMPLING))) == tokens(
        list(HfEngine(lm(3)).generate(requests(2), SAMPLING))
    )
    with pytest.raises(ContractError, match="load\\(None, version\\)"):
        engine.load(weights(1).items(), 5)
    with pytest.raises(ContractError, match="load\\(weights, version\\)"):
        HfEngine(lm()).load(None, 1)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "source"])
def test_a_load_that_fails_leaves_an_engine_that_refuses_until_a_whole_one(fault: str) -> None:
    engine, sent = HfEngine(lm(0)), weights(3)
    name = list(sent)[4]

    def items() -> Iterator[tuple[str, torch.Tensor]]:
        for key, weight in sent.items():
            if key != name:
                yield key, weight
            elif fault == "unknown":
                yield key + "s", weight
            elif fault == "shape":
                yield key, weight.flatten()[:3]
            elif fault == "source":
                raise ConnectionError("the sender died")

    with pytest.raises(
        (ContractError, ConnectionError), match="died" if fault == "source" else name.replace(".", "\\.")
    ):
        engine.load(items(), 1)
    assert engine.version == 0
    with pytest.raises(TandemError, match="half-way"):
        list(engine.generate(requests(1), SAMPLING))
    engine.load(sent.items(), 1)
    list(engine.generate(requests(1), SAMPLING))


def test_pause_stops_between_tokens_and_resume_goes_on() -> None:
    sampling = Sampling(n=2, max_tokens=60)
    engine = HfEngine(lm(), max_num_seqs=4)
    expected = tokens(list(HfEngine(lm(), max_num_seqs=4).generate(requests(6), sampling)))
    outputs: list[object] = []
    engine.pause()
    worker = threading.Thread(target=lambda: outputs.extend(engine.generate(requests(6), sampling)), daemon=True)
    worker.start()
    time.sleep(0.05)
    assert outputs == []
    engine.resume()
    engine.pause()
    frozen = len(outputs)
    engine.load(weights(0).items(), 1)
    assert len(outputs) == frozen
    engine.resume()
    worker.join(30)
    assert not worker.is_alive()
    assert tokens(outputs) == expected  # type: ignore[arg-type]


def test_a_pause_that_nobody_ends_is_an_error_that_says_so() -> None:
    engine = HfEngine(lm(), patience=0.05)
    engine.pause()
    with pytest.raises(DeadlineError, match="pause"):
        list(engine.generate(requests(1), SAMPLING))


def test_sleep_is_refused_while_a_generation_is_under_way() -> None:
    engine = HfEngine(lm(), max_num_seqs=2)
    outputs = engine.generate(requests(3), SAMPLING)
    next(outputs)
    with pytest.raises(TandemError, match="generate"):
        engine.sleep()
    outputs.close()  # type: ignore[attr-defined]
    engine.sleep()


def test_two_generations_of_one_engine_may_alternate() -> None:
    engine = HfEngine(lm(), max_num_seqs=2)
    one, two = (engine.generate(requests(4, seed=seed), SAMPLING) for seed in (1, 2))
    mixed: list[list[object]] = [[], []]
    for a, b in zip(one, two, strict=True):
        mixed[0].append(a)
        mixed[1].append(b)
    for seed, outputs in zip((1, 2), mixed, strict=True):
        expected = tokens(list(HfEngine(lm()).generate(requests(4, seed=seed), SAMPLING)))
        assert tokens(outputs) == expected  # type: ignore[arg-type]


def test_what_cannot_be_answered_is_refused_by_the_name_of_the_prompt() -> None:
    engine = HfEngine(lm(), max_num_seqs=2)
    ids = torch.tensor([1, 2, 3])
    for request, words in (
        (GroupRequest("empty", ids[:0], (1, 2)), "'empty' has no tokens"),
        (GroupRequest("seeds", ids, (1, 2, 3)), "'seeds' has 3 seeds for n = 2"),
        (GroupRequest("long", ids.repeat(40), (1, 2)), "'long'.* 120 prompt tokens .* context is 96"),
    ):
        with pytest.raises(ContractError, match=words):
            list(engine.generate([request], SAMPLING))
    with pytest.raises(ContractError, match="max_num_seqs"):
        engine.generate(requests(1, n=3), Sampling(n=3, max_tokens=1))


def test_broken_weights_name_the_prompt_and_do_not_poison_the_next_call() -> None:
    model = lm(3)
    engine = HfEngine(model, shares_weights=True)
    head = model.model.get_output_embeddings().weight
    list(engine.generate(requests(2), SAMPLING))
    with torch.no_grad():
        head.fill_(torch.nan)
        with pytest.raises(TandemError, match=r"prompt 0.*not finite"):
            list(engine.generate(requests(1), SAMPLING))
    model.model.load_state_dict(llama(3).state_dict())
    assert tokens(list(engine.generate(requests(2), SAMPLING))) == tokens(
        list(HfEngine(lm(3)).generate(requests(2), SAMPLING))
    )


def test_memory_grows_by_a_part_of_itself_not_with_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    allocate = KVStore._allocate

    def counting(self: KVStore, *tensors: torch.Tensor) -> torch.Tensor:
        moved.append(self.capacity)
        return allocate(self, *tensors)

    model = as_causal_lm(llama())
    model.model.config.max_position_embeddings = 1000
    engine = HfEngine(model)
    monkeypatch.setattr(KVStore, "_allocate", counting)
    list(engine.generate(requests(1), Sampling(n=2, max_tokens=600)))
    layers_and_kinds = 2 * 2
    assert sorted(set(moved)) == [64, 128, 192, 256, 320, 384, 448, 512, 576, 704]
    assert len(moved) <= layers_and_kinds * 12  # of prompts once, and once to measure


def test_bfloat16_compute_gives_logprobs_near_the_models() -> None:
    model = as_causal_lm(llama(), dtype="bfloat16")
    for output in HfEngine(model).generate(requests(2), Sampling(n=2, max_tokens=6)):
        for sample in output.samples:
            ids = torch.cat([output.request.prompt_ids, sample.token_ids])
            with torch.no_grad(), model.computing():
                logits = llama()(ids[None]).logits[0, len(output.request.prompt_ids) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(1, sample.token_ids[:, None])[:, 0]
            assert torch.allclose(sample.logprobs, expected, atol=0.5)
            assert (sample.logprobs - expected).abs().mean() < 0.1


def test_the_engine_satisfies_the_protocol() -> None:
    engine: RolloutEngine = HfEngine(lm())
    members = [name for name in vars(RolloutEngine) if not name.startswith("_")]
    assert len(members) <= 7
    assert all(hasattr(engine, name) for name in members)
