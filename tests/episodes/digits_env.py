"""An environment of the package verifiers whose words are digits: a model of few letters can be trained in it."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def different(completion: Any) -> float:
    """How many different characters the model has said."""
    return float(len({letter for one in completion if one.role == "assistant" for letter in str(one.content)}))


class Digits(vf.MultiTurnEnv):
    """Says a number after each answer."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [vf.UserMessage(content="12")]


def load_environment() -> vf.Environment:
    """Two turns, whatever is said."""
    rows = [{"prompt": [{"role": "user", "content": "1"}], "answer": ""}]
    return Digits(max_turns=2, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[different]))
