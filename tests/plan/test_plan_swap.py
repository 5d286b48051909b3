"""Another engine on the way: what the plan refuses of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.base.errors import Problem

ROLLOUT = "actor_rollout_ref.rollout"
SWAP, HYBRID = f"{ROLLOUT}.swap", "execution.mode=hybrid"

# words | key | part of the reason | part of the remedy
REFUSALS = [
    ([HYBRID, f"{SWAP}={{step: 1, name: vlm}}"], f"{SWAP}.name", "unknown rollout engine", "'vllm'"),
    ([f"{SWAP}={{step: 1, name: vllm}}"], f"{SWAP}.name", "the actor's own parameters", "hybrid"),
    (
        [HYBRID, f"{SWAP}={{step: 1, name: sglang}}", f"{ROLLOUT}.top_p=0.9"],
        f"{ROLLOUT}.logprobs_of",
        "the engine sglang gives no log-probs",
        "Write full",
    ),
    (
        [HYBRID, f"{SWAP}={{step: 9, name: vllm}}", "trainer.total_steps=9"],
        f"{SWAP}.step",
        "the last is 8",
        "Write less",
    ),
    (
        [HYBRID, f"{SWAP}={{step: 1, name: vllm, python: nowhere}}"],
        f"{SWAP}.python",
        "there is no such program",
        "environment",
    ),
]


@pytest.mark.parametrize(("words", "key", "reason", "remedy"), REFUSALS)
def test_what_the_other_engine_can_not_do_is_refused(
    problems_of: Callable[..., list[Problem]], words: list[str], key: str, reason: str, remedy: str
) -> None:
    (problem,) = problems_of(*words)
    assert problem.key == key
    assert reason in problem.reason and remedy in problem.remedy
