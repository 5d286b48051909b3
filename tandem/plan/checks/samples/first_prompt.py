"""Whether the first prompt is one, and its ground truth one that the reward can read: the run would find it late."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from tandem.base.errors import DataError, Problem
from tandem.config.schema import Config, DataConfig
from tandem.data.chat import checked_messages, refuse_written_messages
from tandem.data.files import open_tables
from tandem.data.modalities import kind_in_messages
from tandem.data.rows import Row, RowError
from tandem.data.template import Template, TemplateError
from tandem.episodes.built_in import SINGLE_TURN
from tandem.plan.checks.model.template import least_tokens, refusal_of
from tandem.plan.parts.teacher import learns_from_reward
from tandem.reward.registry import REWARDS


def check_first_prompt(config: Config, images: bool = False) -> Iterator[Problem]:
    """Check the first row of the training files, and if it is one that of the held-out files; other checks say what is
    wrong with a file or a column's name.

    ``images``: messages may have some.
    """
    found = list(_check_first(config, config.data.train_files, images))
    yield from found or _check_first(config, config.data.val_files, images)


def _check_first(config: Config, files: Sequence[str], images: bool) -> Iterator[Problem]:
    data = config.data
    with suppress(DataError, OSError):
        row = next((row for table in open_tables(files[:1]) for row in islice(table.scan(), 1)), None)
        if isinstance(row, Row):
            if data.on_bad_row == "error":
                yield from _prompt(config, row, images) if data.template is None else _filled(data.template, row)
                yield from _names(data, row)
            if data.answer_key is not None and learns_from_reward(config):
                yield from _ground_truth(config, row, data.answer_key)


def _prompt(config: Config, row: Row, images: bool) -> Iterator[Problem]:
    data = config.data
    key, remedy, at = data.prompt_key, "Write the column of the prompts", f"{row.table}, row {row.number}: "
    value = row.find(key)
    if not isinstance(value, str | list | tuple) or len(value) == 0:
        reason = f"{at}{value!r} is neither text nor a list of messages"
        yield Problem("data.prompt_key", key, reason, f"{remedy}; data.template: '{{{key}}}' makes text of a number")
        return
    if kind_in_messages(value, images=images) is not None:
        return  # said of the file
    try:
        if isinstance(value, str):
            refuse_written_messages(value)
            messages = [{"role": "user", "content": value}] if data.chat else []
        else:
            messages = checked_messages(row.nested(key), images=images)
            if messages[-1]["role"] == "assistant":
                raise DataError("the last message is the assistant's: a prompt ends with the turn it should answer")
    except DataError as error:
        yield Problem("data.prompt_key", key, f"{at}{error}", remedy)
        return
    given = data.system_prompt if messages and messages[0]["role"] != "system" else None
    if given is not None:
        messages = [{"role": "system", "content": given}, *messages]
    if messages and (said := refusal_of(config, messages)) is not None:
        named, written = ("prompt_key", key) if given is None else ("system_prompt", given)
        roles = ", ".join(str(message["role"]) for message in messages)
        reason = f"{at}the chat template refuses messages with roles {roles}: {said}"
        yield Problem(f"data.{named}", written, reason, "Write what the template takes, or take another template")
        return
    if messages and data.on_overlong_prompt == "error":
        yield from _room(config, messages, at)


def _room(config: Config, messages: Sequence[Mapping[str, Any]], at: str) -> Iterator[Problem]:
    """Check whether what an episode begins with has room; definitions of tools are not counted and need more."""
    most = config.data.max_prompt_length
    if config.actor_rollout_ref.rollout.episode.type == SINGLE_TURN:
        return
    least = least_tokens(config, messages)
    if least is not None and least > most:
        reason = f"{at}an episode begins with {least} tokens, without the definitions of tools"
        remedy = f"Write {least} or more, with room for tools; or data.on_overlong_prompt: drop"
        yield Problem("data.max_prompt_length", most, reason, remedy)


def _filled(template: str, row: Row) -> Iterator[Problem]:
    with suppress(TemplateError):  # another check says so
        made = Template(template)
        for column in made.columns:
            row.find(column)
        try:
            made.fill(row)
        except RowError as error:
            yield Problem("data.template", template, str(error), "Write columns that every row has")


def _names(data: DataConfig, row: Row) -> Iterator[Problem]:
    """Check whether what names prompts and their sources is a name."""
    for name in ("uid_key", "data_source_key"):
        column = getattr(data, name)
        if column is None:
            continue
        with suppress(RowError):
            row.find(column)
            try:
                row.named(column)
            except RowError as error:
                yield Problem(f"data.{name}", column, str(error), "Write a column of names, or null for none")


def _ground_truth(config: Config, row: Row, key: str) -> Iterator[Problem]:
    """Check whether the first ground truth is one: what is built in and pure is asked to compare nothing with it."""
    remedy, at = "Write the column of the right answers", f"{row.table}, row {row.number}: "
    value = row.find(key)
    try:
        if value is None:
            raise row.bad("null", f"column {key!r} is null")
        row.savable(key)
    except RowError as error:
        if config.data.on_bad_row == "error":
            yield Problem("data.answer_key", key, str(error), f"{remedy}, or null for none")
        return
    reward = config.reward_manager
    if reward.file is not None or reward.type not in REWARDS or inspect.isclass(REWARDS[reward.type].target):
        return
    entry = REWARDS[reward.type]
    if entry.signature.columns != ("response", "ground_truth") or entry.traits["packages"]:
        return
    try:
        entry.target("", value)
    except DataError as error:
        yield Problem("data.answer_key", key, f"{at}{error}", f"{remedy}: the reward is {reward.type}")
