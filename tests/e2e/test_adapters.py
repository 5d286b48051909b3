"""LoRA runs from end to end: learn, save, resume, export, go on from an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tandem.base.errors import ConfigError, DataError
from tandem.cli.app import app
from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.e2e.seven import Run, equal, train, training_engine, write_rows

LORA = "actor_rollout_ref.model.lora_rank=4"
SHORT = ("trainer.total_steps=4", "trainer.save_interval=2", "algorithm.kl={in: loss, coef: 0.01}")
IDS = torch.tensor([[3, 12]])


def tandem(*words: str | Path) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four steps that leaves an adapter, with checkpoints after the second and the fourth."""
    out = tmp_path_factory.mktemp("whole")
    return train(task, f"trainer.output_dir={out}", LORA, *SHORT, "trainer.export=adapter", "trainer.exact=true")


def test_a_run_leaves_an_adapter_that_peft_loads(task: Path, whole: Run) -> None:
    base = task.parent / "model"
    final = whole.output / "final"
    assert sorted(path.name for path in final.iterdir() if "adapter" in path.name) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(final))
    merged = AutoModelForCausalLM.from_pretrained(base)
    merged.load_state_dict(whole.weights)
    torch.testing.assert_close(logits(loaded), logits(merged), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-3)
    assert AutoTokenizer.from_pretrained(final).decode([3])
    checkpoint = whole.output / "checkpoints" / "step_00000004"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["adapter", "manifest.json", "state.json", "tensors"]
    stored = json.loads((checkpoint / "tensors" / "rank_00000.json").read_text())["tensors"]
    of_the_model = [".".join(entry["place"]) for entry in stored if entry["place"][:2] == ["actor", "model"]]
    assert of_the_model
    assert all("lora_" in name for name in of_the_model)  # the base is in its own folder


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(task: Path, whole: Run, tmp_path: Path) -> None:
    saved = f"trainer.resume={whole.output / 'checkpoints' / 'step_00000002'}"
    again = train(task, f"trainer.output_dir={tmp_path}", LORA, *SHORT, saved, "trainer.exact=true")
    assert equal(again.weights, whole.weights)
    assert again.column("kl/mean") == whole.column("kl/mean")[2:]


def test_adapters_do_not_go_on_over_another_base(
    task: Path, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(task.parent / "model", other)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(other)
    (other / "manifest.json").unlink()  # the change is meant
    saved = f"trainer.resume={whole.output / 'checkpoints' / 'step_00000002'}"
    words = (f"actor_rollout_ref.model.path={other}", f"trainer.output_dir={tmp_path / 'out'}")
    with pytest.raises(ConfigError, match=r"which this is not \(model\.safetensors differs\)"):
        train(task, LORA, *SHORT, saved, *words)
    with monkeypatch.context() as blind, pytest.raises(DataError, match="that the saved adapters were trained on"):
        blind.setattr("tandem.plan.plan.check_resumed", lambda *given: [])  # as from a checkpoint that says nothing
        train(task, LORA, *SHORT, saved, *words)


@pytest.mark.parametrize("mode", ["colocate", "fully_async"])
@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_a_run_that_starts_from_an_adapter_has_it_as_its_reference(
    task: Path, whole: Run, tmp_path: Path, mode: str, sync: str
) -> None:
    start = f"actor_rollout_ref.model.adapter_path={whole.output / 'final'}"
    words = (f"trainer.output_dir={tmp_path}", f"execution={{mode: {mode}, weight_sync: {{lora: {sync}}}}}")
    run = train(task, start, *SHORT, "trainer.total_steps=1", "algorithm.old_logprobs=recompute", *words)
    assert run.session.plan.base_tags == ()
    assert run.column("kl/mean") == [pytest.approx(0, abs=1e-10)]
    assert run.column("mismatch/abs") == [pytest.approx(0, abs=1e-5)]
    assert all("lora_" in name for name in training_engine(run.session).shards())
    assert any(not torch.equal(run.weights[name], tensor) for name, tensor in whole.weights.items())


def test_export_gives_either_form_of_a_checkpoint(task: Path, whole: Run, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(task.parent / "model")
    checkpoint = whole.output / "checkpoints" / "step_00000004"
    tandem("export", checkpoint, tmp_path / "as it is")
    tandem("export", checkpoint, tmp_path / "adapter", "--adapter")
    tandem("export", whole.output, tmp_path / "merged", "--merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert equal(dict(merged.state_dict()), whole.weights)
    for name in ("as it is", "adapter"):
        loaded = PeftModel.from_pretrained(base, str(tmp_path / name))
        torch.testing.assert_close(logits(loaded), logits(merged), atol=1e-5, rtol=1e-5)
        base = loaded.unload()
    result = CliRunner().invoke(app, ["export", str(task.parent / "model"), str(tmp_path / "no"), "--adapter"])
    assert result.exit_code != 0
    assert "holds no adapter" in result.output


def test_an_evaluation_of_an_adapter_run_scores_the_adapter(task: Path, whole: Run, tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "val.jsonl", [{"prompt": f"{d}>", "answer": str(d) * 4} for d in range(10)])
    asked = (f"data.val_files=[{held_out}]", "data.drop_val_prompts=false")
    written = yaml.safe_load(task.read_text())
    written["actor_rollout_ref"]["model"]["lora_rank"] = 4
    written |= {"execution": {"weight_sync": {"lora": "adapter"}}}
    merged = tmp_path / "merged"
    tandem("export", whole.output, merged / "final", "--merged")
    for run in (whole.output, merged):
        (run / "config.yaml").write_text(yaml.safe_dump(written))
    scores = [tandem("eval", run, *asked).output for run in (whole.output, merged, task)]
    assert len({score.split()[0] for score in scores}) == 1
    assert scores[0] == scores[1] != scores[2]


def test_sft_leaves_and_starts_from_adapters(task: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "pairs.jsonl", [{"prompt": f"{d}>", "response": str(d) * 4} for d in range(10)])
    data = f"{{train_files: ['{rows}'], train_batch_size: 10, max_length: 16}}"
    (tmp_path / "sft.yaml").write_text(f"model: {{path: {task.parent / 'model'}}}\ndata: {data}\n")

    def tune(out: str, *words: str) -> None:
        common = ("optim.lr=0.01", "trainer.total_steps=12", "trainer.logger=[]", "trainer.export=adapter")
        tandem("sft", tmp_path / "sft.yaml", *common, f"trainer.output_dir={tmp_path / out}", *words)

    tune("one", "model.lora_rank=8", "trainer.save_interval=6")
    tune("two", "model.lora_rank=8", f"trainer.resume={tmp_path / 'one' / 'checkpoints' / 'step_00000006'}")
    tune("three", f"model.adapter_path={tmp_path / 'one' / 'final'}")
    weights = {
        run: PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(task.parent / "model"), str(tmp_path / run / "final")
        ).state_dict()
        for run in ("one", "two", "three")
    }
    assert equal(weights["one"], weights["two"])
    assert not equal(weights["one"], weights["three"])
    losses = {
        run: [float(str(row["loss/sft"])) for row in read_rows(tmp_path / run / METRICS_FILE)]
        for run in ("one", "three")
    }
    assert losses["three"][0] < min(losses["one"][:6])


def test_what_contradicts_an_adapter_is_refused_before_a_model_loads(task: Path, whole: Run) -> None:
    start = f"actor_rollout_ref.model.adapter_path={whole.output / 'final'}"
    for words, key, said in (
        ((f"actor_rollout_ref.model.path={whole.output / 'final'}",), "model.path", "adapter_path: "),
        ((start, "actor_rollout_ref.model.lora_rank=8"), "model.lora_rank", "has the rank 4"),
        ((f"actor_rollout_ref.model.adapter_path={task.parent}",), "model.adapter_path", "no adapter_config.json"),
        (("actor_rollout_ref.model.adapter_path=nowhere",), "model.adapter_path", "no such folder"),
        (("trainer.export=adapter",), "trainer.export", "no adapter to write"),
    ):
        with pytest.raises(ConfigError) as refused:
            train(task, *words)
        (problem,) = refused.value.problems
        assert problem.key.endswith(key)
        assert said in str(problem)


@pytest.fixture(scope="module")
def half_taught(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers some digits: what adapters alone, under a random head, could not learn."""
    place = tmp_path_factory.mktemp("taught")
    rows = write_rows(place / "pairs.jsonl", [{"prompt": f"{d}>", "response": str(d) * 4} for d in range(10)])
    data = f"{{train_files: ['{rows}'], train_batch_size: 10, max_length: 16}}"
    (place / "sft.yaml").write_text(f"model: {{path: {task.parent / 'model'}}}\ndata: {data}\n")
    length = ("trainer.total_steps=30", "trainer.total_epochs=30", "optim.lr=1e-3", "trainer.logger=[]")
    tandem("sft", place / "sft.yaml", *length, f"trainer.output_dir={place / 'run'}")
    return place / "run" / "final"


@pytest.mark.parametrize("seed", range(3))
def test_adapters_alone_learn(task: Path, half_taught: Path, tmp_path: Path, seed: int) -> None:
    """Over three seeds the reward beats that of the start by 0.08, and the base is what it was."""
    run = train(
        task,
        f"actor_rollout_ref.model.path={half_taught}",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.actor.optim.lr=6e-3",
        "algorithm.kl={in: loss, coef: 1e-4}",
        f"trainer.output_dir={tmp_path}",
        f"trainer.seed={seed}",
        "trainer.total_steps=16",
    )
    assert sum(run.rewards[-4:]) / 4 >= sum(run.rewards[:2]) / 2 + 0.08
    base = AutoModelForCausalLM.from_pretrained(half_taught).state_dict()
    changed = {name for name, tensor in run.weights.items() if not torch.equal(tensor, base[name])}
    assert changed
    assert all(name.endswith("proj.weight") for name in changed)
