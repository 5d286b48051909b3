"""How long episodes were in the engine, by a clock that a test turns."""

from __future__ import annotations

import pytest

from tandem.episodes.process.pool import EpisodePool
from tandem.roles.rollout.episodes import EpisodeGroups
from tandem.roles.rollout.talk import EpisodeRules
from tandem.rollout.protocol import Sampling
from tests.episodes.families import tokenizer
from tests.episodes.test_groups import DEFINITIONS, HERMES, TOOLS, ScriptedEngine, adds, made_of, prompt, spec


def test_time_in_the_engine_is_that_from_each_question_to_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited, answers, made = 0.0, 0, adds(HERMES), tokenizer(HERMES)

    def says(text: str, seed: int) -> str:
        nonlocal now
        now += 2.0
        return answers(text, seed)

    sampling = Sampling(n=1, max_tokens=400, stop_token_ids=(made.eos_token_id,))
    rules = EpisodeRules(8, 5000, DEFINITIONS, HERMES.name)
    with EpisodePool(spec("tool_calls", tools=(TOOLS,))) as pool:
        groups = EpisodeGroups(pool, rules, sampling, made, lambda: now)
        wait = groups.wait

        def slow(seconds: float) -> None:  # nothing is in the engine while this is waited for
            nonlocal now, waited
            now, waited = now + 100.0, waited + 1
            wait(seconds)

        monkeypatch.setattr(groups, "wait", slow)
        (group,) = made_of(groups, ScriptedEngine(made, says), [prompt(made, "what is 1+1", tools=True)])
    (facts,) = group.batch.non_tensor_batch["episode"]
    assert waited > 0 and facts["turns"] == 2
    assert facts["engine_seconds"] == 4.0
