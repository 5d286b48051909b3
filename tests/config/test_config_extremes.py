"""Values that no one means: refused at once, by name, whatever they would have done further on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import ConfigError, Problem
from tandem.config.document import MOST_LEVELS, MOST_NODES
from tandem.config.load import config_from_tree, load_config, load_words
from tandem.config.schema import Config, SftConfig

MODEL = "--model=m"


def only(*words: str | Path, kind: Any = Config) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_words([str(word) for word in words], kind)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("digits", [20, 400, 5000])
@pytest.mark.parametrize("key", ["data.train_batch_size", "actor_rollout_ref.actor.optim.lr", "trainer.seed"])
def test_a_number_of_very_many_digits_is_refused(key: str, digits: int) -> None:
    problem = only(MODEL, f"{key}={'9' * digits}")
    assert problem.key == key and "shorter" in problem.remedy


def test_a_number_in_a_tree_of_dicts_too() -> None:
    tree = {"actor_rollout_ref": {"model": {"path": "m"}}, "data": {"train_files": ["x"], "train_batch_size": 10**400}}
    with pytest.raises(ConfigError, match=r"data\.train_batch_size"):
        config_from_tree(tree, Config)


def test_a_text_may_be_of_digits() -> None:
    assert load_words([MODEL, f"trainer.output_dir={'9' * 30}"], Config).trainer.output_dir == "9" * 30


def nested_aliases() -> str:
    names = "abcdefghi"
    lines = [f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]" for below, name in pairwise(names)]
    return "\n".join(["a: &a [x, x, x, x, x, x, x, x, x]", *lines])


# what the file holds | part of the reason
DOCUMENTS = [
    (nested_aliases(), f"{MOST_NODES} nodes"),
    ("a: &a [x, *a]", "stands for itself"),
    ("a: " + "[" * 30_000, f"{MOST_LEVELS} levels"),
    ("- " * 20_000, "nested too deeply"),
    ("- x\n" * 300_000, "too large for a config"),
]


@pytest.mark.parametrize(("text", "reason"), DOCUMENTS, ids=["aliases", "circle", "brackets", "dashes", "rows"])
def test_a_document_that_stands_for_too_much_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    problem = only(tmp_path / "run.yaml")
    assert reason in problem.reason
    assert len(str(problem)) < 400


def test_an_alias_that_is_used_is_fine(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "actor_rollout_ref: {model: &m {path: m}}\ncritic: {enable: true, model: *m}\nalgorithm: {adv_estimator: gae}"
    )
    config = load_words([str(tmp_path / "run.yaml")], Config)
    assert config.critic.model is not None and config.critic.model.path == "m"


# words | key | part of the reason
VALUES = [
    ("execution.weight_sync.bucket_mb=1000000000", "execution.weight_sync.bucket_mb", "<= 65536"),
    ("reward_manager.workers=100000", "reward_manager.workers", "<= 1024"),
    ("runtime.torch_threads=100000", "runtime.torch_threads", "<= 1024"),
    ("execution.deadline_s=1e300", "execution.deadline_s", "<= 100000000"),
    ("actor_rollout_ref.model.lora_rank=9000000000000000000", "actor_rollout_ref.model.lora_rank", "<= 65536"),
    ("actor_rollout_ref.actor.optim.lr=1e6", "actor_rollout_ref.actor.optim.lr", "<= 10"),
    ("actor_rollout_ref.actor.optim.eps=1e8", "actor_rollout_ref.actor.optim.eps", "<= 1"),
    ("critic.optim.weight_decay=1e300", "critic.optim.weight_decay", "<= 100"),
    ("actor_rollout_ref.rollout.temperature=1e300", "actor_rollout_ref.rollout.temperature", "<= 100"),
    ("evaluation.temperature=1e9", "evaluation.temperature", "<= 100"),
    ("reward_manager.timeout_s=1e300", "reward_manager.timeout_s", "<= 100000000"),
]


@pytest.mark.parametrize(("word", "key", "reason"), VALUES, ids=[row[1] for row in VALUES])
def test_what_no_machine_has_is_refused(word: str, key: str, reason: str) -> None:
    problem = only(MODEL, word)
    assert problem.key == key and reason in problem.reason


def test_a_new_model_needs_an_alphabet_and_a_size_that_fits() -> None:
    assert "empty" in only("model.new={alphabet: ''}", "data.train_files=x", kind=SftConfig).reason
    found = only("model.new={alphabet: ab, hidden_size: 1}", "data.train_files=x", kind=SftConfig)
    assert found.key == "model.new.hidden_size"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["trainer.total_steps=5", "--lr", "1e-5", "data.train_files=[a b.jsonl]"], {}),
        ("trainer.total_steps=5 --lr 1e-5 'data.train_files=[a b.jsonl]'", {}),
        ((), {"total_steps": 5, "lr": 1e-5, "train_files": ["a b.jsonl"]}),
        ((), {"trainer": {"total_steps": 5}, "lr": "1e-5", "data": {"train_files": ["a b.jsonl"]}}),
    ],
)
def test_overrides_are_a_list_a_text_or_arguments(overrides: Any, keys: dict[str, Any]) -> None:
    document = {"actor_rollout_ref": {"model": {"path": Path("model")}}, "trainer": {"seed": 3, "total_steps": 9}}
    config = load_config(document, overrides, kind=Config, **keys)
    assert (config.trainer.total_steps, config.trainer.seed) == (5, 3)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5 and config.data.train_files == ["a b.jsonl"]
    assert document["trainer"] == {"seed": 3, "total_steps": 9} and config.actor_rollout_ref.model.path == "model"


def test_what_is_wrong_in_a_mapping_is_told_as_of_a_file() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"trainer": {"total_step": 3}, "actor_rollout_ref": {"model": {"path": "m"}}}, sed=1, kind=Config)
    keys = [problem.key for problem in caught.value.problems]
    assert "trainer.total_step" in keys and any("sed" in str(problem) for problem in caught.value.problems)
    with pytest.raises(ConfigError, match="Use tandem sft"):
        load_config({"model": {"path": "m"}, "optim": {"lr": 1}}, kind=Config)
    with pytest.raises(ConfigError, match="a second config file"):
        load_config({"model": {"path": "m"}}, "run.yaml")
