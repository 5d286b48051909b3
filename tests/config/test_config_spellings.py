"""Two ways to write one thing: each is read as what it says, and two values are a contradiction."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tandem.base.errors import ConfigError, Problem
from tandem.config.load import config_from_tree, load_words
from tandem.config.schema import Config, KlConfig, SftConfig


def kl(*words: str) -> KlConfig:
    return load_words(["--model=m", *words], Config).algorithm.kl


def problems(*words: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_words(["--model=m", *words], Config)
    return caught.value.problems


@pytest.mark.parametrize(
    ("words", "where", "coef"),
    [
        ("--use-kl-loss --kl-loss-coef 0.01 --kl-coef 0.00", "loss", 0.01),
        ("--kl-coef 0.00 --use-kl-loss --kl-loss-coef 0.01", "loss", 0.01),
        ("--use-kl-loss --kl-loss-coef 0", "loss", 0),
        ("--use-kl-loss", "loss", 0.001),
        ("--kl-coef 0.05", "reward", 0.05),
        ("--use-kl-in-reward --kl-coef 0.05 --kl-loss-coef 0", "reward", 0.05),
        ("--kl-coef 0 --kl-loss-coef 0", "off", 0.001),
        ("algorithm.use_kl_loss=true algorithm.kl_loss_coef=0.3", "loss", 0.3),
        ("--algorithm.kl-coef 0.2 --kl-loss-type low_var_kl", "reward", 0.2),
        ("--kl-coef 0.2 --kl-coef 0.3", "reward", 0.3),
    ],
)
def test_the_kl_of_the_reward_and_of_the_loss_are_two_things(words: str, where: str, coef: float) -> None:
    read = kl(*words.split())
    assert (read.where, read.coef) == (where, coef)


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ("--use-kl-loss --kl-loss-coef 0.01 --kl-coef 0.05", "algorithm.kl.in", "in the reward (kl_coef 0.05)"),
        ("--kl-coef 0.05 algorithm.kl.in=loss", "algorithm.kl.in", "in the loss (kl.in loss)"),
        ("--kl-loss-coef 0.01", "algorithm.kl_loss_coef", "the KL is off"),
        ("--kl-coef 0.05 --kl-loss-coef 0.01", "algorithm.kl_loss_coef", "the KL is in the reward"),
        ("--use-kl-loss --kl-loss-coef 0.01 algorithm.kl.coef=0.02", "algorithm.kl_loss_coef", "kl.coef is 0.02"),
        ("--no-use-kl-loss algorithm.kl.in=loss", "algorithm.use_kl_loss", "kl.in loss asks"),
        ("--use-kl-loss algorithm.kl.in=off", "algorithm.kl.in", "use_kl_loss asks"),
        ("--no-use-kl-in-reward --kl-coef 0.1", "algorithm.use_kl_in_reward", "kl_coef 0.1 asks"),
        ("--kl-coef much", "algorithm.kl_coef", "no number"),
        ("--kl-coef=-1", "algorithm.kl_coef", "no number"),
        ("--kl-type k2 --kl-loss-type k3", "algorithm.kl.type", "two values"),
    ],
)
def test_a_kl_that_is_written_in_two_ways_with_two_values_is_refused(words: str, key: str, reason: str) -> None:
    (problem,) = problems(*words.split())
    assert problem.key == key
    assert reason in problem.reason


def test_the_command_line_wins_over_the_file_whatever_the_spelling(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    for algorithm, words, where, coef in (
        ({"kl": {"in": "loss", "coef": 0.1}}, ["--kl-loss-coef", "0.2"], "loss", 0.2),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, ["algorithm.kl.coef=0.2"], "loss", 0.2),
        ({"kl": {"in": "off", "coef": 0.001}}, ["--use-kl-loss"], "loss", 0.001),
        ({"kl": {"in": "reward", "coef": 0.1}}, ["--kl-coef=0"], "reward", 0),
    ):
        file.write_text(yaml.safe_dump({"algorithm": algorithm}))
        read = kl(str(file), *words)
        assert (read.where, read.coef) == (where, coef)


def test_a_tree_of_dicts_may_use_the_spellings_too() -> None:
    tree = {"actor_rollout_ref": {"model": {"path": "m"}}, "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.2}}
    assert config_from_tree(tree, Config).algorithm.kl.coef == 0.2
    with pytest.raises(ConfigError, match="Keep one of the two"):
        config_from_tree(tree | {"algorithm": tree["algorithm"] | {"kl": {"coef": 0.1}}}, Config)


@pytest.mark.parametrize(
    "words",
    [
        "--lr 1e-5 actor_rollout_ref.actor.optim.lr=1e-4",
        "--lr 1e-5 --actor_rollout_ref.actor.optim.lr 1e-4",
        "--num-rollout 3 --total-steps 4",
        "--hf-checkpoint a --model b",
        "--use-tis algorithm.use_tis=false",
    ],
)
def test_two_spellings_of_a_key_with_two_values_are_refused(words: str) -> None:
    (problem,) = problems(*words.split())
    assert "two spellings" in problem.reason
    assert words.split()[0] in str(problem.value)


def test_two_spellings_with_one_value_are_one() -> None:
    assert load_words(["--model=m", "--num-rollout", "3", "--total-steps=3"], Config).trainer.total_steps == 3
    words = ["--model=m", "--lr=1e-5", "actor_rollout_ref.actor.optim.lr=0.00001"]
    assert load_words(words, Config).actor_rollout_ref.actor.optim.lr == 1e-5
    words = ["--model=m", "--batch-size=2", "data.train_batch_size=3", "data.train_files=x"]
    with pytest.raises(ConfigError, match="two spellings"):
        load_words(words, SftConfig)
