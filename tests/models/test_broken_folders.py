"""Folders that hold no whole model are refused with the folder and the cause, whatever transformers raises for them."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.base.errors import DataError, WriteError
from tandem.base.manifest import MANIFEST, write_manifest
from tandem.config.model import ModelConfig
from tandem.models.loading import load_causal_lm, load_model
from tandem.models.value_model import load_value_model
from tandem.plan.checks.model.folder import check_files_of
from tandem.plan.checks.model.model import read_checked
from tandem.plan.files.model import read_model
from tandem.session.keep.exports import copy_model
from tests.e2e.seven import make_task
from tools.families import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model."""
    make_task(tmp_path)
    return tmp_path / "model"


def edit_config(folder: Path, **changes: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def drop_one(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_one(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.extra.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


def edit_weight(folder: Path, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[UP] = edit(weights[UP])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def set_one(value: float) -> Callable[[Path], None]:
    return lambda folder: edit_weight(folder, lambda weight: weight.index_fill(0, torch.tensor([3]), value))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut weights": (cut_weights, "model.safetensors: is cut"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors: can't be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there are no weights in the folder"),
    "unknown architecture": (lambda f: edit_config(f, model_type="nonesuch"), "could not be read"),
    "another width": (lambda f: edit_config(f, hidden_size=32), "could not be read"),
    "more layers": (lambda f: edit_config(f, num_hidden_layers=3), "9 weights .*model.layers.2"),
    "fewer layers": (lambda f: edit_config(f, num_hidden_layers=1), "9 weights .*not in the model.*model.layers.1"),
    "a weight too many": (add_one, "1 weights .*not in the model.*'model.layers.1.mlp.extra.weight'"),
    "NaN": (set_one(float("nan")), f"{UP} holds numbers that are not finite"),
    "infinity": (set_one(float("-inf")), f"{UP} holds numbers that are not finite"),
    "a field of another type": (
        lambda f: edit_config(f, hidden_size="64"),
        "the hidden_size '64', which is no",
    ),
    "a head beside the table it is tied to": (
        lambda f: edit_config(f, tie_word_embeddings=True),
        "its files hold a head that is not the embedding",
    ),
    "a weight short": (drop_one, "1 weights .*'model.layers.1.mlp.up_proj.weight'"),
}


@pytest.mark.parametrize(
    "section", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}, {"quant_method": "of-mine"}, {"bits": 4}]
)
def test_quantized_weights_are_refused_by_plan_and_load(section: dict[str, object], tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": section}))
    (problem,) = read_checked("model", ModelConfig(path=str(tmp_path)))[1]
    assert "its weights are quantized" in problem.reason and str(section.get("quant_method", "")) in problem.reason
    with pytest.raises(DataError, match="its weights are quantized"):
        load_causal_lm(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_packed_weights_that_no_section_tells_of_are_refused_by_plan_and_load(folder: Path, dtype: torch.dtype) -> None:
    edit_weight(folder, lambda weight: (weight * 100).to(dtype))
    (problem,) = check_files_of("model", ModelConfig(path=str(folder)))
    assert problem.key == "model.path" and f"{UP} is stored as " in problem.reason
    with pytest.raises(DataError, match=f"{UP} is stored as "):
        load_causal_lm(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_each_floating_dtype_are_taken(folder: Path, dtype: torch.dtype) -> None:
    edit_weight(folder, lambda weight: weight.to(dtype))
    assert list(check_files_of("model", ModelConfig(path=str(folder)))) == []
    assert load_model(folder).get_parameter(UP).dtype == torch.float32


class Runs:
    """A pickle of it makes a file where it is read by a loader that runs what is in it."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.made,)


def test_pickled_weights_are_read_and_no_code_in_them_is_run(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert torch.equal(load_model(folder).get_parameter(UP), weights[UP])
    torch.save({**weights, "more": Runs(tmp_path / "made")}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="could not be read"):
        load_model(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_named_and_never_filled_up_with_random_weights(folder: Path, kind: str) -> None:
    break_it, cause = BROKEN[kind]
    break_it(folder)
    for load in (load_model, load_causal_lm):
        with pytest.raises(DataError, match=cause) as error:
            load(folder)
        assert str(folder) in str(error.value)


@pytest.mark.parametrize("kind", ["fewer layers", "a weight too many"])
def test_a_critic_takes_another_head_and_loses_nothing_beneath_it(folder: Path, kind: str) -> None:
    BROKEN[kind][0](folder)
    with pytest.raises(DataError, match=r"not in the model that config.json describes, 'model.layers.1"):
        load_value_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("manifest", [True, False])
def test_a_folder_with_fewer_layers_than_weights_is_not_exported(folder: Path, tmp_path: Path, manifest: bool) -> None:
    edit_config(folder, num_hidden_layers=1)
    (folder / MANIFEST).unlink(missing_ok=True)
    if manifest:
        write_manifest(folder)
    with pytest.raises(DataError, match=r"config.json has 1 layers, and there are weights of more, model.layers.1"):
        copy_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "misfit"),
    [
        ({"hidden_size": "64"}, "the hidden_size '64', which is no whole number of 1 or more"),
        ({"hidden_size": 64.0}, "the hidden_size 64.0"),
        ({"num_hidden_layers": 0}, "the num_hidden_layers 0"),
        ({"max_position_embeddings": 0}, "the max_position_embeddings 0"),
        ({"num_key_value_heads": True}, "the num_key_value_heads True"),
        ({"sliding_window": "x"}, "the sliding_window 'x'"),
        ({"num_key_value_heads": 3}, "4 num_attention_heads, which 3 num_key_value_heads can't be shared by"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "a hidden_size of 64 has no 5 equal"),
    ],
    ids=str,
)
def test_sizes_that_no_model_has_are_refused_by_the_plan(folder: Path, changes: dict[str, object], misfit: str) -> None:
    edit_config(folder, **changes)
    (problem,) = read_checked("model", ModelConfig(path=str(folder)))[1]
    assert problem.key == "model.path" and misfit in problem.reason


def test_a_folder_with_more_layers_than_weights_is_refused_by_its_headers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    misfit = "its config.json has 4 layers, and there are weights of 2, up to model.layers.1"
    assert (read_model(folder).misfit or "").startswith(misfit)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "longcat_flash", "hrm_text", "dory", "zamba2", "jamba"])
def test_what_a_family_saves_is_all_taken(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    assert read_model(tmp_path).misfit is None
    assert load_model(tmp_path).num_parameters() > 0


def test_layers_that_predict_further_tokens_may_stand_behind_the_last(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1, num_nextn_predict_layers=1)
    assert read_model(folder).misfit is None
    assert load_model(folder).config.num_hidden_layers == 1


def test_tables_that_a_model_computes_are_no_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("self_attn.rotary_emb.inv_freq", "attn.masked_bias", "attn.attention.bias"):
        weights[f"model.layers.0.{name}"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(folder).num_parameters() > 0


def test_an_export_without_room_is_one_line_and_no_fault_of_the_input(folder: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(WriteError) as raised:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            copy_model(folder, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = "no room is left to write to (File too large: a full disk, a quota, a limit of sizes)"
    assert str(raised.value) == f"{tmp_path / 'out'}: {told}. Choose another folder"
    assert raised.value.exit_code == 1 and not list(tmp_path.glob("*out*"))


def test_weights_of_another_vocabulary_are_refused_by_their_headers(folder: Path) -> None:
    assert read_model(folder).misfit is None
    edit_config(folder, vocab_size=5)
    misfit = read_model(folder).misfit or ""
    assert misfit.startswith("its config.json has a vocab_size of 5, and ") and misfit.endswith(" rows")
