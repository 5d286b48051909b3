"""What ``tandem plan`` says of episodes: what it refuses, and that it reads their keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.episodes.built_in import find_episode
from tandem.plan.plan import Plan, compile_plan
from tandem.reward.static import describe_episode
from tandem.runtime.build.composite import build_actor_rollout_ref
from tests.episodes.conftest import PLAYS
from tests.plan.conftest import place, plan_of

__all__ = ["place", "plan_of"]

EPISODE = "actor_rollout_ref.rollout.episode"
FILES = {
    "tools.py": 'def add(x: int, y: int) -> int:\n    """Add."""\n    return x + y\n',
    "bare.py": "def add(x, y):\n    return x + y\n",
    "own.py": (
        "async def play(task, policy, *, most: int = 3):\n    return 1.0\n"
        "def plain(task, policy):\n    return 1.0\nasync def three(task, policy, more):\n    return 1.0\n"
        "async def flow(task, policy):\n    yield 1.0\n"
        "async def within(task, policy):\n    parts = (lambda: (yield))\n"
        "    def each():\n        yield 1\n    return 1.0\n"
        "@functools.lru_cache(maxsize=3)\nasync def kept(task, policy):\n    return 1.0\n"
        "@traced\nasync def decorated(task, policy):\n    return 1.0\n"
        "class Play:\n    async def __call__(self, task, policy):\n        return 1.0\n"
        "async def swapped(*, task, policy):\n    return 1.0\n"
    ),
    "flow.py": "def add(x: int):\n    yield x\n",
}
TEMPLATES = {"hermes": "{{ tools }} <tool_call> {{ messages }}", "mute": "{{ tools }} {{ messages }}"}


@pytest.fixture
def furnished(place: Path) -> Path:
    """The run's folder with tools, episodes, and a template that shows calls."""
    for name, text in FILES.items():
        (place / name).write_text(text)
    (place / "model" / "chat_template.jinja").write_text(TEMPLATES["hermes"])
    return place


@pytest.mark.parametrize(
    ("word", "key", "reason"),
    [
        ("{type: tool_cals, tools: tools.py}", "type", "there is no episode 'tool_cals': did you mean 'tool_calls'"),
        ("{type: tool_calls}", "tools", "there is no tool to call"),
        ("{type: tool_calls, tools: none.py}", "tools", "can't be read"),
        ("{type: tool_calls, tools: bare.py}", "tools", "add (line 1): parameter 'x' has no type hint"),
        ("{type: tool_calls, tools: tools.py, tool_timeout: 3}", "tool_timeout", "no parameter 'tool_timeout'"),
        ("{type: tool_calls, tools: tools.py, tool_timeout_s: soon}", "tool_timeout_s", "a text where a number"),
        ("{type: tool_calls, tools: tools.py, tool_timeout_s: -3}", "tool_timeout_s", "must be > 0"),
        ("{type: plays, file: own.py}", "type", "defines no plays: did you mean 'play'"),
        ("{type: plain, file: own.py}", "type", "is no async function"),
        ("{type: three, file: own.py}", "type", "takes (task, policy, more)"),
        ("{type: flow, file: own.py}", "type", "is a generator (it has a yield): an episode returns its reward"),
        ("{type: kept, file: own.py}", "type", "is decorated with functools.lru_cache: an episode is called anew"),
        ("{type: Play, file: own.py}", "type", "is no async function"),
        ("{type: swapped, file: own.py}", "type", "takes ()"),
        ("{type: tool_calls, tools: flow.py}", "tools", "add (line 1) is a generator (it has a yield)"),
        ("{type: tool_calls, tools: [tools.py, none.py]}", "tools", "can't be read"),
        ("{type: tool_calls, tools: tools.py, mcp: {time: [no-such-server]}}", "mcp.time", "there is no program"),
        ("{type: tool_calls, tools: tools.py, mcp: {time: []}}", "mcp.time", "it is empty"),
        ("{type: tool_calls, tools: tools.py, sandbox: {seconds: 2.0}}", "sandbox.seconds", "no program is run"),
        ("{type: tool_calls, tools: python, sandbox: {packages: nopy}}", "sandbox.packages", "no installed package"),
        ("{mcp: {time: [python3]}}", "mcp", "which has no tools and no turns"),
        ("{type: play, file: none.py}", "file", "can't be read"),
        ("{type: play, file: own.py, most: few}", "most", "a text where an integer"),
        ("{tool_format: hermes}", "tool_format", "which has no tools and no turns"),
        ("{type: program}", "command", "command"),
        ("{type: program, command: []}", "command", "there is nothing to run"),
        ("{type: program, command: [no-such-agent]}", "command", "there is no program 'no-such-agent'"),
        ("{type: program, command: python3}", "command", "a text where a list"),
        ("{past: edited}", "past", "which has no tools and no turns"),
        ("{turn_rewards: true}", "turn_rewards", "which is rewarded as a whole"),
        ("{branches: 2}", "branches", "which has no tools and no turns"),
        ("{type: tool_calls, tools: [tools.py], branches: 2}", "branches", "asks one thing at a time"),
        ("{type: play, file: own.py, branches: 1000}", "branches", "share of data.max_response_length"),
        ("{type: play, file: own.py, branches: 9, max_sampled: 8}", "branches", "max_sampled = 8, which is no token"),
        ("{type: play, file: own.py, turn_rewards: true}", "turn_rewards", "grpo adds them up"),
        ("{max_turns: 3}", "max_turns", "which has no tools and no turns"),
        ("{turns: 3}", "turns", "has no parameter 'turns'"),
    ],
)
def test_refused(furnished: Path, plan_of: Callable[..., Plan], word: str, key: str, reason: str) -> None:
    (problem,) = plan_of(f"{EPISODE}={word}", "data.chat=true").problems
    assert problem.key == f"{EPISODE}.{key}"
    assert reason in problem.reason + problem.remedy


@pytest.mark.parametrize(
    ("template", "key", "reason"),
    [
        ("{{ messages }}", "tools", "has no place for tools, so it would not know of them"),
        (TEMPLATES["mute"], "tool_format", "doesn't show how the model writes calls"),
    ],
)
def test_a_template_must_show_tools(
    furnished: Path, plan_of: Callable[..., Plan], template: str, key: str, reason: str
) -> None:
    (furnished / "model" / "chat_template.jinja").write_text(template)
    (problem,) = plan_of(f"{EPISODE}={{type: tool_calls, tools: tools.py}}", "data.chat=true").problems
    assert problem.key == f"{EPISODE}.{key}"
    assert reason in problem.reason


def test_an_estimator_with_a_greedy_answer_is_refused(furnished: Path, plan_of: Callable[..., Plan]) -> None:
    problems = plan_of(f"{EPISODE}={{type: play, file: own.py}}", "algorithm.adv_estimator=remax").problems
    assert ["an episode has no greedy twin" in problem.reason for problem in problems] == [True]


def test_rewards_of_turns_are_part_of_the_plan(furnished: Path, plan_of: Callable[..., Plan]) -> None:
    word = f"{EPISODE}={{type: play, file: own.py, turn_rewards: true}}"
    plan = plan_of(word, "algorithm.adv_estimator=reinforce_plus_plus")
    assert not plan.problems
    stages = {stage.name: stage for stage in plan.stages}
    assert "token_rewards" in stages["rollout"].gives and "token_rewards" in stages["advantages"].needs
    filtering = plan_of(word, "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.filter_groups.enable=true")
    assert [problem.key for problem in filtering.problems] == ["algorithm.filter_groups.enable"]


def test_calls_need_messages(furnished: Path, plan_of: Callable[..., Plan]) -> None:
    (problem,) = plan_of(f"{EPISODE}={{type: tool_calls, tools: tools.py}}", "data.chat=false").problems
    assert (problem.key, problem.remedy) == ("data.chat", "Write data.chat: true")


def test_rows_bring_no_tools_of_their_own(furnished: Path, plan_of: Callable[..., Plan]) -> None:
    words = (f"{EPISODE}={{type: tool_calls, tools: tools.py}}", "data.chat=true", "data.tools_key=topic")
    (problem,) = plan_of(*words).problems
    assert problem.key == "data.tools_key"


@pytest.mark.parametrize(
    "word",
    [
        "{type: tool_calls, tools: tools.py, tool_timeout_s: 3.0}",
        "{type: tool_calls, tools: [tools.py, python], sandbox: {seconds: 2.0}, mcp: {time: [python3, server.py]}}",
        "{type: tool_calls, mcp: {time: [python3, server.py]}}",
        "{type: play, file: own.py, most: 2}",
        "{type: within, file: own.py}",
        "{type: decorated, file: own.py}",
    ],
)
def test_a_good_episode_gives_its_column(furnished: Path, plan_of: Callable[..., Plan], word: str) -> None:
    plan = plan_of(f"{EPISODE}={word}", "data.chat=true")
    assert plan.problems == ()
    assert "episode" in plan.group_columns


def test_a_loop_of_ones_own_plays_none(furnished: Path) -> None:
    config = load_words([str(furnished / "run.yaml"), f"{EPISODE}={{type: play, file: own.py}}"], Config)
    with pytest.raises(ConfigError, match="plays no episodes"):
        build_actor_rollout_ref(config)


def test_what_a_decorator_made_of_an_episode_is_told_when_it_is_found(furnished: Path) -> None:
    text = "def seven(found):\n    return 7\n@seven\nasync def play(task, policy):\n    return 1.0\n"
    (furnished / "made.py").write_text(text)
    assert describe_episode("play", furnished / "made.py").columns == ("task", "policy")
    with pytest.raises(TypeError, match="play is no async function that can be called"):
        find_episode("play", str(furnished / "made.py"))


ENVIRONMENTS = {
    "sums.py": "def load_environment():\n    return None\n",
    "lifted.py": "from somewhere import load_environment\n",
    "none.py": "x = 1\n",
}


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (["{type: verifiers}"], f"{EPISODE}.env", "env"),
        (["{type: verifiers, env: no-such-env}"], f"{EPISODE}.env", "there is no module 'no_such_env'"),
        (["{type: verifiers, env: nowhere.py}"], f"{EPISODE}.env", "can't be read"),
        (["{type: verifiers, env: none.py}"], f"{EPISODE}.env", "it defines no function load_environment"),
        (["{type: verifiers, env: sums.py, argz: {}}"], f"{EPISODE}.argz", "no parameter 'argz'"),
        (["{type: verifiers, env: sums.py, tools: tools.py}"], f"{EPISODE}.tools", "has tools of its own"),
        (
            ["{type: verifiers, env: sums.py}", "data.train_files=[]", "data.source={type: verifiers, env: sums.py}"],
            "data.extra_keys",
            "which its episodes don't get",
        ),
        (
            ["{type: verifiers, env: sums.py}", "data.train_files=[]", "data.source={type: verifierz, env: sums.py}"],
            "data.source.type",
            "did you mean 'verifiers'",
        ),
    ],
)
def test_an_environment_that_is_not_there_is_refused(
    furnished: Path, plan_of: Callable[..., Plan], words: list[str], key: str, reason: str
) -> None:
    pytest.importorskip("verifiers")
    for name, text in ENVIRONMENTS.items():
        (furnished / name).write_text(text)
    (problem,) = plan_of(f"{EPISODE}={words[0]}", *words[1:], "data.chat=true").problems
    assert problem.key == key
    assert reason in problem.reason + problem.remedy


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ("nowhere", "it names no class"),
        ("no_such_package.envs:Game", "there is no module 'no_such_package.envs'"),
        ("nowhere.py:Game", "nowhere.py can't be read"),
        ("own.py:Game", "own.py defines no class Game"),
    ],
)
def test_a_class_that_is_not_there_is_refused(
    furnished: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, env: str, reason: str
) -> None:
    monkeypatch.setattr("tandem.plan.checks.samples.environment.lacks", lambda package: False)
    (problem,) = plan_of(f"{EPISODE}={{type: openenv, env: '{env}'}}", "data.chat=true").problems
    assert problem.key == f"{EPISODE}.env" and reason in problem.reason


@pytest.mark.parametrize(("length", "refused"), [(1, True), (2, False)])
def test_what_an_episode_begins_with_must_have_room(task: Path, length: int, refused: bool) -> None:
    words = (f"{EPISODE}={{type: talk, file: {PLAYS}}}", f"data.max_prompt_length={length}")
    problems = compile_plan(load_words([str(task), *words], Config)).problems
    assert [problem.key for problem in problems] == ["data.max_prompt_length"] * refused
    assert not refused or ("begins with 2 tokens" in problems[0].reason and "Write 2 or more" in problems[0].remedy)


def test_a_good_environment_is_none_of_the_plans_business(furnished: Path, plan_of: Callable[..., Plan]) -> None:
    pytest.importorskip("verifiers")
    (furnished / "lifted.py").write_text(ENVIRONMENTS["lifted.py"])
    rows = ("data.train_files=[]", "data.source={type: verifiers, env: lifted.py, args: {a: 1}}")
    words = (f"{EPISODE}={{type: verifiers, env: lifted.py, args: {{a: 1}}}}", "data.extra_keys=[verifiers]")
    assert plan_of(*words, *rows, "data.chat=true").problems == ()


@pytest.mark.parametrize(
    ("word", "key", "extra"),
    [
        ("{type: openenv, env: 'own.py:Play'}", "type", "openenv"),
        ("{type: verifiers, env: sums}", "type", "verifiers"),
        ("{type: tool_calls, mcp: {time: [python3]}}", "mcp", "mcp"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    furnished: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, word: str, key: str, extra: str
) -> None:
    monkeypatch.setattr("tandem.plan.checks.samples.environment.lacks", lambda package: True)
    monkeypatch.setattr("tandem.plan.checks.samples.tools.lacks", lambda package: True)
    (problem,) = plan_of(f"{EPISODE}={word}", "data.chat=true").problems
    assert problem.key == f"{EPISODE}.{key}"
    assert f"pip install 'tandem-rl[{extra}]'" in problem.remedy
