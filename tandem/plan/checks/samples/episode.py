"""Contradictions in the episode: its name, its file, its parameters, its tools, and what the model is for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tandem.base.errors import Problem
from tandem.base.registry import Signature, near, read_signature
from tandem.config.model import EpisodeConfig
from tandem.config.schema import Config
from tandem.episodes.built_in import BUILT_IN, SINGLE_TURN
from tandem.episodes.parsers import format_of
from tandem.plan.checks.model.folder import NO_TEMPLATE, WITH_TEMPLATE, first_value, tokenizer_of
from tandem.plan.checks.model.template import chosen_template
from tandem.plan.checks.parameters import check_parameters
from tandem.plan.checks.samples.environment import check_openenv, check_own_rows, check_verifiers
from tandem.plan.checks.samples.tools import check_tools
from tandem.plan.parts.entries import estimator_columns
from tandem.reward.static import describe_episode

EPISODE = "actor_rollout_ref.rollout.episode"
_OWN = tuple(EpisodeConfig.model_fields)
_NOTHING = Signature((), (), {}, accepts_any=False)


def check_episode(config: Config) -> Iterator[Problem]:
    """Return every problem of ``rollout.episode``, without running a file of the user's."""
    episode = config.actor_rollout_ref.rollout.episode
    signature = _signature(episode)
    if isinstance(signature, Problem):
        yield signature
    else:
        yield from check_parameters(EPISODE, "episode", episode.type, episode.parameters, signature, _OWN)
    if _is_program(episode):
        yield from _check_program(episode)
    if episode.type == "verifiers" and episode.file is None:
        yield from check_verifiers(EPISODE, episode.type, episode.parameters)
        yield from check_own_rows(config)
    if episode.type == "openenv" and episode.file is None:
        yield from check_openenv(EPISODE, episode.parameters)
    if plays_episodes(config):
        yield from _check_tools(config)
        yield from _check_prompts(config)
        yield from _check_branches(config)
        yield from _check_estimator(config)


def plays_episodes(config: Config) -> bool:
    """Tell whether a sample is more than one answer."""
    return config.actor_rollout_ref.rollout.episode.type != SINGLE_TURN


def _is_program(episode: EpisodeConfig) -> bool:
    return episode.type == "program" and episode.file is None


def _check_program(episode: EpisodeConfig) -> Iterator[Problem]:
    """Report a command that isn't there, and what the address of the policy lacks."""
    command = episode.parameters.get("command")
    if command == []:
        yield Problem(f"{EPISODE}.command", command, "there is nothing to run", "Write [python, agent.py]")
    if isinstance(command, list) and command and shutil.which(str(command[0])) is None:
        reason = f"there is no program {command[0]!r} on PATH, or it may not be run"
        yield Problem(f"{EPISODE}.command", command, reason, "Write the path of one, and its arguments behind it")
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        reason = f"the policy's address needs {' and '.join(missing)}"
        yield Problem(f"{EPISODE}.type", episode.type, reason, "Run pip install 'tandem-rl[serve]'")


def _signature(episode: EpisodeConfig) -> Signature | Problem:
    """Return the parameters of the episode, or what is wrong with its name or file."""
    if episode.file is not None:
        found = describe_episode(episode.type, Path(episode.file))
        if isinstance(found, Signature):
            return found
        if found.startswith(("can't be read", "not Python")):
            return Problem(f"{EPISODE}.file", episode.file, found, "Write an existing Python file, and mend it")
        return Problem(f"{EPISODE}.type", episode.type, found, "Write the name of an async function of the file")
    if episode.type == SINGLE_TURN:
        return _NOTHING
    if episode.type not in BUILT_IN:
        reason = f"there is no episode {episode.type!r}: {near(episode.type, [SINGLE_TURN, *BUILT_IN])}"
        return Problem(f"{EPISODE}.type", episode.type, reason, "Write a known name, or file: FILE for your own")
    return read_signature(BUILT_IN[episode.type])


def _check_tools(config: Config) -> Iterator[Problem]:
    episode, key = config.actor_rollout_ref.rollout.episode, f"{EPISODE}.tools"
    if not episode.tools and not episode.mcp:
        if episode.type == "tool_calls" and episode.file is None:
            remedy = "Write the path of a .py file that defines some, or python; or a server for episode.mcp"
            yield Problem(key, [], "there is no tool to call", remedy)
        return
    yield from check_tools(episode)
    if config.data.tools_key is not None:
        reason = "the tools of a row are offered in place of those that can be called"
        yield Problem(
            "data.tools_key", config.data.tools_key, reason, "Leave it out: all rows get the tools of the file"
        )
    facts = tokenizer_of(config.actor_rollout_ref.model)
    if facts is None:
        return
    template, _ = chosen_template(config.actor_rollout_ref.model, config.data)
    if template is None:
        yield Problem(key, list(episode.tools), NO_TEMPLATE, WITH_TEMPLATE)
    elif "tools" not in template:
        reason = "the chat template of the model has no place for tools, so it would not know of them"
        remedy = "Use the model's own template for tools, or a model that has one"
        yield Problem(key, list(episode.tools), reason, remedy)
    elif episode.tool_format == "auto" and format_of(template) is None:
        reason = "the chat template doesn't show how the model writes calls"
        yield Problem(f"{EPISODE}.tool_format", "auto", reason, "Write hermes, llama3, mistral or pythonic")


def _check_prompts(config: Config) -> Iterator[Problem]:
    """Report plain prompts of a built-in episode: those talk in messages."""
    episode, data = config.actor_rollout_ref.rollout.episode, config.data
    if episode.file is not None or episode.type != "tool_calls" or data.chat:
        return
    made = data.template is not None or data.reasoning_gym is not None
    if made or isinstance(first_value(data, data.prompt_key), str):
        reason = f"{episode.type} talks in messages, and the prompts are plain text"
        yield Problem("data.chat", False, reason, "Write data.chat: true")


def _check_branches(config: Config) -> Iterator[Problem]:
    """Report branches that nobody asks for, and shares of the limits in which nothing fits."""
    episode, key = config.actor_rollout_ref.rollout.episode, f"{EPISODE}.branches"
    if episode.branches == 1:
        return
    if episode.file is None and episode.type in ("tool_calls", "openenv"):
        reason = f"{episode.type} asks one thing at a time, so it has one branch"
        yield Problem(key, episode.branches, reason, "Leave it out, or write an episode of your own")
    for limit, most in (
        ("data.max_response_length", config.data.max_response_length),
        (f"{EPISODE}.max_sampled", episode.max_sampled),
    ):
        if most is not None and most < episode.branches:
            reason = f"each branch has an equal share of {limit} = {most}, which is no token"
            yield Problem(key, episode.branches, reason, f"Write fewer, or a larger {limit}")


def _check_estimator(config: Config) -> Iterator[Problem]:
    if "reward_baselines" in estimator_columns(config):
        reason = "the estimator needs a greedy answer to each prompt, and an episode has no greedy twin"
        yield Problem(f"{EPISODE}.type", config.actor_rollout_ref.rollout.episode.type, reason, "Write grpo or rloo")
