"""Flags and files of other programs: read as what they mean here, or named with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.base.errors import ConfigError, Problem
from tandem.config.coming_from import page
from tandem.config.foreign import FOREIGN
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.plan import compile_plan

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def config(*words: str) -> Config:
    return load_words(["--hf-checkpoint", "m", *words], Config)


def problems(*words: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        config(*words)
    return caught.value.problems


def test_the_page_in_the_repository_is_current() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `python -m tandem.config.coming_from`"


def test_flags_of_an_optimizer_a_loss_and_a_tracker() -> None:
    words = (
        "--optimizer adam --lr 1e-6 --adam-beta1 0.9 --adam-beta2 0.98 --adam-eps 1e-7 --eps-clip 0.2 --eps-clip-high "
    )
    words += "0.28 --eps-clip-c 3.0 --use-tensorboard --use-dynamic-batch-size --attention-dropout 0.0"
    read = config(*words.split())
    optim = read.actor_rollout_ref.actor.optim
    assert (optim.betas, optim.eps) == ((0.9, 0.98), 1e-7)
    loss = read.algorithm.policy_loss.parameters
    assert loss == {"clip_ratio": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    assert read.trainer.logger == ["console", "tensorboard"]


def test_one_beta_leaves_the_other() -> None:
    assert config("--adam-beta2", "0.95").actor_rollout_ref.actor.optim.betas == (0.9, 0.95)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_flag_without_a_key_says_what_to_write_and_eats_no_more_than_its_words(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    given = {"switch": [], "value": ["else"], "values": ["one", "two"]}[FOREIGN[name].takes]
    if FOREIGN[name].takes == "switch" and "" in FOREIGN[name].same:
        assert config(flag, "--seed", "3").trainer.seed == 3
        return
    (problem,) = problems(flag, *given, "--seed", "3")
    assert problem.key == flag and problem.remedy == FOREIGN[name].instead
    for same in FOREIGN[name].same:
        assert config(flag, same, "--seed", "3").trainer.seed == 3


def test_estimators_that_stand_for_more() -> None:
    ppo = config("--advantage-estimator", "ppo")
    assert (ppo.algorithm.adv_estimator, ppo.critic.enable) == ("gae", True)
    assert not config("--advantage-estimator", "ppo", "critic.enable=false").critic.enable
    assert config("--advantage-estimator", "dpo").algorithm.policy_loss.type == "dpo"
    assert config("--advantage-estimator", "ppo", "plugins=[lab]").algorithm.adv_estimator == "ppo"


def test_the_printed_command_of_the_first_seed(tmp_path: Path) -> None:
    words = [
        *(
            "--resource",
            '{"actor": [1, 4], "rollout": [1, 4]}',
            "--max-staleness",
            "2",
            "--num-data-storage-units",
            "1",
        ),
        *("--num-iters-per-train-update", "8", "--balance-data", "--hybrid", "--use-kl-loss", "--use-tis"),
        *("--kl-loss-coef", "0.01", "--kl-coef", "0.00", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8"),
    ]
    read = config(*words)
    assert read.execution.mode == "hybrid" and read.execution.balance_data
    assert (read.algorithm.kl.where, read.algorithm.kl.coef, read.algorithm.use_tis) == ("loss", 0.01, True)


SECOND = """
actor_rollout_ref:
  hybrid_engine: True
  model:
    path: Qwen/Qwen2-7B-Instruct
  actor:
    strategy: fsdp
    ppo_mini_batch_size: 256
  rollout:
    name: vllm
    tensor_model_parallel_size: 2
  ref:
    fsdp_config:
      param_offload: True
"""


def test_the_config_of_the_second_seed(tmp_path: Path) -> None:
    file = tmp_path / "ppo_trainer.yaml"
    file.write_text(SECOND)
    read = load_words([f"--config_path={file}"], Config)
    plan = compile_plan(read)
    assert plan.devices == 2
    keys = {problem.key for problem in plan.problems}
    assert keys <= {"actor_rollout_ref.model.path", "data.train_files"}
    assert [later.key for later in plan.later if later.key.startswith("actor")] == ["actor_rollout_ref.rollout.name"]
    assert any("ref.fsdp_config" in note for note in plan.notes)
    switched = load_words(["--config_path", str(file), "actor_rollout_ref.rollout.name=hf"], Config)
    assert compile_plan(switched).later == ()
