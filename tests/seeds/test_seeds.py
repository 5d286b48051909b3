"""The command, the configs and the code of the two seeds, as printed there but for the package's name.

The two programs of the second one are `examples/own_loop` and `examples/own_sft`, which have tests of their own.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tandem import build_actor_rollout_ref, load_config
from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.plan import Plan, compile_plan
from tests.e2e.seven import make_task

HERE = Path(__file__).parent
ONE_DEVICE_EACH = 'execution.resource={"actor": [1, 1], "rollout": [1, 1]}'
LOCAL = ("runtime.threads=true", "runtime.torch_threads=1")
TASK_KEYS = ("data", "reward_manager", "trainer", "runtime")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("seven"))


def launched(task: Path, out: Path) -> list[str]:
    """The words that the shell hands to ``tandem train``."""
    script = f"ray() {{ printf '%s\\0' \"$@\"; }}; source {HERE / 'launch.sh'}"
    values = {"MODEL": str(task.parent / "model"), "DATA": str(task.parent / "train.jsonl"), "OUT": str(out)}
    done = subprocess.run(["bash", "-c", script], env={**os.environ, **values}, capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    return words[words.index("train") + 1 :]


def plan_of(*words: str | Path) -> Plan:
    return compile_plan(load_words([str(word) for word in words], Config))


def run(*words: str | Path) -> Any:
    result: Any = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def test_the_printed_command_plans_as_it_stands(task: Path, tmp_path: Path) -> None:
    plan = plan_of(*launched(task, tmp_path / "out"))
    assert plan.problems == plan.later == ()
    assert (plan.mode, plan.devices, plan.batch.sub_batches) == ("hybrid", 8, 8)
    assert plan.roles == ("actor", "rollout") and "ref" in plan.tags


def test_the_printed_command_runs_on_one_device_each(task: Path, tmp_path: Path) -> None:
    words = launched(task, tmp_path / "out")
    place = words.index("--resource")
    run("train", *words[:place], *words[place + 2 :], ONE_DEVICE_EACH, *LOCAL)
    rows = read_rows(tmp_path / "out" / METRICS_FILE)
    assert [row["step"] for row in rows] == [1, 2] and all("kl/mean" in row for row in rows)
    assert max(float(str(row["lag/max"])) for row in rows) <= 2


def laid_over(*files: str) -> dict[str, Any]:
    """The blocks one over the other, as a reader of the text would edit one file."""
    tree: dict[str, Any] = {}

    def merge(below: dict[str, Any], above: dict[str, Any]) -> None:
        for key, value in above.items():
            both = isinstance(value, dict) and isinstance(below.get(key), dict)
            merge(below[key], value) if both else below.__setitem__(key, value)

    for name in files:
        merge(tree, yaml.safe_load((HERE / name).read_text("utf-8")))
    return tree


def test_the_printed_config_says_of_each_key_what_is_missing() -> None:
    plan = plan_of(HERE / "ppo_trainer.yaml")
    assert {problem.key for problem in plan.problems} == {"actor_rollout_ref.model.path", "data.train_files"}
    assert all(problem.remedy.startswith("Write ") for problem in plan.problems)
    missing = {"name", "tensor_model_parallel_size"}  # the package, here and there; an engine on two devices
    assert {problem.key for problem in plan.later} <= {f"actor_rollout_ref.rollout.{key}" for key in missing}
    assert any("ref.fsdp_config" in note and "sharded as the actor is" in note for note in plan.notes)
    assert plan.devices == 2


def test_the_printed_config_runs_where_it_is_given_data_and_a_small_model(task: Path, tmp_path: Path) -> None:
    tree = laid_over("ppo_trainer.yaml", "hf_rollout.yaml")
    assert tree["actor_rollout_ref"]["rollout"].pop("tensor_model_parallel_size") == 2  # as the second text tells
    given = yaml.safe_load(task.read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree | {key: given[key] for key in TASK_KEYS}))
    small = (f"actor_rollout_ref.model.path={task.parent / 'model'}", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    words = (f"--config_path={tmp_path / 'run.yaml'}", *small, "data.train_batch_size=4", "trainer.total_steps=2")
    assert plan_of(*words).problems == ()
    run("train", *words, f"trainer.output_dir={tmp_path / 'out'}")
    assert [row["step"] for row in read_rows(tmp_path / "out" / METRICS_FILE)] == [1, 2]


def test_the_printed_reward_is_found_with_its_parameter(task: Path, tmp_path: Path) -> None:
    """In the file of its class; the digit stands for the word, which the tiny model can't spell."""
    reward = laid_over("keyword_reward.yaml")["reward_manager"]
    assert reward == {"type": "keyword_reward", "keyword": "正确"}
    file = HERE.parents[1] / "examples" / "own_loop" / "keyword_reward.py"
    reward |= {"file": str(file)}
    words = (task, f"reward_manager={reward}", "data.train_batch_size=4", "trainer.total_steps=1")
    assert plan_of(*words).problems == ()
    run("train", *words, "reward_manager.keyword='7'", f"trainer.output_dir={tmp_path}")
    assert "reward/mean" in read_rows(tmp_path / METRICS_FILE)[0]


def test_the_printed_call_of_a_rollout_gives_a_batch(task: Path) -> None:
    config = load_config(task, kind=Config)
    names = {"config": config, "prompts": ["1>", "2>"]}
    names["actor_rollout_ref"] = build_actor_rollout_ref(config.actor_rollout_ref)
    exec((HERE / "rollout.py").read_text(), names)
    outputs: Any = names["rollout_outputs"]
    assert len(outputs) == 2 * config.actor_rollout_ref.rollout.n
    assert len(outputs[0].batch["responses"]) >= 1
