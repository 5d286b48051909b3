"""Episodes that environments of OpenEnv play, in a process of episodes and without a container."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tandem.base.errors import TandemError
from tandem.reward.outcome import Outcome
from tests.episodes.test_groups import EpisodePool, made_of, playing, prompt, spec

pytest.importorskip("openenv")
pytest.importorskip("fastmcp")

GAMES = str(Path(__file__).with_name("openenv_games.py"))


def played(env: str, says: Callable[[str, int], str], *, args: Any = None, info: Any = None, **options: Any) -> Any:
    """One episode: its verdict and its facts."""
    parameters = {"env": env, "args": args or {}}
    given = {"n": 1, "max_tokens": 3000, "past": "edited", "parameters": parameters, **options}
    with playing("openenv", says, **given) as (groups, engine, made):
        (group,) = made_of(groups, engine, [prompt(made, "play", **(info or {}))])
    return group.verdicts[0], group.batch.non_tensor_batch["episode"][0]


def call(name: str, **given: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>"


def test_an_environment_of_texts_hears_what_is_said_and_its_rewards_are_added() -> None:
    says = lambda text, seed: "17" if "is it" in text else "12"  # noqa: E731
    verdict, facts = played(f"{GAMES}:Game", says, info={"reset": {"wanted": "17"}})
    assert (verdict.reward, verdict.metrics) == (0.5, {"steps": 2.0})
    assert [(m["role"], m["content"]) for m in facts["messages"]] == [
        ("user", "play\nwhat is the answer"),
        ("assistant", "12"),
        ("user", "is it"),
        ("assistant", "17"),
    ]


@pytest.mark.parametrize(("fate", "outcome"), [("raises", Outcome.FAILED), ("hangs", Outcome.TIMED_OUT)])
def test_an_environment_that_goes_wrong_costs_its_episode(fate: str, outcome: Outcome) -> None:
    verdict, _ = played(f"{GAMES}:Game", lambda text, seed: "12", args={"fate": fate}, timeout_s=2.0)
    assert verdict.outcome is outcome
    assert "no dice" in verdict.reason or fate == "hangs"


def test_actions_of_several_fields_are_calls() -> None:
    turns = iter([call("act", x="much"), call("act", x=1, y=3)])
    verdict, facts = played(f"{GAMES}:Pairs", lambda text, seed: next(turns), concurrency=1)
    told = [m["content"] for m in facts["messages"] if m["role"] == "tool"]
    (wrong,) = told  # when the environment is done, nobody is told any more
    assert wrong.startswith("Error: x: ")
    assert (verdict.reward, facts["tool_calls"], facts["tool_errors"]) == (1.0, 2, 1)


def test_one_session_at_a_time_is_told_at_the_start() -> None:
    with (
        EpisodePool(spec("openenv", parameters={"env": f"{GAMES}:Pairs"})) as pool,
        pytest.raises(TandemError, match=r"one session at a time .*write episode.concurrency: 1"),
    ):
        pool.await_ready()


def test_tools_of_an_environment_are_offered_and_without_rewards_the_manager_scores() -> None:
    verdict, facts = played(f"{GAMES}:Tools", lambda text, seed: "4" if "response" in text else call("add", x=3))
    assert verdict is None
    assert [m["content"] for m in facts["messages"] if m["role"] == "tool"] == ["4"]


def test_the_environment_that_the_package_starts_others_from(tmp_path: Path) -> None:
    """The template of ``openenv init`` with its names filled in: an echo that pays by length, and never ends."""
    root = Path(str(distribution("openenv").locate_file("openenv"))) / "cli" / "templates" / "openenv_env"
    names = {"__ENV_NAME__": "echoes", "__ENV_TITLE_NAME__": "Echoes", "__ENV_CLASS_NAME__": "Echoes"}
    text = (root / "models.py").read_text() + (root / "server" / "__ENV_NAME___environment.py").read_text()
    text = text.replace("from __future__ import annotations", "")
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    head, _, tail = text.partition("try:\n    from ..models")
    (tmp_path / "echoes.py").write_text(head + tail.partition("Observation\n\n\n")[2])
    verdict, facts = played(f"{tmp_path / 'echoes.py'}:EchoesEnvironment", lambda text, seed: "is it", max_turns=2)
    assert (verdict.reward, facts["turns"], facts["cut"]) == (1.0, 2, "turns")
    said = [m["content"] for m in facts["messages"]]
    assert json.loads(said[0].partition("\n")[2]) == {
        "echoed_message": "Echoes environment ready!",
        "message_length": 0,
    }
    assert json.loads(said[2]) == {"echoed_message": "is it", "message_length": 5}
