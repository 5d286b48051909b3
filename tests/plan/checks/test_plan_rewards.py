"""What a reward can't be is refused by the plan at its key: values out of range, no classifier, no route, no recipe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tandem.base.errors import Problem
from tandem.plan.plan import Plan

Plans = Callable[..., Plan]
Problems = Callable[..., list[Problem]]

JUDGE = "type: judge, base_url: 'http://localhost/v1', model: m"

REFUSALS = [
    ("{type: judge, base_url: 'localhost:8000', model: m}", "base_url", "no address", "http://"),
    ("{type: judge, base_url: 'http://x:99999', model: m}", "base_url", "no address", "http://"),
    ("{type: judge, base_url: 'http://', model: m}", "base_url", "no address", "http://"),
    ("{type: judge, base_url: 'http://[::1/v1', model: m}", "base_url", "no address", "http://"),
    ("{type: gsm8k, format_score: 1}", "format_score", "must be < 1", "< 1"),
    ("{type: math_dapo, wrong: 1.0}", "wrong", "must be < 1", "< 1"),
    ("{type: qa_em, guesses: 3}", "guesses", "must be < 1", "< 1"),
    ("{type: prime_math, tolerance: 1}", "tolerance", "must be < 1", "< 1"),
    (f"{{{JUDGE}, lowest: 5, highest: 5}}", "highest", "lowest = 5", "higher"),
    (f"{{{JUDGE}, grade: '('}}", "grade", "no regular expression", "Write"),
    (f"{{{JUDGE}, grade: '[0-9]'}}", "grade", "no group", "brackets"),
    (f"{{{JUDGE}, template: '{{prompt}}'}}", "template", "no answer", "{response}"),
    (f"{{{JUDGE}, api_key_env: NO_SUCH_KEY}}", "api_key_env", "no such environment variable", "export NO_SUCH_KEY"),
    (f"{{{JUDGE}, attempts: 0}}", "attempts", "", "1"),
    (f"{{{JUDGE}, concurrency: 0}}", "concurrency", "", "1"),
    (f"{{{JUDGE}, call_s: 0}}", "call_s", "", "0"),
    (f"{{{JUDGE}, total_s: -1.0}}", "total_s", "", "0"),
    ("{type: length_penalty, target: 3, over: 0}", "over", "", "1"),
    ("{type: length_penalty, target: 3, over: 2, penalty: -1}", "penalty", "", "0"),
    ("{type: length_penalty, target: -1, over: 2}", "target", "", "0"),
    ("{type: multiple_choice, letters: ''}", "letters", "two letters", "ABCD"),
    ("{type: multiple_choice, letters: ABA}", "letters", "each once", "ABCD"),
    ("{type: multiple_choice, letters: '12'}", "letters", "A to Z", "ABCD"),
    ("{type: keyword, keyword: ''}", "keyword", "every answer", "text"),
    ("{type: prime_math, tolerance: -0.1}", "tolerance", "", "0"),
    ("{type: code, seconds: 0, timeout_s: 60}", "seconds", "", "5.0"),
    ("{type: code, seconds: .inf, timeout_s: 60}", "seconds", "finite", "finite"),
    ("{type: code, memory_mb: -1, timeout_s: 60}", "memory_mb", "", "512"),
    ("{type: code, isolation: foo, timeout_s: 60}", "isolation", "not one of the choices", "full"),
    ("{type: code, packages: [numpi], timeout_s: 60}", "packages", "no installed package 'numpi'", "Install numpi"),
    ("{type: code, isolation: Full, timeout_s: 60}", "isolation", "not one of the choices", "'full'"),
    ("{type: reward_model, path: ./scorer, batch_size: 0}", "batch_size", "", "8"),
    ("{type: weighted_sum, parts: [{type: exact, weight: 0}]}", "parts[0].weight", "all weights are 0", "1.0"),
    (
        "{type: weighted_sum, parts: [{type: exact}, {type: length_penalty, target: 3, over: -1}]}",
        "parts[1].over",
        "",
        "1",
    ),
    ("{type: reasoning_gym}", "type", "recipe", "data.reasoning_gym"),
    ("{type: by_source}", "routes", "no route is for the prompts of 'train'", "source: train"),
    (
        "{type: weighted_sum, parts: [{type: exact}, {type: by_source, routes: [{source: t, type: exact}]}]}",
        "parts[1].routes",
        "'train'",
        "data.data_source_key",
    ),
    ("{type: moody, file: moods.py, mood: sad}", "mood", "not one of the choices", "glad"),
    ("{type: moody, file: moods.py, other: sad}", "other", "not one of the choices", "glad"),
]


@pytest.mark.parametrize(("reward", "key", "reason", "remedy"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refused(place: Path, problems_of: Problems, reward: str, key: str, reason: str, remedy: str) -> None:
    (place / "scorer").mkdir()
    (place / "scorer" / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    (place / "moods.py").write_text(
        "from typing import Literal\nMood = Literal['glad', 'calm']\n\n"
        "def moody(response: str, *, mood: Mood = 'calm', other: Mood | None = None) -> float:\n    return 0.0\n"
    )
    found = problems_of(f"reward_manager={reward}")
    assert [problem.key for problem in found] == [f"reward_manager.{key}"]
    assert reason in found[0].reason
    assert remedy in found[0].remedy


@pytest.mark.parametrize(
    "reward",
    [
        f"{{{JUDGE}, template: '{{response}}', grade: '(x)', api_key_env: HOME}}",
        "{type: length_penalty, target: 0, over: 1, penalty: 0}",
        "{type: code, isolation: limits, seconds: 1, timeout_s: 60}",
        "{type: code, packages: [numpy], timeout_s: 60}",
        "{type: by_source, routes: [{source: 'tr*', type: exact}]}",
        "{type: weighted_sum, parts: [{type: exact, weight: 0}, {type: match_fraction, weight: -1}]}",
        "{type: reasoning_gym} data.extra_keys=[reasoning_gym]",
        "{type: by_source} data.data_source_key=prompt",
    ],
)
def test_accepted(place: Path, problems_of: Problems, reward: str) -> None:
    row = {"prompt": "1+1=", "answer": "2", "reasoning_gym": {"index": 0}}
    (place / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    first, *words = reward.split(" data.")
    assert problems_of(f"reward_manager={first}", *(f"data.{word}" for word in words)) == []


def test_held_out_files_have_routes_too(problems_of: Problems) -> None:
    routed = "reward_manager={type: by_source, routes: [{source: train, type: exact}]}"
    assert problems_of(routed) == []
    (problem,) = problems_of(routed, "data.val_files=[val.jsonl]")
    assert "'val'" in problem.reason


@pytest.mark.parametrize(
    ("architecture", "tensors", "reason"),
    [
        ("LlamaForCausalLM", None, "LlamaForCausalLM"),
        ("LlamaForCausalLM", ["lm_head.weight", "model.norm.weight"], "no trained head"),
        (None, ["model.norm.weight"], "no trained head"),
        ("BertForSequenceClassification", ["bert.x.weight", "classifier.weight"], None),
        (None, ["model.norm.weight", "score.weight"], None),
        ("OwnRewardModel", None, None),
    ],
)
def test_a_reward_model_is_a_classifier(
    place: Path, problems_of: Problems, architecture: str | None, tensors: list[str] | None, reason: str | None
) -> None:
    folder = place / "scorer"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]} if architecture else {}))
    if tensors is not None:
        save_file({name: np.zeros((2, 2), np.float32) for name in tensors}, folder / "model.safetensors")
    found = problems_of("reward_manager={type: reward_model, path: ./scorer}")
    assert [problem.key for problem in found] == ["reward_manager.path"] * (reason is not None)
    assert reason is None or (reason in found[0].reason and "AutoModelForSequenceClassification" in found[0].remedy)


def test_a_reward_model_that_is_not_in_the_cache_is_refused_where_nothing_may_be_downloaded(
    problems_of: Problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = "reward_manager={type: reward_model, path: some-owner/model}"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = problems_of(reward)
    assert problem.key == "reward_manager.path" and "isn't in the cache" in problem.reason
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert problems_of(reward) == []


def test_a_reward_model_is_no_adapter(place: Path, problems_of: Problems) -> None:
    (place / "lora").mkdir()
    (place / "lora" / "adapter_config.json").write_text("{}")
    (problem,) = problems_of("reward_manager={type: reward_model, path: ./lora}")
    assert "adapter" in problem.reason


@pytest.mark.parametrize(
    ("truth", "told"),
    [
        ("assert add(1, 2) == 3", True),
        (["assert add(1, 2) == 3"], True),
        ({"inputs": ["1 2"], "outputs": ["3"]}, False),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, False),
        ("42", False),
    ],
)
def test_tests_that_a_program_can_talk_to_are_warned_of(place: Path, plan_of: Plans, truth: object, told: bool) -> None:
    (place / "train.jsonl").write_text((json.dumps({"prompt": "1+1=", "answer": truth}) + "\n") * 40)
    notes = plan_of("reward_manager={type: code, timeout_s: 60}").notes
    assert any("asserts" in note and "data.answer_key" in note for note in notes) is told
    inner = "reward_manager={type: by_source, routes: [{source: '*', type: code}], timeout_s: 60}"
    assert any("asserts" in note for note in plan_of(inner).notes) is told
    assert not any("asserts" in note for note in plan_of("reward_manager={type: exact}").notes)


@pytest.mark.parametrize(
    ("changes", "fault"), [({"rms_norm_eps": 0}, "the rms_norm_eps 0"), ({"hidden_act": "x"}, "the hidden_act 'x'")]
)
def test_a_reward_model_that_none_can_be_is_refused(
    place: Path, problems_of: Problems, changes: dict[str, object], fault: str
) -> None:
    (place / "scorer").mkdir()
    config = {"architectures": ["LlamaForSequenceClassification"], **changes}
    (place / "scorer" / "config.json").write_text(json.dumps(config))
    (problem,) = problems_of("reward_manager={type: reward_model, path: ./scorer}")
    assert problem.key == "reward_manager.path" and fault in problem.reason
