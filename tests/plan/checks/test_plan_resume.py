"""A resume is planned from what the checkpoint says: what can't go on is refused, what may change is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tandem.base.errors import ConfigError, Problem
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig
from tandem.config.tree import paths_of
from tandem.control.entry import run_sft
from tandem.control.eval import run_eval
from tandem.plan.checks.run.resumed import KEPT
from tandem.plan.plan import Plan, compile_plan
from tandem.plan.sft import SftPlan, compile_sft_plan
from tests.e2e.conftest import task
from tests.e2e.seven import started, train, training_engine, write_rows

__all__ = ["task"]

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
KL = "algorithm.kl={in: loss, coef: 0.1}"


@pytest.fixture(scope="module")
def run(task: Path) -> list[str]:
    """The words of a run of 2 steps with a checkpoint at its end, without a reference or a critic."""
    words = [
        str(task),
        "trainer.total_steps=2",
        "trainer.save_interval=2",
        "data.train_batch_size=4",
        f"trainer.output_dir={task.parent / 'saved'}",
    ]
    train(*words)
    return words


@pytest.fixture(scope="module")
def adapted(task: Path) -> list[str]:
    """As ``run``, with adapters."""
    words = [
        *(str(task), "trainer.total_steps=1", "trainer.save_interval=1", "data.train_batch_size=2"),
        *(f"{MODEL}.lora_rank=2", f"trainer.output_dir={task.parent / 'adapted'}"),
    ]
    train(*words)
    return words


@pytest.fixture(scope="module")
def tuned(task: Path) -> list[str]:
    """The words of a fine-tuning run with a checkpoint at its end."""
    rows = write_rows(task.parent / "sft.jsonl", [{"prompt": f"{d}>", "response": str(d)} for d in range(8)])
    tree = {
        "model": {"path": str(task.parent / "model")},
        "data": {"train_files": [str(rows)], "max_length": 8, "train_batch_size": 4},
        "trainer": {"total_steps": 1, "save_interval": 1, "logger": [], "output_dir": str(task.parent / "tuned")},
        "runtime": {"torch_threads": 1},
    }
    (task.parent / "sft.yaml").write_text(yaml.safe_dump(tree))
    words = [str(task.parent / "sft.yaml")]
    run_sft(load_words(words, SftConfig))
    return words


def plan_of(words: list[str], *changes: str) -> Plan:
    return compile_plan(load_words([*words, "trainer.resume=latest", *changes], Config))


def sft_plan_of(words: list[str], *changes: str) -> SftPlan:
    return compile_sft_plan(load_words([*words, "trainer.resume=latest", *changes], SftConfig))


def saved_in(run: list[str]) -> Path:
    """The checkpoint of a run of 2 steps."""
    return Path(run[-1].partition("=")[2]) / "checkpoints" / "step_00000002"


def only(problems: tuple[Problem, ...]) -> Problem:
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def test_the_same_run_may_go_on_and_nothing_is_told(run: list[str]) -> None:
    plan = plan_of(run, "trainer.total_steps=2")
    assert plan.problems == ()
    assert not [note for note in plan.notes if "saved" in note]


@pytest.mark.parametrize(
    ("words", "key", "value", "before"),
    [
        (["data.train_batch_size=8"], "data.train_batch_size", 8, "4"),
        (["trainer.seed=5"], "trainer.seed", 5, "0"),
        (["data.shuffle=false"], "data.shuffle", False, "true"),
        ([f"{MODEL}.lora_rank=2"], f"{MODEL}.lora_rank", 2, "0"),
        ([KL], "algorithm.kl.in", "loss", "off"),
        (["algorithm.kl={in: reward, coef: 0.1}", "--hybrid"], "algorithm.kl.in", "reward", "off"),
        (["algorithm.adv_estimator=gae", "critic.enable=true"], "critic.enable", True, "no critic"),
        (["trainer.total_steps=1"], "trainer.resume", None, "of step 2, the run ends at step 1"),
    ],
)
def test_what_can_not_go_on_is_refused_with_both_values(
    run: list[str], words: list[str], key: str, value: object, before: str
) -> None:
    problem = only(plan_of(run, *words).problems)
    assert problem.key == key and before in problem.reason
    assert value is None or problem.value == value
    assert problem.remedy


@pytest.mark.parametrize(
    "word", [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8.0", f"{MODEL}.lora_target_modules=[q_proj]"]
)
def test_other_adapters_are_refused(adapted: list[str], word: str) -> None:
    problem = only(plan_of(adapted, word).problems)
    assert problem.key == word.partition("=")[0] and "start a new run from" in problem.remedy


def test_a_run_without_adapters_can_not_go_on_from_one_with_them(adapted: list[str]) -> None:
    assert only(plan_of(adapted, f"{MODEL}.lora_rank=0").problems).key == f"{MODEL}.lora_rank"


def test_a_reference_that_adapters_are_switched_off_for_needs_no_copy(adapted: list[str]) -> None:
    assert plan_of(adapted, KL).problems == ()
    moved = only(plan_of(adapted, KL, "actor_rollout_ref.ref.update_interval=2").problems)
    assert moved.key == "algorithm.kl.in"


def test_another_start_model_is_refused_and_the_same_one_may_be_elsewhere(run: list[str], tmp_path: Path) -> None:
    start = Path(run[0]).parent / "model"
    shutil.copytree(start, tmp_path / "moved")
    assert plan_of(run, f"{MODEL}.path={tmp_path / 'moved'}").problems == ()
    weights = tmp_path / "moved" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    problem = only(plan_of(run, f"{MODEL}.path={tmp_path / 'moved'}").problems)
    assert problem.key == f"{MODEL}.path" and problem.value == str(tmp_path / "moved")
    assert str(start) in problem.reason and "model.safetensors differs" in problem.reason


def test_another_tokenizer_is_refused(run: list[str], tmp_path: Path) -> None:
    shutil.copytree(Path(run[0]).parent / "model", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(
        file.read_text().replace('"normalizer":null', '"normalizer":{"type":"NFC"}').replace("\n", "") + " "
    )
    problem = only(plan_of(run, f"{MODEL}.tokenizer_path={tmp_path / 'other'}").problems)
    assert problem.key == f"{MODEL}.tokenizer_path" and "tokenizer.json differs" in problem.reason


def test_what_may_change_is_allowed_and_told(run: list[str]) -> None:
    plan = plan_of(
        run, "trainer.total_steps=4", f"{ACTOR}.optim.lr=1.0e-4", "actor_rollout_ref.rollout.n=4", "--hybrid"
    )
    assert plan.problems == ()
    (told,) = (note for note in plan.notes if "has other values than the saved one" in note)
    for part in (f"{ACTOR}.optim.lr 0.003 -> 0.0001", "actor_rollout_ref.rollout.n 8 -> 4", "colocate -> hybrid"):
        assert part in told
    assert told.startswith("from step 2 on")


def test_a_falling_schedule_that_another_end_stretches_is_told(run: list[str]) -> None:
    plan = plan_of(run, "trainer.total_steps=8", f"{ACTOR}.optim={{lr: 0.001, schedule: linear}}")
    (told,) = (note for note in plan.notes if "schedule is" in note)
    assert "linear schedule is stretched: the saved run's ended at update 2, this one's ends at 8" in told
    done = json.loads((saved_in(run) / "state.json").read_text())["facts"]["actor"]["updates"]
    then, now = (0.001 * (1 - done / end) for end in (2, 8))
    assert f"Update {done + 1} has a learning rate of {now:.3g}, where the saved run had {then:.3g}" in told


def test_the_optimizer_goes_on_with_the_numbers_of_the_config(run: list[str], tmp_path: Path) -> None:
    saved = Path(run[-1].partition("=")[2]) / "checkpoints" / "step_00000002"
    words = [*run[:-1], f"trainer.output_dir={tmp_path}", f"trainer.resume={saved}", "trainer.total_steps=3"]
    changes = [f"{ACTOR}.optim={{lr: 1.0e-4, betas: [0.8, 0.7], eps: 1.0e-6, weight_decay: 0.5}}"]
    with started(*words, *changes) as session:
        groups = training_engine(session)._updater.optimizer.param_groups
    assert [(group["lr"], tuple(group["betas"]), group["eps"]) for group in groups] == [(1e-4, (0.8, 0.7), 1e-6)] * 2
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.5]


def test_a_damaged_checkpoint_is_refused_by_the_plan(run: list[str], tmp_path: Path) -> None:
    shutil.copytree(Path(run[-1].partition("=")[2]), tmp_path / "run")
    words = [*run[:-1], f"trainer.output_dir={tmp_path / 'run'}"]
    state = tmp_path / "run" / "checkpoints" / "step_00000002" / "state.json"
    whole = state.read_text()
    state.write_text(whole.replace('"step":2', '"step":1', 1))
    assert f"{state}: is damaged" in only(plan_of(words).problems).reason
    state.write_text(whole)
    (tensors,) = state.parent.glob("tensors/*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    problem = only(plan_of(words).problems)
    assert problem.key == "trainer.resume" and str(tensors) in problem.reason


@pytest.mark.parametrize(
    ("words", "key", "before"),
    [
        (["data.train_batch_size=2"], "data.train_batch_size", "4"),
        (["trainer.seed=1"], "trainer.seed", "0"),
        (["model.lora_rank=2"], "model.lora_rank", "0"),
        (["data.train_files=[]", "data.mix=[{files: FILE, name: a}]"], "data.mix", "the mix {}"),
    ],
)
def test_fine_tuning_is_held_to_the_same(tuned: list[str], words: list[str], key: str, before: str) -> None:
    rows = Path(tuned[0]).parent / "sft.jsonl"
    words = [word.replace("FILE", str(rows)) for word in words]
    problem = only(sft_plan_of(tuned, *words).problems)
    assert problem.key == key and before in problem.reason


def test_what_fine_tuning_may_change_is_told(tuned: list[str]) -> None:
    plan = sft_plan_of(tuned, "optim.lr=0.5", "trainer.total_steps=2")
    assert plan.problems == ()
    assert any("optim.lr 1e-05 -> 0.5" in note or "-> 0.5" in note for note in plan.notes)


def test_a_checkpoint_of_another_kind_of_run_says_which_command_goes_on(run: list[str], tuned: list[str]) -> None:
    of_tuning = f"trainer.resume={Path(tuned[0]).parent / 'tuned' / 'checkpoints' / 'step_00000001'}"
    problem = only(plan_of(run, of_tuning).problems)
    assert problem.key == "trainer.resume" and "from examples" in problem.reason and "tandem sft" in problem.remedy
    of_training = f"trainer.resume={Path(run[-1].partition('=')[2]) / 'checkpoints' / 'step_00000002'}"
    assert "tandem train" in only(sft_plan_of(tuned, of_training).problems).remedy


def test_every_key_that_must_stay_is_a_key_of_a_config() -> None:
    known = paths_of(Config).keys() | paths_of(SftConfig).keys()
    assert {key for kept in KEPT for key in kept.keys} <= known


def test_an_evaluation_does_not_go_on_from_the_checkpoint_that_its_config_names(run: list[str], tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "val.jsonl", [{"prompt": "3>", "answer": "3333"}])
    words = [*run[1:], f"data.val_files=[{held_out}]", "trainer.resume=latest", "trainer.seed=1"]
    assert run_eval(Path(run[0]), words) == 0


def test_the_command_refuses_as_the_plan_does(run: list[str]) -> None:
    config = load_words([*run, "trainer.resume=latest", "trainer.seed=1"], Config)
    with pytest.raises(ConfigError, match=r"trainer\.seed = 1: the saved run has 0"):
        compile_plan(config).require_runnable()
