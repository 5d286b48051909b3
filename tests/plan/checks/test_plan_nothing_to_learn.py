"""Settings of which each is a value like others, and with which nothing could be learned, or nothing computed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import Problem

Problems = Callable[..., list[Problem]]


def test_the_likeliest_token_alone_is_greedy_whatever_the_temperature(problems_of: Problems) -> None:
    (problem,) = problems_of("actor_rollout_ref.rollout.top_k=1", "actor_rollout_ref.rollout.logprobs_of=full")
    assert (problem.key, problem.value) == ("actor_rollout_ref.rollout.top_k", 1)
    assert "all equal" in problem.reason and "2 or more" in problem.remedy


def test_a_nucleus_that_holds_one_token_is_greedy(problems_of: Problems) -> None:
    (problem,) = problems_of("actor_rollout_ref.rollout.top_p=0.01", "actor_rollout_ref.rollout.logprobs_of=full")
    assert (problem.key, problem.value) == ("actor_rollout_ref.rollout.top_p", 0.01)
    assert "among 100: answers to a prompt are all equal" in problem.reason and "more than 0.01" in problem.remedy
    assert not problems_of("actor_rollout_ref.rollout.top_p=0.011", "actor_rollout_ref.rollout.logprobs_of=full")


def test_an_answer_is_not_better_than_itself(place: Path, problems_of: Problems) -> None:
    (place / "pairs.jsonl").write_text(json.dumps({"prompt": "1+1=", "chosen": "2", "rejected": "3"}) + "\n")
    words = ["algorithm.policy_loss.type=dpo", f"data.train_files={place / 'pairs.jsonl'}", "data.train_batch_size=1"]
    words.append("trainer.total_epochs=20")
    assert problems_of(*words) == []
    for same in ("data.rejected_key=chosen", "data.chosen_key=rejected"):
        (problem,) = problems_of(*words, same)
        assert problem.key == "data.rejected_key" and "the same column" in problem.reason


@pytest.mark.parametrize("given", ["model", "./model", "model/../model"])
def test_who_is_taught_by_himself_alone_learns_nothing(place: Path, problems_of: Problems, given: str) -> None:
    words = [f"actor_rollout_ref.teacher.path={given}", "algorithm.distillation={type: reverse_kl, only: true}"]
    (problem,) = [found for found in problems_of(*words) if "agree on every token" in found.reason]
    assert problem.key == "actor_rollout_ref.teacher.path"
    assert not problems_of(*words[:1], "algorithm.distillation={type: reverse_kl}")  # holds to where it began
    shutil.copytree(place / "model", place / "other")
    assert not problems_of("actor_rollout_ref.teacher.path=other", words[1])
    assert not problems_of(f"actor_rollout_ref.teacher={{path: {given}, by_source: {{train: other}}}}", words[1])


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
@pytest.mark.parametrize("role", ["actor", "rollout", "advantages"])
def test_no_devices_are_refused_where_a_model_computes(problems_of: Problems, mode: str, role: str) -> None:
    found = problems_of(f"execution.mode={mode}", f"execution.resource={{{role}: [1, 0]}}")
    wrong = role != "advantages" or mode != "fully_async"
    assert {problem.key for problem in found} == ({f"execution.resource.{role}"} if wrong else set())
