"""Every contradiction is refused with key, value, reason and remedy, and alone: nothing else is reported with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import Problem
from tandem.plan.checks.run.trainer import installed
from tests.plan.folders import write_model
from tests.plan.refusals import REFUSALS

Problems = Callable[..., list[Problem]]

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def furnished(place: Path) -> Path:
    """``place`` with the broken things that the refusals name."""
    (place / "empty.jsonl").touch()
    (place / "broken.parquet").write_bytes(b"PAR1 not really PAR1")
    (place / "broken.jsonl").write_text("{oops\n")
    good = '{"prompt": "1+1=", "answer": "2"}\n'
    (place / "half_broken.jsonl").write_text("{oops\n" + '{"prompt": "1+1="}\n' + good * 8)
    (place / "table.xlsx").write_text("a,b\n1,2\n")
    (place / "empty_folder").mkdir()
    (place / "broken_model").mkdir()
    (place / "broken_model" / "config.json").write_text("{oops")
    (place / "broken.py").write_text("def mine(response:\n")
    (place / "scorers.py").write_text(
        "def loud(response, *, bonus: float = 1.0):\n    return bonus\n\n\n"
        "class PoliteManager:\n    def __init__(self, word='please'):\n        self.word = word\n\n"
        "    def __call__(self, data):\n        return [0.0] * len(data)\n"
    )
    (place / "own.py").write_text(
        "from tandem import BaseDataSource\n\n\nclass Bare(BaseDataSource):\n    pass\n\n\n"
        "class Own(BaseDataSource):\n    def __init__(self, size: int):\n        self.size = size\n"
    )
    (place / "broken_plugin.py").write_text("1 / 0\n")
    (place / "needy_plugin.py").write_text("import not_there\n")
    (place / "lab.py").write_text(LAB)
    return place


LAB = """
from tandem.algorithms import ADVANTAGES, POLICY_LOSSES
from tandem.rollout.capabilities import EngineCapabilities
from tandem.rollout.registry import register_engine


if "odd" not in ADVANTAGES:  # tests import it in several folders
    @ADVANTAGES.register("odd")
    def odd(token_rewards, response_mask, mood):
        return token_rewards, token_rewards

    @POLICY_LOSSES.register("plain")
    def plain(logprobs, advantages, response_mask):
        return None

    @register_engine("mute", capabilities=EngineCapabilities(weights=("shared", "own"), logprobs=()))
    def mute(model):
        return None
"""


def test_the_run_itself_has_no_problem(problems_of: Problems) -> None:
    assert problems_of() == []


@pytest.mark.parametrize(("words", "key", "reason", "remedy"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refused(furnished: Path, problems_of: Problems, words: str, key: str, reason: str, remedy: str) -> None:
    found = problems_of(*_split(words))
    assert [problem.key for problem in found] == [key]
    (problem,) = found
    assert reason in problem.reason
    assert remedy in problem.remedy
    assert problem.remedy
    json.dumps(problem.key)
    assert str(problem).count("\n") == 0


def _split(words: str) -> list[str]:
    """Words at blanks that are not inside a mapping or a list."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(words):
        depth += (letter in "{[") - (letter in "}]")
        if letter == " " and depth == 0:
            parts.append(words[start:index])
            start = index + 1
    return [*parts, words[start:]]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo"])
def test_b03_estimators_with_a_group_baseline_are_refused_with_one_sample(
    problems_of: Problems, estimator: str
) -> None:
    (problem,) = problems_of(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=1")
    assert (problem.key, problem.value) == (f"{ROLLOUT}.n", 1)
    assert estimator in problem.reason
    assert problems_of(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=2") == []
    assert problems_of("algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1") == []


def test_b56_filtering_groups_of_one_is_refused(problems_of: Problems) -> None:
    words = ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1"]
    (problem,) = problems_of(*words)
    assert problem.key == "algorithm.filter_groups.enable"
    assert "no step ever filled" in problem.reason
    assert problems_of("algorithm.filter_groups.enable=true") == []


def test_b31_options_that_would_bias_each_other_are_refused_together_and_allowed_apart(problems_of: Problems) -> None:
    truncated, tis, full = f"{ROLLOUT}.top_p=0.9", "--use-tis", f"{ROLLOUT}.logprobs_of=full"
    assert problems_of(truncated) == []
    assert problems_of(tis) == []
    assert [p.key for p in problems_of(truncated, tis)] == ["algorithm.use_tis"]
    assert problems_of(truncated, tis, full) == []


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("data.on_overlong_prompt=errror", "data.on_overlong_prompt"),
        ("data.on_overlong_prompt=middle", "data.on_overlong_prompt"),
        ("data.max_prompt_length=0", "data.max_prompt_length"),
        ("data.max_prompt_length='512'", "data.max_prompt_length"),
    ],
)
def test_b92_a_length_policy_that_means_nothing_is_refused(problems_of: Problems, word: str, key: str) -> None:
    assert [problem.key for problem in problems_of(word)] == [key]


def test_b92_each_length_policy_is_accepted(problems_of: Problems) -> None:
    for policy in ("error", "drop", "left", "right"):
        assert problems_of(f"data.on_overlong_prompt={policy}") == []


def test_b90_everything_wrong_is_found_at_once_before_any_model_is_loaded(
    furnished: Path, problems_of: Problems
) -> None:
    words = [
        *(f"{ACTOR}.ppo_mini_batch_size=3", "data.train_files=[absent.jsonl]", "reward_manager.type=exactly"),
        *(
            f"{ROLLOUT}.temperature=0",
            "algorithm.adv_estimator=gae",
            "trainer.logger=[consle]",
            f"{MODEL}.path=./absent",
        ),
    ]
    assert {problem.key for problem in problems_of(*words)} == {
        f"{ACTOR}.ppo_mini_batch_size",
        "data.train_files[0]",
        "reward_manager.type",
        f"{ROLLOUT}.temperature",
        "algorithm.adv_estimator",
        "trainer.logger[0]",
        f"{MODEL}.path",
    }


@pytest.mark.parametrize(
    ("logger", "extra"),
    [("tensorboard", "tracking"), *((name, name) for name in ("wandb", "mlflow", "trackio", "swanlab"))],
)
def test_a_logger_whose_package_is_missing_says_how_to_get_it(
    logger: str, extra: str, problems_of: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == logger else found(name, *rest))
    (problem,) = problems_of(f"trainer.logger=[console, {logger}]")
    assert problem.key == "trainer.logger[1]"
    assert f"pip install 'tandem-rl[{extra}]'" in problem.remedy


def test_the_folder_that_a_tracker_leaves_is_not_taken_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_by_a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed("json") and not installed("left_by_a_tracker")


def test_a_hub_id_is_taken_as_it_is_where_the_hub_may_be_asked(
    problems_of: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert problems_of(f"{MODEL}.path=owner/name") == []
    (problem,) = problems_of(f"{MODEL}.path=modle")
    assert problem.key == f"{MODEL}.path"


def test_a_cached_hub_model_is_read_offline(
    place: Path, problems_of: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = place / "hub" / "models--owner--name" / "snapshots" / "abc"
    write_model(snapshot, n_positions=200)
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    (problem,) = problems_of(f"{MODEL}.path=owner/name")
    assert problem.key == "data.max_response_length"
    assert "context is 200" in problem.reason


@pytest.mark.parametrize(
    "config",
    [
        {
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope"},
            "original_max_position_embeddings": 200,
        },
        {"max_position_embeddings": 200, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ],
)
def test_a_rope_whose_factor_moves_ends_the_context_where_it_begins_to_move(
    place: Path, problems_of: Problems, config: dict[str, object]
) -> None:
    folder = place / "moving"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (problem,) = (p for p in problems_of(f"{MODEL}.path={folder}") if p.key == "data.max_response_length")
    assert "stands still for 200 tokens" in problem.reason


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.kl={in: loss, coef: 0.01}",
        "algorithm.kl={in: reward, controller: adaptive}",
        "algorithm.policy_loss={type: ppo_clip, clip_ratio_c: null, clip_ratio: 1}",
        "algorithm.adv_estimator={type: grpo, norm_adv_by_std: false}",
        "reward_manager={type: weighted_sum, parts: [{type: exact, weight: 1}, {type: gsm8k, method: flexible}]}",
        "reward_manager={type: polite, file: scorers.py, word: thanks}",
        "reward_manager={type: loud, file: scorers.py, bonus: 2}",
        "data.answer_key=null reward_manager={type: keyword, keyword: ok}",
        "data.extra_keys=[topic.name]",
        "data.template={prompt}is",
        "data.train_files=[half_broken.jsonl] data.on_bad_row=drop",
        "data.val_files=[val.jsonl] evaluation={interval: 5, n: 4, k: [1, 4], temperature: 1.0}",
        "data.train_files=[] data.reasoning_gym={dataset: chain_sum, size: 50}",
        "--use-tis actor_rollout_ref.actor.ppo_epochs=2",
        "execution.mode=fully_async algorithm.kl.in=loss execution.resource={ref: [1, 1]}",
        "algorithm.adv_estimator=gae critic.enable=true",
        "trainer.resume=auto",
    ],
)
def test_accepted(furnished: Path, problems_of: Problems, words: str) -> None:
    assert problems_of(*_split(words)) == []


def test_masking_every_cut_answer_where_none_can_end_is_refused(problems_of: Callable[..., list[Problem]]) -> None:
    found = problems_of("algorithm.overlong=mask", "actor_rollout_ref.rollout.ignore_eos=true")
    assert [problem.key for problem in found] == ["algorithm.overlong"]
    assert "no answer ever ends before its limit" in found[0].reason and "ignore_eos: false" in found[0].remedy
