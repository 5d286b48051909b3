"""Whether the first prompt is one, and its ground truth one that the reward can read: the run would find it late."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from tandem.base.errors import DataError, Problem
from tandem.config.schema import Config, DataConfig
from tandem.data.chat import checked_messages, refuse_written_messages
from tandem.data.files import open_tables
from tandem.data.rows import Row, RowError
from tandem.plan.teacher import learns_from_reward
from tandem.reward.registry import REWARDS


def check_first_prompt(config: Config) -> Iterator[Problem]:
    """Check the first row of the training files; other checks say what is wrong with a file or a column's name."""
    data = config.data
    with suppress(DataError, OSError):
        row = next((row for table in open_tables(data.train_files[:1]) for row in islice(table.scan(), 1)), None)
        if isinstance(row, Row):
            if data.template is None and data.on_bad_row == "error":
                yield from _prompt(data, row)
            if data.answer_key is not None and learns_from_reward(config):
                yield from _ground_truth(config, row, data.answer_key)


def _prompt(data: DataConfig, row: Row) -> Iterator[Problem]:
    key, remedy = data.prompt_key, "Write the column of the prompts"
    value = row.find(key)
    if not isinstance(value, str | list | tuple) or len(value) == 0:
        reason = f"{row.table}, row {row.number}: {value!r} is neither text nor a list of messages"
        yield Problem("data.prompt_key", key, reason, f"{remedy}; data.template: '{{{key}}}' makes text of a number")
        return
    try:
        if isinstance(value, str):
            refuse_written_messages(value)
        elif checked_messages(row.nested(key))[-1]["role"] == "assistant":
            raise DataError("the last message is the assistant's: a prompt ends with the turn that it should answer")
    except DataError as error:
        yield Problem("data.prompt_key", key, f"{row.table}, row {row.number}: {error}", remedy)


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
