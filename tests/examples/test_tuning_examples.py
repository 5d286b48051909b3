"""The examples of fine-tuning and of preferences, shortened, from their data to a model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import compile_plan
from tests.examples.test_example_sources import source

SFT, DPO = "examples/sft_mix/sft.yaml", "examples/dpo/dpo.yaml"


def run(*words: object) -> str:
    result: Any = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return str(result.output)


def test_fine_tuning_on_a_mix_runs_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(tmp_path / "data")])
    runpy.run_path("examples/sft_mix/make_data.py", run_name="__main__")
    config = (tmp_path / "sft.yaml").write_text(Path(SFT).read_text().replace("runs/sft_data", str(tmp_path / "data")))
    assert config
    run("sft", tmp_path / "sft.yaml", "trainer.total_steps=3", "evaluation.interval=3", "data.train_batch_size=10",
        "trainer.save_interval=0", "optim.warmup_steps=1", f"trainer.output_dir={tmp_path / 'run'}")  # fmt: skip
    last = read_rows(tmp_path / "run" / METRICS_FILE)[-1]
    assert (last["data/sums"], last["data/chains"]) == (21.0, 9.0)
    assert {"eval/loss", "eval/accuracy", "loss/sft"} <= last.keys()


def test_the_sums_of_the_mix_are_not_those_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", str(tmp_path)])
    runpy.run_path("examples/sft_mix/make_data.py", run_name="__main__")
    texts = {name: (tmp_path / f"{name}.jsonl").read_text() for name in ("sums", "chains", "held_out")}
    asked = [line.split('"')[3] for line in texts["held_out"].splitlines()]
    assert len(asked) == 200
    assert not any(f'"{question}"' in texts[name] for question in asked for name in ("sums", "chains"))


def test_preferences_run_shortened(tiny_model: Path, tmp_path: Path) -> None:
    words = [
        f"actor_rollout_ref.model.path={tiny_model}", "trainer.total_steps=2", "data.train_batch_size=4",
        "evaluation.interval=2", "evaluation.max_prompts=8",
        "data.source={file: examples/dpo/preferences.py, type: WrongDigits, rows: 100}",
    ]  # fmt: skip
    for loss in ("dpo", "orpo"):
        run("train", DPO, *words, f"algorithm.policy_loss.type={loss}", f"trainer.output_dir={tmp_path / loss}")
        rows = read_rows(tmp_path / loss / METRICS_FILE)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert {"eval/accuracy", "preference/margin", "loss/policy"} <= rows[-1].keys()
        assert "eval/margin" in run("eval", tmp_path / loss)


def test_only_the_model_of_the_quickstart_must_be_made_first() -> None:
    config = load_words([DPO], Config)
    assert (
        config.actor_rollout_ref.model.path
        == load_words(["examples/quickstart/sft.yaml"]).trainer.output_dir + "/final"
    )
    assert [problem.key for problem in compile_plan(config).problems] == ["actor_rollout_ref.model.path"]


def test_a_right_sum_is_preferred_and_what_is_held_out_is_the_quickstart_s() -> None:
    made, quickstart = (
        source("examples/dpo/preferences.py", "WrongDigits", rows=300),
        source("examples/quickstart/sums.py", "Sums"),
    )
    held_out = {row["prompt"] for row in made.get_val_dataset()}
    assert held_out == {row["prompt"] for row in quickstart.get_val_dataset()}
    rows = made.get_train_dataset()
    assert len(rows) == 300 and not held_out & {row["prompt"] for row in rows}
    for row in [*rows, *made.get_val_dataset()]:
        assert int(row["chosen"]) == sum(map(int, row["prompt"].rstrip("=").split("+")))
        assert sum(a != b for a, b in zip(row["chosen"], row["rejected"], strict=True)) == 1
