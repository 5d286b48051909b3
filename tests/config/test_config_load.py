"""From words to a config: precedence, flags, and every problem at once with what to write instead."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigError, Problem
from tandem.config.flags import SFT_FLAGS, TRAIN_FLAGS
from tandem.config.load import InvalidConfigError, config_from_tree, load_config, load_words
from tandem.config.node import TypedNode
from tandem.config.schema import Config, SftConfig
from tandem.config.spellings import SPELLINGS
from tandem.config.suggest import BALANCE_REASON
from tandem.config.tree import Field, is_bool, paths_of, walk

MODEL = "actor_rollout_ref.model.path=some/model"


def train(*words: str) -> Config:
    return load_words([MODEL, *words], Config)


def problems(*words: str, kind: Any = Config) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_words(words, kind)
    return caught.value.problems


def only(*words: str) -> Problem:
    (problem,) = problems(MODEL, *words)
    return problem


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return str(file)


# --- values and precedence


def test_later_words_win_over_earlier_ones_and_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "actor_rollout_ref:\n  model: {path: m}\n  actor: {optim: {lr: 1e-6}}\n")
    assert load_config(file, kind=Config).actor_rollout_ref.actor.optim.lr == 1e-6
    words = ["--lr", "1e-5", "--lr", "1e-4"]
    assert load_config(file, words, kind=Config).actor_rollout_ref.actor.optim.lr == 1e-4


def test_yaml_is_optional() -> None:
    config = train(
        "--hybrid", "--resource", '{"actor":[1,4],"rollout":[1,4]}', "--max-staleness", "2", "--balance-data"
    )
    assert config.execution.mode == "hybrid"
    assert config.execution.resource == {"actor": (1, 4), "rollout": (1, 4)}
    assert config.execution.max_staleness == 2
    assert config.execution.balance_data


def test_a_flag_takes_its_value_in_either_way() -> None:
    for words in (["--seed", "3"], ["--seed=3"], ["--trainer.seed", "3"], ["--trainer.seed=3"], ["trainer.seed=3"]):
        assert train(*words).trainer.seed == 3


def test_switches() -> None:
    assert train("--use-tis").algorithm.use_tis
    assert not train("--use-tis", "--no-use-tis").algorithm.use_tis
    assert not train("--use-tis=false").algorithm.use_tis
    assert not train("--use-tis", "false").algorithm.use_tis
    assert train("--algorithm.use-tis").algorithm.use_tis
    assert only("--use-tis=maybe").value == "maybe"


def test_a_field_of_text_takes_any_text() -> None:
    assert train("trainer.output_dir=2024").trainer.output_dir == "2024"
    assert train("trainer.output_dir='2024'").trainer.output_dir == "2024"
    assert train("data.uid_key=null").data.uid_key is None
    assert train("data.template={x:2d}+{y:2d}=").data.template == "{x:2d}+{y:2d}="
    assert train("--data.system-prompt", "Note: be brief").data.system_prompt == "Note: be brief"


def test_one_name_is_a_list_of_one() -> None:
    assert train("data.train_files=a.jsonl").data.train_files == ["a.jsonl"]
    assert train("data.train_files=[a.jsonl, b.jsonl]").data.train_files == ["a.jsonl", "b.jsonl"]


def test_parameters_of_a_typed_node_can_be_overridden() -> None:
    config = train("reward_manager.type=keyword", "reward_manager.keyword=ok", "algorithm.policy_loss.clip_ratio=0.3")
    assert config.reward_manager.parameters == {"keyword": "ok"}
    assert config.algorithm.policy_loss.type == "ppo_clip"
    assert config.algorithm.policy_loss.parameters == {"clip_ratio": 0.3}


def test_an_estimator_written_as_a_name_takes_parameters() -> None:
    estimator = train("algorithm.adv_estimator=rloo", "algorithm.adv_estimator.epsilon=0.1").algorithm.adv_estimator
    assert isinstance(estimator, TypedNode)
    assert (estimator.type, estimator.parameters) == ("rloo", {"epsilon": 0.1})


def test_a_mapping_with_all_lines_commented_out_has_its_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "execution:\nactor_rollout_ref:\n  model: {path: m}\n  ref:\nalgorithm:\n  kl:\n")
    assert load_config(file, kind=Config) == load_words(["--model", "m"], Config)


def test_resume_without_a_value_is_the_latest_checkpoint(tmp_path: Path) -> None:
    assert train("--resume").trainer.resume == "latest"
    assert train("--resume", "--use-tis").trainer.resume == "latest"
    assert train("--resume", "runs/a/step-3").trainer.resume == "runs/a/step-3"
    followed = train("--resume", "trainer.seed=4")
    assert (followed.trainer.resume, followed.trainer.seed) == ("latest", 4)
    assert train("--resume", "runs/lr=3/step-3").trainer.resume == "runs/lr=3/step-3"
    file = written(tmp_path, "actor_rollout_ref: {model: {path: m}}")
    assert load_words(["--resume", file], Config).trainer.resume == "latest"


@pytest.mark.parametrize(("flags", "root"), [(TRAIN_FLAGS, Config), (SFT_FLAGS, SftConfig)])
def test_every_alias_leads_to_a_field(flags: dict[str, str], root: Any) -> None:
    known = paths_of(root)
    free = ("algorithm.policy_loss.", *SPELLINGS)
    assert [path for path in flags.values() if path not in known and not path.startswith(free)] == []


def test_every_field_has_a_flag() -> None:
    for path, field in paths_of(Config).items():
        if is_bool(field.annotation) and not path.startswith("execution"):
            words = [f"--{path}"]
            words += ["--critic.model.path", "m"] if path.startswith("critic.model") else []
            words += ["--data.source.file", "f", "--data.source.type", "T"] if path.startswith("data.source") else []
            train(*words)


def test_the_seeds_flags_are_understood() -> None:
    config = train(
        *(
            "--fully-async",
            "--max-staleness",
            "1",
            "--num-iters-per-train-update",
            "4",
            "--num-data-storage-units",
            "2",
        ),
        *("--use-streaming-dataset", "--ref-update-interval", "5", "--use-kl-loss", "--use-tis"),
        *("--advantage-estimator", "rloo", "--n-samples-per-prompt", "4", "--rollout-batch-size", "32"),
        *("--global-batch-size", "128"),
    )
    assert config.execution.mode == "fully_async"
    assert config.execution.data_plane.num_data_storage_units == 2
    assert config.actor_rollout_ref.ref.update_interval == 5
    assert config.algorithm.kl.where == "loss"
    assert config.actor_rollout_ref.actor.global_batch_size == 128


# --- modes


def test_hybrid_stands_for_both_and_wins_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "execution: {mode: colocate, balance_data: true}\nactor_rollout_ref: {model: {path: m}}\n")
    for words in (["--hybrid"], ["--hybrid", "--fully-async"], ["--colocate", "--hybrid", "--fully-async"]):
        assert load_config(file, words, kind=Config).execution.mode == "hybrid"
    assert load_config(file, ["--no-hybrid"], kind=Config).execution.mode == "colocate"


def test_modes_that_contradict_each_other_are_refused() -> None:
    problem = only("--fully-async", "--colocate")
    assert problem.key == "--fully-async --colocate" and "--hybrid" in problem.remedy
    assert "asks for hybrid" in only("--hybrid", "execution.mode=colocate").reason


def test_balance_data_is_refused_in_fully_async(tmp_path: Path) -> None:
    file = written(
        tmp_path, "execution: {mode: fully_async, balance_data: true}\nactor_rollout_ref: {model: {path: m}}"
    )
    for words in (["--model", "m", "--fully-async", "--balance-data"], [file], [file, "--fully-async"]):
        (problem,) = problems(*words)
        assert problem.key == "execution.balance_data"
        assert problem.reason == BALANCE_REASON == "--balance-data is not supported in pure fully-async mode"
        assert "--hybrid" in problem.remedy


@pytest.mark.parametrize(
    ("mode", "key", "value"),
    [
        ("colocate", "max_staleness", "2"),
        ("colocate", "num_iters_per_train_update", "4"),
        ("colocate", "train_pipelining", "step"),
        ("fully_async", "train_pipelining", "step"),
    ],
)
def test_what_a_mode_lacks_is_refused_with_the_modes_that_have_it(mode: str, key: str, value: str) -> None:
    problem = only(f"execution.mode={mode}", f"execution.{key}={value}")
    assert problem.key == f"execution.{key}"
    assert f"no meaning in {mode}" in problem.reason
    assert "hybrid" in problem.remedy


def test_staleness_without_a_mode_is_refused_as_in_colocate() -> None:
    problem = only("--max-staleness", "2")
    assert "colocate" in problem.reason
    assert "hybrid or fully_async" in problem.remedy


def test_a_kl_in_both_places_is_refused(tmp_path: Path) -> None:
    assert train("--use-kl-in-reward").algorithm.kl.where == "reward"
    assert train("--use-kl-loss", "--no-use-kl-in-reward").algorithm.kl.where == "loss"
    file = written(tmp_path, "algorithm: {kl: {in: reward}}\nactor_rollout_ref: {model: {path: m}}")
    flags = ["--use-kl-loss", "--use-kl-in-reward"]
    for words in (
        ["--model", "m", *flags],
        [file, "--use-kl-loss"],
        ["--model", "m", "algorithm.use_kl_loss=true", flags[1]],
    ):
        (problem,) = problems(*words)
        assert problem.key == "algorithm.kl.in"
        assert problem.value == ["loss", "reward"]


# --- problems


def test_b93_a_misspelt_key_is_an_error_with_the_nearest_name() -> None:
    problem = only("--hybrid", "execution.max_stalenes=2")
    assert (problem.key, problem.value) == ("execution.max_stalenes", 2)
    assert "'max_staleness'" in problem.remedy


@pytest.mark.parametrize("mark", ["+", "++", "~"])
def test_b93_adding_a_key_is_an_error_with_the_plain_form(mark: str) -> None:
    assert "trainer.seed=2" in only(f"{mark}trainer.seed=2").remedy
    assert "'execution.max_staleness'" in only(f"{mark}execution.max_stalenes=2").remedy


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("'2'", "Write 2 without quotes"), ("two", "Write an integer"), ("true", "Write an integer"), ("2.0", "Write 2")],
)
@pytest.mark.parametrize("key", ["max_staleness", "num_iters_per_train_update"])
def test_b93_a_value_of_the_wrong_type_is_an_error_with_what_to_write(key: str, value: str, remedy: str) -> None:
    problem = only("--hybrid", f"execution.{key}={value}")
    assert problem.key == f"execution.{key}"
    assert "where an integer belongs" in problem.reason
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("word", "key", "reason", "remedy"),
    [
        ("algorithm.use_tis='true'", "algorithm.use_tis", "a text where true or false", "Write true without quotes"),
        ("algorithm.use_tis=1", "algorithm.use_tis", "an integer where true or false", "Write true or false"),
        ("--lr='1e-6'", "actor_rollout_ref.actor.optim.lr", "a text where a number", "without quotes"),
        ("--lr=true", "actor_rollout_ref.actor.optim.lr", "true or false where a number", "Write a number"),
        ("--lr=.inf", "actor_rollout_ref.actor.optim.lr", "not a finite number", "finite"),
        ("--lr=.nan", "actor_rollout_ref.actor.optim.lr", "", "number"),
        ("--lr=0", "actor_rollout_ref.actor.optim.lr", "must be > 0", "> 0"),
        ("--lr=", "actor_rollout_ref.actor.optim.lr", "nothing (null) where a number", "1e-06"),
        ("trainer.seed=[1]", "trainer.seed", "a list where an integer", "Write an integer"),
        ("trainer=5", "trainer", "an integer where a mapping", "Write a mapping"),
        ("data.train_files=3", "data.train_files", "an integer where a list", "Write a list"),
        ("data.train_files=[3]", "data.train_files[0]", "an integer where a text", 'Write "3"'),
        ("execution.resource={actor: 4}", "execution.resource.actor", "an integer where a list", "[...]"),
        ("execution.resource={actor: [4]}", "execution.resource.actor", "item 1 is missing", "[1, 4]"),
        ("execution.resource={actor: [1, 2, 3]}", "execution.resource.actor", "3 items", "[1, 4]"),
        ("execution.resource={actor: [1, '2']}", "execution.resource.actor[1]", "a text where", "Write 2 without"),
        ("execution.resource={actr: [1, 2]}", "execution.resource.actr", "unknown role", "'actor'"),
        ("execution.mode=hybird", "execution.mode", "unknown mode", "'hybrid'"),
        ("execution.mode=3", "execution.mode", "unknown mode", "hybrid"),
        ("actor_rollout_ref.actor.optim.schedule=cosin", "actor_rollout_ref.actor.optim.schedule", "choices", "cosine"),
        ("algorithm.kl.in=both", "algorithm.kl.in", "choices", "reward"),
        ("algorithm.adv_estimator=3", "algorithm.adv_estimator", "an integer where a text", "grpo"),
        ("actor_rollout_ref.model.dtype=float16", "actor_rollout_ref.model.dtype", "choices", "bfloat16"),
        ("algorithm.temperature=1", "algorithm.temperature", "unknown key", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.rollout.sampling.n=2", "actor_rollout_ref.rollout.sampling", "unknown key", "n"),
        ("trainer.seed.x=2", "trainer.seed.x", "unknown key", "Nothing may stand below it"),
        ("--max-stalenes=2", "--max-stalenes", "unknown flag", "--max-staleness"),
        ("--zzzzzzzz", "--zzzzzzzz", "unknown flag", "--dotted.key"),
        ("--seed", "--seed", "needs a value", "--seed VALUE"),
        ("data.train_files=[a", "data.train_files, line 1, column 3", "not valid YAML", "Correct the syntax"),
        ("second", "arguments", "a second config file", "one YAML file"),
        ("second.yaml", "arguments", "a second config file", "one YAML file"),
    ],
)
def test_one_wrong_word_is_one_problem(tmp_path: Path, word: str, key: str, reason: str, remedy: str) -> None:
    file = written(tmp_path, "actor_rollout_ref: {model: {path: m}}")
    (problem,) = problems(file, word)
    assert problem.key == key
    assert reason in problem.reason
    assert remedy in problem.remedy


def test_a_missing_required_key_says_what_it_is() -> None:
    (problem,) = problems("trainer.seed=1")
    assert problem.key == "actor_rollout_ref"
    assert "model" in problem.remedy
    (problem,) = problems("actor_rollout_ref.model.dtype=float32")
    assert problem.key == "actor_rollout_ref.model.path"
    assert "hub id" in problem.reason


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "execution: {mode: hybrid, max_stalenes: 2, num_iters_per_train_update: '8'}\n"
        "actor_rollout_ref: {model: {path: m}, actor: {optim: {betas: [0.9, true]}}}\n"
        "algoritm: {}\n",
    )
    keys = {problem.key for problem in problems(file, "--use-kl-loss", "--use-kl-in-reward", "+a=1", "--lrr", "3")}
    assert keys == {
        "execution.max_stalenes",
        "execution.num_iters_per_train_update",
        "actor_rollout_ref.actor.optim.betas[1]",
        "algoritm",
        "algorithm.kl.in",
        "+a",
        "--lrr",
    }


def test_the_guess_is_what_was_meant() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        load_words([MODEL, "--hybrid", "trainer.seed='7'"], Config)
    guess = caught.value.guess
    assert isinstance(guess, Config)
    assert guess.trainer.seed == 7


_TYPED = ("policy_loss", "adv_estimator", "distillation")
WITH_PARAMETERS = ("reward_manager", "actor_rollout_ref.rollout.episode", *(f"algorithm.{name}" for name in _TYPED))


def _leaves() -> list[Field]:
    """Fields below modes that a config can have at once; names of one letter have no near misspelling."""
    return [f for f in walk(Config) if len(f.key) > 3 and not f.path.startswith(("critic.model", "data.source"))]


@given(st.sampled_from(_leaves()), st.randoms(use_true_random=False))
def test_a_misspelling_at_any_depth_is_refused_with_the_right_suggestion(field: Field, rng: random.Random) -> None:
    at = rng.randrange(1, len(field.key) - 1)
    letter = rng.choice("abcdefghijklmnopqrstuvwxyz")
    edits = [field.key[:at] + field.key[at + 1 :], field.key[:at] + letter + field.key[at:]]
    edits.append(field.key[:at] + field.key[at + 1] + field.key[at] + field.key[at + 2 :])
    wrong = rng.choice(edits)
    parent = field.path.rpartition(".")[0]
    path = f"{parent}.{wrong}" if parent else wrong
    if path in paths_of(Config) or parent in WITH_PARAMETERS:
        return  # another key, or a parameter that the planner checks
    tree: dict[str, Any] = {"actor_rollout_ref": {"model": {"path": "m"}}}
    mode = "hybrid" if parent.startswith("execution") else "colocate"
    here = tree
    for part in parent.split(".") if parent else []:
        here = here.setdefault(part, {})
    here[wrong] = 1
    tree.setdefault("execution", {})["mode"] = mode
    with pytest.raises(ConfigError) as caught:
        config_from_tree(tree, Config)
    found = [problem for problem in caught.value.problems if problem.key == path]
    assert len(found) == 1
    assert f"'{field.key}'" in found[0].remedy


# --- documents


def test_an_sft_document_is_told_from_its_keys(tmp_path: Path) -> None:
    file = written(
        tmp_path, "model: {path: m, lora_rank: 8}\ndata: {train_files: [a.parquet], val_files: [b.parquet]}\n"
    )
    config = load_config(file)
    assert isinstance(config, SftConfig)
    assert (config.model.path, config.model.lora_rank) == ("m", 8)
    assert (config.data.train_files, config.data.val_files) == (["a.parquet"], ["b.parquet"])
    assert load_config(file, ["--lr", "1e-3", "--batch-size", "4"]).optim.lr == 1e-3  # type: ignore[union-attr]


def test_a_document_given_to_the_other_command_is_refused_as_a_whole(tmp_path: Path) -> None:
    file = written(tmp_path, "model: {path: m}\ndata: {train_files: [a]}\n")
    (problem,) = problems(file, kind=Config)
    assert "tandem sft" in problem.remedy
    file = written(tmp_path, "actor_rollout_reff: {model: {path: m}}\nalgorithm: {use_tis: true}\n")
    (problem,) = problems(file, kind=SftConfig)
    assert "tandem train" in problem.remedy


def test_the_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        train().trainer.seed = 3  # type: ignore[misc]


def test_a_config_dumped_and_loaded_is_the_same(tmp_path: Path) -> None:
    words = ["--hybrid", "--use-kl-loss", "--use-tis", "reward_manager={type: keyword, keyword: ok}"]
    words += ["algorithm.adv_estimator={type: grpo, epsilon: 0.1}", "execution.resource={actor: [1, 2]}"]
    config = train(*words)
    file = written(tmp_path, yaml.safe_dump(config.model_dump(mode="json", by_alias=True), allow_unicode=True))
    assert load_config(file, kind=Config) == config
