"""An environment of the package verifiers that does what its row says."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def right(completion: Any, answer: str, info: dict[str, Any]) -> float:
    """1 for an answer that holds the right sum."""
    if info["fate"] == "unscored":
        raise ValueError("no reward today")
    return float(answer in str(completion[-1].content))


class Hints(vf.MultiTurnEnv):
    """Says something after each answer, or forgets what was said."""

    async def setup_state(self, state: Any) -> Any:
        if state["info"]["fate"] == "raises":
            raise vf.InfraError("no server today")
        return state

    async def get_prompt_messages(self, state: Any) -> Any:
        if state["info"]["fate"] == "forgets" and state["trajectory"]:
            return [vf.UserMessage(content="what is 1+1")]
        return await super().get_prompt_messages(state)

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        if state["info"]["fate"] == "colder":
            await self.get_model_response(state, messages, sampling_args={"temperature": 0.1})
        return [vf.UserMessage(content=f"is it {state['info']['hint']}")]


def load_environment(rows: int = 3, held_out: int = 0, compared: bool = False) -> vf.Environment:
    """Sums of one digit, in two turns."""

    def together(completions: Any) -> list[float]:
        return [float(len(each)) for each in completions]

    table = [
        {
            "prompt": [{"role": "user", "content": f"what is {i}+1"}],
            "answer": str(i + 1),
            "info": {"hint": i, "fate": "well"},
        }
        for i in range(rows)
    ]
    further = {"eval_dataset": Dataset.from_list(table[:held_out])} if held_out else {}
    rubric = vf.Rubric(funcs=[together] if compared else [right])
    return Hints(max_turns=2, dataset=Dataset.from_list(table), rubric=rubric, **further)
