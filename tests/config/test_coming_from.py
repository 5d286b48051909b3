"""Flags and files of other programs: read as what they mean here, or named with what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.base.errors import ConfigError, Problem
from tandem.config.coming_from import WORDS, page
from tandem.config.flags import TRAIN_FLAGS
from tandem.config.foreign import FAMILIES, FOREIGN
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.config.spellings import SPELLINGS
from tandem.config.tree import field_at
from tandem.plan.plan import compile_plan

MODEL = ["--hf-checkpoint", "m"]
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def config(*words: str) -> Config:
    return load_words(["--hf-checkpoint", "m", *words], Config)


def problems(*words: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        config(*words)
    return caught.value.problems


def test_the_page_in_the_repository_is_current() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `python -m tandem.config.coming_from`"


@pytest.mark.parametrize("row", WORDS, ids=[row[0] for row in WORDS])
def test_what_other_programs_call_otherwise_is_a_key_here(row: tuple[str, ...]) -> None:
    *path, last = row[-1].split(".")
    spelled = row[-1] in SPELLINGS or (path[-1:] == ["policy_loss"] and last == "clip_ratio")
    assert spelled or field_at(Config, row[-1].split(".")) is not None


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


SAID = {
    "adam_beta1": "0.8", "adam_beta2": "0.9", "use_kl_loss": "true", "use_kl_in_reward": "true", "kl_coef": "0.1",
    "use_tensorboard": "true", "resource": "{actor: [1, 2]}", "plugins": "[lab]", "logger": "[tensorboard]",
    "advantage_estimator": "rloo", "offload_train": "false", "offload_rollout": "false",
    "reward": "gsm8k", "rm_type": "gsm8k", "train_pipelining": "step",
    "eps_clip": "0.3", "eps_clip_high": "0.3", "eps_clip_c": "4.0", "lr_decay_style": "cosine",
    "train_files": "[a.jsonl]", "val_files": "[a.jsonl]", "prompt_data": "[a.jsonl]",
}  # fmt: skip
COUNTS = (
    "ref_update_interval",
    "mini_batch_size",
    "micro_batch_size",
    "global_batch_size",
    "num_rollout",
    "total_steps",
)


@pytest.mark.parametrize("name", [name for name in TRAIN_FLAGS if name != "kl_loss_coef"])
def test_a_flag_that_is_a_key_reaches_it(name: str) -> None:
    """The value arrives where the table says; of one that stands for other keys, the config changes."""
    path = TRAIN_FLAGS[name]
    default = config("--hybrid").model_dump(mode="json", by_alias=True)
    there = at(default, path)
    text = SAID.get(name) or ("3" if name in COUNTS or type(there) is int else another(there))
    words = ["--hybrid", f"--{name.replace('_', '-')}", text]
    read = load_words([*words, *([] if path.endswith("model.path") else MODEL)], Config)
    after = read.model_dump(mode="json", by_alias=True)
    assert after != default
    if path not in SPELLINGS:
        assert at(after, path) == yaml.safe_load(text)


def another(value: object) -> str:
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, dict):
        return "{some: 1}"
    return "0.25" if isinstance(value, float) else "word"


def test_the_weight_of_a_kl_in_the_loss_goes_with_its_switch() -> None:
    kl = config("--use-kl-loss", "--kl-loss-coef", "0.25").algorithm.kl
    assert (kl.where, kl.coef) == ("loss", 0.25)


def at(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


@pytest.mark.parametrize("begin", FAMILIES)
def test_flags_that_other_programs_hand_on_say_what_to_write(begin: str) -> None:
    flag = f"--{begin.replace('_', '-')}enable-something"
    (problem,) = problems(flag, "1", "2", "--seed", "3")
    assert (problem.key, problem.value, problem.remedy) == (flag, "1 2", FAMILIES[begin].instead)


def test_an_estimator_that_is_a_loss_here_is_named_as_one() -> None:
    (problem,) = (p for p in compile_plan(config("--advantage-estimator", "gspo")).problems if "estim" in p.key)
    assert "policy loss" in problem.reason and "algorithm.policy_loss.type: gspo" in problem.remedy
