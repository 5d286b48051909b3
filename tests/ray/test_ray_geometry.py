"""The geometry example: its plan as it stands, and its run on eight devices with tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.plan.plan import compile_plan
from tests.e2e.seven import train
from tests.images.folders import write_model

ROOT = Path(__file__).parents[2]
GEOMETRY = "examples/vision/geometry.yaml"
FLAGS = (
    *("--hybrid", "--resource", '{"actor": [1, 4], "rollout": [1, 4]}', "--max-staleness", "2"),
    *("--num-data-storage-units", "1", "--num-iters-per-train-update", "8", "--balance-data"),
    *("--use-kl-loss", "--use-tis"),
)


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_command_is_planned_without_weights() -> None:
    shown = CliRunner().invoke(app, ["plan", GEOMETRY, *FLAGS], env={"COLUMNS": "400"})
    assert "not here: actor_rollout_ref.model.path" in shown.output and "problem" not in shown.output
    plan = compile_plan(load_words([GEOMETRY, *FLAGS]))
    assert (plan.mode, plan.runtime, plan.devices, plan.problems) == ("hybrid", "ray", 8, ())
    assert [later.key for later in plan.later] == ["actor_rollout_ref.model.path"]
    assert "images" in plan.source_columns and not plan.runs
    (problem,) = compile_plan(load_words([GEOMETRY, *FLAGS, "actor_rollout_ref.actor.strategy=megatron"])).problems
    assert "qwen3_5" in problem.reason and "fsdp2" in problem.remedy


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_it_runs_on_eight_devices(tmp_path: Path, family: str) -> None:
    (tmp_path / "scorer.py").write_text("def spread(response):\n    return sum(map(ord, response)) % 7 / 7\n")
    run = train(
        GEOMETRY, *FLAGS, f"actor_rollout_ref.model.path={write_model(tmp_path / 'model', family)}",
        "actor_rollout_ref.model.dtype=float32", "actor_rollout_ref.actor.optim.lr=1.0e-3",
        "data.source.rows=32", "data.source.held_out=4", "data.source.side=16", "data.train_batch_size=8",
        "data.max_prompt_length=200", "data.max_response_length=4", "actor_rollout_ref.rollout.n=4",
        f"reward_manager={{type: spread, file: {tmp_path / 'scorer.py'}}}",
        "runtime.torch_threads=1", "trainer.total_steps=2", "trainer.logger=[]",
        f"trainer.output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert run.session.run.progress.trained is not None and run.column("version") == [1.0, 2.0]
    assert max(run.column("lag/max")) <= 2 and run.column("mismatch/abs")[0] < 1e-5
    before, after = (AutoModelForImageTextToText.from_pretrained(tmp_path / name) for name in ("model", "run/final"))
    old = before.state_dict()
    moved = {name for name, weight in after.state_dict().items() if not torch.equal(weight, old[name])}
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)
