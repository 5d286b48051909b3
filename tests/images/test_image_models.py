"""Image models as they are trained and sampled give what plain transformers gives, document by document."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import ContractError
from tandem.columns.images import Images
from tandem.columns.ragged import Ragged
from tandem.config.model import OptimConfig
from tandem.models.causal_lm import CausalLM
from tandem.models.loading import as_causal_lm
from tandem.models.lora import adapted_layers, get_lora_model
from tandem.models.probe import prove
from tandem.models.vision.images import freeze, rope_positions
from tandem.rollout.hf import HfEngine
from tandem.rollout.protocol import GroupRequest, Sampling
from tandem.train.engine import FsdpEngine
from tandem.train.objective import SftObjective
from tests.images.batches import Document, batch
from tests.images.tiny import FAMILIES, PACKED, model, picture, plain_logprobs, plain_model, prompt
from tools.image_shapes import IMAGE, MERGED

SIDES = st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6]))
SHOWN = st.one_of(st.none(), st.lists(SIDES, min_size=1, max_size=2).map(lambda sides: picture(*sides)))


def engine(lm: CausalLM) -> FsdpEngine:
    return FsdpEngine(
        lm, optim=OptimConfig(lr=1e-2), total_updates=10, max_tokens_per_micro_batch=4096, temperature=1.0
    )


def off_plain(lm: CausalLM, documents: list[Document]) -> float:
    """The largest difference to plain transformers of a document alone."""
    found = engine(lm).forward(batch(documents), ["logprobs"])["logprobs"]
    route, route_kept = "rows", lm.route
    lm.take(route)  # a plain model again
    expected = [plain_logprobs(lm.model, prompt(s, text), s, answer) for s, text, answer in documents]
    lm.take(route_kept)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(shown=st.lists(SHOWN, min_size=1, max_size=4), copies=st.integers(1, 3))
def test_packed_documents_see_their_own_images_alone(family: str, shown: list[Images | None], copies: int) -> None:
    documents = [
        (one, [3 + i, 4, 5], [6 + copy, 7, 8][: 1 + copy]) for i, one in enumerate(shown) for copy in range(copies)
    ]
    assert prove(model(family), "training") == {} or family not in PACKED
    assert model(family).route == ("packed" if family in PACKED else "rows")
    assert off_plain(model(family), documents) < 1e-5


def test_equal_texts_with_other_images_are_other_prompts() -> None:
    lm, text = model("qwen2_5_vl"), [3, 4, 5]
    documents = [(picture((4, 4), seed=seed), text, [6, 7]) for seed in (0, 0, 1)]
    documents[1] = documents[0]
    assert off_plain(lm, documents) < 1e-5
    found = engine(lm).forward(batch(documents), ["logprobs"])["logprobs"]
    assert torch.allclose(found[0], found[1], atol=1e-6) and not torch.allclose(found[0], found[2], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_per_document_is_right_too(family: str) -> None:
    lm = as_causal_lm(plain_model(family))
    lm.take("rows")
    assert prove(lm, "training") == prove(lm, "generation") == {} or lm.route == "rows"
    documents = [(picture((2, 6)), [3, 4], [6, 7]), (None, [3, 4], [8]), (picture((4, 2), (2, 2)), [3, 4], [6])]
    assert off_plain(lm, documents) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(family: str) -> None:
    for shown in (picture((4, 4)), picture((2, 6), (6, 4)), picture((6, 2), (2, 2), (4, 6))):
        ids = torch.tensor([prompt(shown, [3, 4, 5])])
        pictured = ids == IMAGE
        plain = model(family).model.model
        expected, delta = plain.get_rope_index(ids, mm_token_type_ids=pictured.int(), image_grid_thw=shown.grid)
        found, shift = rope_positions(Ragged.from_rows([ids[0]]), pictured[0], shown.grid, MERGED)
        assert torch.equal(found.T, expected[:, 0]) and int(shift) == int(delta)


def test_another_number_of_image_tokens_is_refused() -> None:
    wrong = batch([(picture((4, 4)), [3], [4])])
    wrong.non_tensor_batch["images"] = [picture((2, 2))]
    with pytest.raises(ContractError, match="prompt 0 has 4 image tokens, and its images have 1"):
        engine(model("qwen2_5_vl")).forward(wrong, ["logprobs"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("route", ["packed", "rows"])
def test_sampled_log_probs_are_the_trainers(family: str, route: str) -> None:
    lm = model(family) if route == "packed" else as_causal_lm(plain_model(family))
    lm.take(route)  # type: ignore[arg-type]
    shown = [picture((4, 4)), None, picture((2, 6), (4, 2), seed=3)]
    asked = [
        GroupRequest(i, torch.tensor(prompt(one, [3, 4 + i])), (10 * i, 10 * i + 1), images=one)
        for i, one in enumerate(shown)
    ]
    groups = {g.request.key: g for g in HfEngine(lm).generate(iter(asked), Sampling(n=2, max_tokens=5))}
    documents = [
        (one, [3, 4 + i], sample.token_ids.tolist()) for i, one in enumerate(shown) for sample in groups[i].samples
    ]
    sampled = [sample.logprobs for i in range(len(shown)) for sample in groups[i].samples]
    scored = engine(lm).forward(batch(documents), ["logprobs"])["logprobs"]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(sampled, scored, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_an_aborted_generation_goes_on_with_its_images(n: int) -> None:
    lm, sampling = model("qwen2_5_vl"), Sampling(n=n, max_tokens=6)
    asked = [
        GroupRequest(i, torch.tensor(prompt(one, [3, 4])), tuple(range(10 * i, 10 * i + n)), images=one)
        for i, one in enumerate([picture((4, 4)), picture((2, 6), seed=2)])
    ]
    whole = {g.request.key: g for g in HfEngine(lm).generate(iter(asked), sampling)}
    begun = [
        GroupRequest(r.key, r.prompt_ids, r.seeds, tuple(_beginning(s, 2 + i) for i, s in enumerate(g.samples)))
        for r, g in ((r, whole[r.key]) for r in asked)
    ]
    begun = [
        GroupRequest(b.key, b.prompt_ids, b.seeds, b.begun, images=r.images) for b, r in zip(begun, asked, strict=True)
    ]
    for group in HfEngine(lm).generate(iter(begun), sampling):
        for found, expected in zip(group.samples, whole[group.request.key].samples, strict=True):
            assert torch.equal(found.token_ids, expected.token_ids)
            assert torch.allclose(found.logprobs, expected.logprobs, atol=1e-5)


def _beginning(sample, tokens: int):  # type: ignore[no-untyped-def]
    kind = type(sample)
    return kind(sample.token_ids[:tokens], sample.logprobs[:tokens], sample.versions[:tokens], "aborted")


def test_an_image_is_learned_from_and_frozen_parts_stay() -> None:
    plain = plain_model("qwen2_5_vl")
    freeze(plain, ["vision_tower"])
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    trainer = engine(as_causal_lm(plain))
    documents = batch([(picture((4, 4)), [3, 4], [6, 7])])
    trainer.forward_backward(documents, SftObjective())
    trainer.optim_step(2.0)
    moved = {name for name, p in plain.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert any(".merger." in name for name in moved) and any("language_model" in name for name in moved)
    assert not any("visual" in name and ".merger." not in name for name in moved)


def test_adapters_are_on_the_language_part_alone() -> None:
    plain = plain_model("qwen2_5_vl")
    get_lora_model(plain, 2)
    adapted = adapted_layers(plain)
    assert adapted and not any("visual" in name for name in adapted)
