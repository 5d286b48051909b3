"""Models come from folders or from a seed, and go back into folders that plain transformers loads."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.base.errors import DataError, TandemError
from tandem.base.folders import whole_folder
from tandem.models.layouts.packing import PackedLayout
from tandem.models.loading import as_causal_lm, load_causal_lm, load_model, new_model, save_pretrained_atomic
from tests.models.shapes import LLAMA

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_in_plain_transformers(tmp_path: Path, tied: bool) -> None:
    model = as_causal_lm(new_model({**LLAMA, "tie_word_embeddings": tied}, seed=0))
    save_pretrained_atomic(model, None, tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert plain.config._attn_implementation != "tandem"
    assert same(plain, model.model)
    assert same(load_causal_lm(tmp_path / "model").model, model.model)
    loaded = load_model(tmp_path / "model")
    assert loaded(input_ids=IDS, labels=IDS).loss.isfinite()


def test_exported_weights_are_saved_in_place_of_the_models_own(tmp_path: Path) -> None:
    model, other = new_model(LLAMA, seed=0), new_model(LLAMA, seed=1)
    save_pretrained_atomic(model, None, tmp_path / "model", weights=other.state_dict())
    assert same(load_model(tmp_path / "model"), other)


def test_saving_again_replaces_the_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    for seed in (0, 1):
        save_pretrained_atomic(new_model(LLAMA, seed=seed), None, tmp_path / "model")
    assert same(load_model(tmp_path / "model"), new_model(LLAMA, seed=1))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_whose_writing_fails_never_appears(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "kept") as scratch:
        (scratch / "a").write_text("old")
    with pytest.raises(OSError, match="disk"), whole_folder(tmp_path / "kept") as scratch:
        (scratch / "a").write_text("new")
        raise OSError("disk full")
    assert (tmp_path / "kept" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_what_a_killed_writer_left_is_removed_by_the_next_and_what_another_writes_is_not(tmp_path: Path) -> None:
    killed, other = tmp_path / ".kept.partial-killed", tmp_path / ".keptalive.partial-x"
    for folder in (killed, other):
        folder.mkdir()
        (folder / "a").write_text("half")
    with whole_folder(tmp_path / "kept") as first:
        (first / "a").write_text("first")
        assert not killed.exists()
        with whole_folder(tmp_path / "kept") as second:
            (second / "a").write_text("second")
            assert first.exists()
    assert (tmp_path / "kept" / "a").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "kept"]


def test_a_folder_is_written_elsewhere_where_another_removes_it_before_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], tempfile.mkdtemp

    def make_and_lose(**options: Any) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    with whole_folder(tmp_path / "kept") as scratch:
        assert str(scratch) == made[1]


def test_a_missing_model_is_named_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere'.*no such folder.*Hugging Face.*hub id"):
        load_causal_lm(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty'.*no config\.json"):
        load_model(tmp_path / "empty")
    with pytest.raises(DataError, match="model_type"):
        new_model({"hidden_size": 8}, seed=0)


def test_a_fresh_model_depends_on_its_seed_and_leaves_the_global_one_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first = new_model(LLAMA, seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert same(first, new_model(LLAMA, seed=3))
    assert not same(first, new_model(LLAMA, seed=4))


def test_models_of_one_config_keep_their_own_attention() -> None:
    plain = new_model(LLAMA, seed=0)
    twin = copy.deepcopy(plain)
    twin.config = plain.config
    for ours, theirs in zip(twin.modules(), plain.modules(), strict=True):
        if hasattr(theirs, "config"):
            ours.config = theirs.config
    as_causal_lm(twin)
    assert plain(input_ids=IDS).logits.isfinite().all()
    with pytest.raises(TandemError, match="documents begin"):
        twin(input_ids=IDS)


@pytest.mark.parametrize(
    "shape",
    [
        {"model_type": "gpt2", "vocab_size": 17, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.5},
        {**LLAMA, "attention_dropout": 0.5},
        {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 2, "router_jitter_noise": 0.5},
    ],
    ids=["dropout", "dropout in attention", "jitter of a router"],
)
def test_training_scores_with_the_distribution_that_is_sampled_from(shape: dict[str, Any]) -> None:
    plain = new_model(shape, seed=0)
    expected = plain(input_ids=IDS).logits[0]
    model = as_causal_lm(plain).train()
    layout = PackedLayout.of_lengths(torch.tensor([IDS.shape[1]]))
    found = model(IDS[0], torch.arange(IDS.shape[1]), layout, lambda hidden, head: head.logits(hidden))
    torch.testing.assert_close(found, expected)
