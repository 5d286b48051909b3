"""A trained model is written in the dtype of the folder that it came from, or in the one that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.precision import Precision
from tests.e2e.seven import make_task, train
from tests.models.shapes import LLAMA

NARROW, WIDE = torch.bfloat16, torch.float32


def stored(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in list(file.keys())}


def narrowed(folder: Path, dtype: torch.dtype, *, kept: str = "nothing") -> Path:
    """The model in ``folder`` as a plain library saves one in half precision."""
    weights = load_file(folder / "model.safetensors")
    cast = {name: w if kept in name else w.to(dtype) for name, w in weights.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))
    (folder / "manifest.json").unlink()
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_in_half_precision_comes_back_as_it_was(tmp_path: Path, tied: bool) -> None:
    model = new_model({**LLAMA, "tie_word_embeddings": tied}, seed=0)
    save_pretrained_atomic(model, None, tmp_path / "start")
    start = narrowed(tmp_path / "start", torch.bfloat16, kept="norm")
    save_pretrained_atomic(model, None, tmp_path / "end", precision=Precision.of(start))
    assert stored(tmp_path / "end") == stored(start)
    assert {"BF16", "F32"} == set(stored(start).values())
    assert json.loads((tmp_path / "end" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "end", dtype="auto")
    assert loaded.dtype == torch.bfloat16 and loaded(torch.tensor([[1, 2]])).logits.isfinite().all()


@pytest.mark.parametrize(("config", "expected"), [({"torch_dtype": "float16"}, torch.float16), ({}, WIDE), ([], WIDE)])
def test_without_readable_weights_the_config_says(tmp_path: Path, config: object, expected: torch.dtype) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Precision.of(tmp_path).main == expected
    assert Precision.of(None).main == WIDE
    assert Precision.asked_for("float16", tmp_path) == Precision(torch.float16)


def test_what_shares_memory_still_does_and_integers_stay() -> None:
    weight, count = torch.randn(3, 2), torch.arange(3)
    found = Precision(NARROW).cast({"a": weight, "b": weight, "c": weight[1:], "count": count}.items())
    assert found["a"] is found["b"] and found["c"].shape == (2, 2)
    assert found["count"] is count and found["a"].dtype == NARROW


@pytest.mark.parametrize(
    ("words", "expected"),
    [((), "BF16"), (("trainer.export_dtype=float32",), "F32"), (("actor_rollout_ref.model.lora_rank=2",), "BF16")],
)
def test_a_run_leaves_its_model_so_and_resumes_in_full_precision(
    tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    task = make_task(tmp_path)
    narrowed(tmp_path / "model", torch.bfloat16)
    short = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "trainer.save_interval=1", *words)
    critic = ("critic.enable=true", "algorithm.adv_estimator=gae") if not words else ()
    whole = train(task, *short, *critic, "trainer.total_steps=2")
    first = min((whole.output / "checkpoints").iterdir())
    for folder in (whole.output / "final", first / "model"):
        assert set(stored(folder).values()) == {expected}
    if critic:
        assert "BF16" in stored(whole.output / "critic").values()
    trained = whole.weights
    again = train(
        task,
        *short,
        *critic,
        "trainer.total_steps=2",
        f"trainer.resume={first}",
        f"trainer.output_dir={tmp_path / 'again'}",
    )
    for name, tensor in again.weights.items():
        assert torch.equal(tensor, trained[name])
