"""The commands in a row, as a person types them: tune, train, evaluate, export; and their exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import tandem.runtime.build.composite
from tandem.cli.app import app
from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.e2e.seven import ALPHABET, equal, write_rows

ROWS = [{"prompt": f"{d}>", "answer": str(d) * 4, "response": str(d) * 4} for d in range(10)]


QUIET = ("evaluation.interval=0", "evaluation.stop_at_accuracy=null")


def run(*words: str | int | Path) -> Any:
    """A command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished ``tandem sft``."""
    folder = tmp_path_factory.mktemp("tuned")
    write_rows(folder / "train.jsonl", ROWS)
    write_rows(folder / "held_out.jsonl", ROWS)
    tree = {
        "model": {
            "new": {"alphabet": ALPHABET, "hidden_size": 48, "num_layers": 2, "max_position_embeddings": 32},
        },
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "held_out.jsonl")],
            "train_batch_size": 20,
            "max_length": 16,
        },
        "optim": {"lr": 3e-3},
        "evaluation": {"interval": 5, "max_new_tokens": 8, "stop_at_accuracy": 0.5},
        "trainer": {"total_steps": 400, "output_dir": str(folder / "sft"), "save_interval": 100, "logger": []},
        "runtime": {"torch_threads": 1},
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(tree))
    result = run("sft", folder / "sft.yaml")
    assert result.exit_code == 0, result.output
    assert "accuracy: 0.000 -> " in result.output
    return folder


@pytest.fixture(scope="module")
def trained(task: Path, tuned: Path) -> Path:
    """The folder of a finished ``tandem train`` that began with the tuned model; all held out but the first rows."""
    output = tuned / "rl"
    write_rows(tuned / "val.jsonl", ROWS[8:])
    result = run(
        "train", task, "--model", tuned / "sft" / "final", f"data.train_files=[{tuned / 'train.jsonl'}]",
        f"data.val_files=[{tuned / 'val.jsonl'}]", "--rollout-batch-size", 8, "--n-samples-per-prompt", 4,
        "trainer.total_steps=3", "trainer.save_interval=2", "evaluation.interval=3", "evaluation.n=3",
        "evaluation.temperature=1.0", "--output-dir", output,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return output


def test_sft_stops_once_the_accuracy_is_reached(tuned: Path) -> None:
    rows = read_rows(tuned / "sft" / METRICS_FILE)
    accuracies = [float(str(row["eval/accuracy"])) for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) < 400 and len(rows) % 5 == 0
    assert accuracies[-1] >= 0.5 > max(accuracies[:-1])
    model = AutoModelForCausalLM.from_pretrained(tuned / "sft" / "final")
    tokenizer = AutoTokenizer.from_pretrained(tuned / "sft" / "final")
    right = 0
    for row in ROWS:
        ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        answer = model.generate(ids, max_new_tokens=8, do_sample=False)
        text = str(tokenizer.decode(answer[0, 2:], skip_special_tokens=True))
        right += text.strip() == row["answer"]
    assert right / 10 == accuracies[-1]


def test_training_goes_on_from_the_tuned_model_and_never_draws_what_is_held_out(trained: Path) -> None:
    rows = read_rows(trained / METRICS_FILE)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert float(str(rows[0]["reward/mean"])) > 0.2  # a fresh model has about 0.09
    drawn = {row["prompt"] for row in read_rows(trained / "rollouts.jsonl")}
    assert drawn and not drawn & {"8>", "9>"}
    for name in ("config.yaml", "report.html", "rollouts.jsonl", "final/model.safetensors", "final/tokenizer.json"):
        assert (trained / name).is_file(), name
    assert [path.name for path in sorted((trained / "checkpoints").iterdir())] == ["step_00000002", "step_00000003"]


def test_eval_of_a_run_agrees_with_its_last_evaluation(trained: Path) -> None:
    result = run("eval", trained)
    assert result.exit_code == 0, result.output
    told = dict(line.split() for line in result.output.splitlines() if line.startswith("eval/"))
    last = read_rows(trained / METRICS_FILE)[-1]
    assert told["eval/reward"] == f"{last['eval/reward']:.4f}"
    assert told["eval/mean@3"] == told["eval/reward"]
    greedy = run("eval", trained, "evaluation.n=1", "evaluation.temperature=0")
    assert greedy.exit_code == 0 and "eval/mean@1" in greedy.output


def test_eval_of_all_checkpoints_is_a_table_with_the_best_marked(trained: Path) -> None:
    result = run("eval", trained, "--checkpoints")
    assert result.exit_code == 0, result.output
    head, *rows = result.output[result.output.index("checkpoint ") :].splitlines()
    rewards = [float(row.split()[1]) for row in rows]
    assert [row.split()[0] for row in rows] == ["step_00000002", "step_00000003"] and head.split()[1] == "eval/reward"
    assert rewards[1] == pytest.approx(float(str(read_rows(trained / METRICS_FILE)[-1]["eval/reward"])), abs=1e-4)
    marked = [row.endswith("best eval/reward") for row in rows]
    assert marked == [rewards[0] >= rewards[1], rewards[1] > rewards[0]]


def test_the_best_checkpoint_stays_beside_the_newest_also_after_a_resume(
    task: Path, tuned: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "val.jsonl", ROWS[8:])
    words = (
        "train", task, "--model", tuned / "sft" / "final",
        f"data.train_files=[{tuned / 'train.jsonl'}]", f"data.val_files=[{tmp_path / 'val.jsonl'}]",
        "--rollout-batch-size", 4, "--n-samples-per-prompt", 2, "actor_rollout_ref.actor.optim.lr=0.05",
        "evaluation.interval=1", "evaluation.n=4", "evaluation.temperature=1.0", "trainer.keep_best=eval/reward",
        "trainer.keep_checkpoints=1", "trainer.save_interval=1", "--output-dir", tmp_path / "run",
    )  # fmt: skip
    assert run(*words, "trainer.total_steps=2").exit_code == 0
    result = run(*words, "trainer.total_steps=4", "trainer.resume=latest")
    assert result.exit_code == 0, result.output
    found = {
        int(str(row["step"])): float(str(row["eval/reward"])) for row in read_rows(tmp_path / "run" / METRICS_FILE)
    }
    best = max(found, key=lambda step: (found[step], -step))
    there = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert there == sorted({f"step_{best:08d}", "step_00000004"})
    assert f"step_{best:08d} (eval/reward {found[best]:.4g})" in result.output
    refused = run(*words, "trainer.total_steps=4", "trainer.keep_best=eval/loss", "--output-dir", tmp_path / "other")
    assert refused.exit_code == 2 and "Write eval/reward or eval/mean@4" in refused.output


def test_eval_without_a_model_or_held_out_prompts_says_so(tuned: Path, trained: Path) -> None:
    result = run("eval", tuned / "sft")
    assert result.exit_code == 2 and "SFT run" in result.output
    result = run("eval", trained, "data.val_files=[]", "evaluation.interval=0")
    assert result.exit_code == 2 and "nothing to evaluate on" in result.output
    assert run("eval", tuned / "nowhere.yaml").exit_code == 2


def test_export_copies_a_model_that_transformers_loads(trained: Path, tmp_path: Path) -> None:
    for number, source in enumerate((trained / "checkpoints" / "step_00000003", trained)):
        out = tmp_path / f"model_{number}"
        assert run("export", source, out).exit_code == 0
        model = AutoModelForCausalLM.from_pretrained(out)
        final = AutoModelForCausalLM.from_pretrained(trained / "final")
        assert equal(model.state_dict(), final.state_dict())
        assert AutoTokenizer.from_pretrained(out)("7>")["input_ids"]
    again = run("export", trained, tmp_path / "model_0")
    assert again.exit_code == 2 and "exists" in again.output
    nothing = run("export", tmp_path / "nowhere", tmp_path / "model_2")
    assert nothing.exit_code == 2 and "holds no model" in nothing.output
    inside = run("export", tmp_path / "model_0", tmp_path / "model_0" / "copy")
    assert inside.exit_code == 2 and "lies inside the model" in inside.output
    weights = tmp_path / "model_1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    broken = run("export", tmp_path / "model_1", tmp_path / "model_3")
    assert broken.exit_code == 2 and "not a whole file of weights" in broken.output.replace("\n", " ")
    assert not (tmp_path / "model_3").exists()


@pytest.mark.parametrize("part", ["final", "checkpoints/step_00000003"])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_export_of_a_damaged_model_names_the_file(trained: Path, tmp_path: Path, part: str, file: str) -> None:
    saved = tmp_path / "saved"
    shutil.copytree(trained / part, saved)
    (damaged,) = saved.rglob(file)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    result = run("export", saved, tmp_path / "out")
    assert result.exit_code == 2 and f"{damaged}: is damaged" in result.output
    (damaged.parent / "manifest.json").unlink()  # that of the checkpoint has it too
    again = run("export", saved, tmp_path / "out")
    assert (again.exit_code == 0) == (part == "final")
    assert (tmp_path / "out" / "manifest.json").exists() == (part == "final")


def test_sft_checkpoints_are_resumed_and_exported(tuned: Path, tmp_path: Path) -> None:
    output = tmp_path / "again"
    words = (tuned / "sft.yaml", "--output-dir", output, *QUIET, "trainer.save_interval=2")
    assert run("sft", *words, "trainer.total_steps=4").exit_code == 0
    assert run("sft", *words, "trainer.total_steps=8", "trainer.resume=auto").exit_code == 0
    assert run("sft", *words[:2], tmp_path / "whole", *words[3:], "trainer.total_steps=8").exit_code == 0
    assert [row["step"] for row in read_rows(output / METRICS_FILE)] == list(range(1, 9))
    resumed = AutoModelForCausalLM.from_pretrained(output / "final").state_dict()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final").state_dict()
    assert equal(resumed, whole)
    exported = run("export", output / "checkpoints" / "step_00000008", tmp_path / "model")
    assert exported.exit_code == 0, exported.output
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(), whole)


def bad_rows(*rows: dict[str, Any]) -> Any:
    return lambda folder: (f"data.train_files=[{write_rows(folder / 'bad.jsonl', [*ROWS, *rows])}]",)


def bad_scorer(body: str) -> Any:
    def words(folder: Path) -> tuple[str, str]:
        (folder / "broken.py").write_text(body)
        return ("reward_manager.type=mine", f"reward_manager.file={folder / 'broken.py'}")

    return words


BAD: dict[str, tuple[Any, str]] = {
    "a misspelt key": (lambda folder: ("data.train_batchsize=8",), "train_batch_size"),
    "a row of null": (bad_rows({"prompt": None, "answer": "1"}), "row 11"),
    "no answer in a row": (bad_rows({"prompt": "1>"}), "row 11"),
    "a prompt that is no text": (bad_rows({"prompt": 7, "answer": "1"}), "row 11"),
    "an over-long prompt": (bad_rows({"prompt": "123456789>", "answer": "1"}), "row 11: the prompt has 10 tokens"),
    "a character without a token": (bad_rows({"prompt": "é>", "answer": "1"}), "row 11"),
    "fewer rows than a batch": (lambda folder: ("data.train_batch_size=999", "trainer.total_epochs=1"), "999"),
    "no such model": (lambda folder: (f"actor_rollout_ref.model.path={folder / 'nowhere'}",), "nowhere"),
    "no such reward": (lambda folder: ("reward_manager.type=match_fractoin",), "match_fraction"),
    "a reward file that can't run": (
        bad_scorer("def mine(response):\n    return 1\n\nimport nothing_there\n"),
        "line 4",
    ),
    "an evaluation of nothing": (lambda folder: ("evaluation.interval=1",), "data.val_files"),
    "no such checkpoint": (lambda folder: (f"trainer.resume={folder / 'step_00000001'}",), "trainer.resume"),
    "micro-batches too small": (lambda folder: ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5",), "5"),
}


@pytest.mark.parametrize("name", BAD)
def test_b90_what_is_wrong_is_found_before_a_model_is_loaded(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def loaded(*arguments: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(tandem.runtime.build.composite, "load_model", loaded)
    make, text = BAD[name]
    result = run("train", task, f"trainer.output_dir={tmp_path / 'run'}", *make(tmp_path))
    assert result.exit_code == 2, result.output
    assert text in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run" / "final").exists()
    good = run("train", task, f"trainer.output_dir={tmp_path / 'run'}")
    assert isinstance(good.exception, AssertionError)


def test_an_error_of_the_run_is_its_exit_code_and_message(task: Path, tmp_path: Path) -> None:
    (tmp_path / "strict.py").write_text("def strict(response):\n    raise LookupError('no such answer')\n")
    words = (f"reward_manager.file={tmp_path / 'strict.py'}", "reward_manager.type=strict")
    result = run("train", task, f"trainer.output_dir={tmp_path / 'run'}", *words, "reward_manager.on_error=stop")
    assert result.exit_code == 1
    assert "no such answer" in result.output and "Traceback" not in result.output
    result = run("train", task, f"trainer.output_dir={tmp_path / 'run'}", *words)
    assert result.exit_code == 1
    assert "not one of the 128 samples of step 1 has a reward" in result.output
    assert "no such answer" in (tmp_path / "run" / "report.html").read_text()
    assert torch.get_num_threads() == 1


def test_eval_where_nothing_can_be_scored_is_no_success(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text("def failing(response, ground_truth):\n    raise KeyError('solution')\n")
    result = run("eval", trained, "reward_manager.type=failing", f"reward_manager.file={tmp_path / 'scorer.py'}")
    assert result.exit_code == 1
    assert "not one of the 6 answers could be scored" in result.output and "KeyError: 'solution'" in result.output


def test_a_run_does_not_write_where_it_reads(task: Path, tuned: Path, trained: Path, tmp_path: Path) -> None:
    """Neither its start model nor anything that a run of that folder would move or replace."""
    shutil.copytree(trained, tmp_path / "run")
    before = sorted((tmp_path / "run").rglob("*"))
    model = tmp_path / "run" / "final"
    for output, words in (
        (tmp_path / "run", ("--model", model)),
        (model, ("--model", model)),
        (tmp_path / "run", ("--model", tmp_path / "run" / "checkpoints" / "step_00000003" / "model")),
        (tmp_path / "run", (f"data.val_files=[{tmp_path / 'run' / 'rollouts.jsonl'}]", "data.answer_key=ground_truth")),
    ):
        result = run("train", task, *words, "trainer.total_steps=1", "--output-dir", output)
        assert result.exit_code == 2 and "trainer.output_dir" in result.output, result.output
        assert "the run reads" in result.output
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_a_damaged_model_is_not_trained(task: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "final", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 16
    weights.write_bytes(content)
    result = run("train", task, "--model", tmp_path / "model", "--output-dir", tmp_path / "run")
    assert result.exit_code == 2 and f"{weights}: is damaged" in result.output
    assert not (tmp_path / "run" / "config.yaml").exists()
