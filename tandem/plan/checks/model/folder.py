"""Contradictions between the config and the files of models: weights, tokenizer, chat template, end tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tandem.base.errors import DataError, Problem
from tandem.config.model import ModelConfig
from tandem.config.schema import Config, DataConfig, SftConfig
from tandem.data.files import open_tables
from tandem.data.rows import Row, RowError
from tandem.episodes.built_in import SINGLE_TURN
from tandem.models.chat_template import fault_of_template
from tandem.models.folder.described import fault_of_generation
from tandem.models.folder.stored import faults_of_weights
from tandem.plan.checks.model.template import template_of
from tandem.plan.files.folder import TokenizerFacts, read_tokenizer
from tandem.plan.files.mix import example_columns
from tandem.plan.files.model import ModelFacts, model_folder, offline, sampled_tokens, vocab_size, vocabulary_of
from tandem.plan.parts.preference import learns_preferences

ROLLOUT = "actor_rollout_ref.rollout"
NO_TEMPLATE = "the tokenizer has no chat template"
WITH_TEMPLATE = "Take an instruction-tuned model, name a file of one as data.chat_template, or use plain text"


def check_files_of(key: str, model: ModelConfig) -> Iterator[Problem]:
    """Check whether weights and tokenizer of the model at ``key`` are there and whole; a hub may bring what is not."""
    folder = model_folder(model.path)
    if folder is not None and (folder / "config.json").is_file() and _is_all(model.path):
        for name, fault in islice(faults_of_weights(folder), 1):
            remedy = "Save or download the model again, or name another folder"
            yield Problem(f"{key}.path", model.path, f"{name}: {fault}", remedy)
        if (unfit := fault_of_generation(folder)) is not None:
            yield Problem(f"{key}.path", model.path, unfit, "Mend the file, or remove it: a model need not have one")
    place = model_folder(model.tokenizer)
    broken = read_tokenizer(place).fault if place is not None and _is_all(model.tokenizer) else None
    if broken is not None:
        named = "path" if model.tokenizer_path is None else "tokenizer_path"
        remedy = f"Write tokenizer.save_pretrained there, or name a folder that has one as {key}.tokenizer_path"
        yield Problem(f"{key}.{named}", model.tokenizer, broken, remedy)
    elif place is not None:
        yield from _check_tokenizer(key, model, place, folder)


def _check_tokenizer(key: str, model: ModelConfig, place: Path, folder: Path | None) -> Iterator[Problem]:
    """Check the tokenizer in ``place`` for a template that is none, and for tokens that the model in ``folder`` does
    not embed.
    """
    named = "path" if model.tokenizer_path is None else "tokenizer_path"
    if (fault := fault_of_template(template_of(model.tokenizer)[0])) is not None:
        remedy = "Mend the template, or write tokenizer.save_pretrained there again"
        yield Problem(f"{key}.{named}", model.tokenizer, fault, remedy)
    if place != folder and (unfit := fault_of_generation(place)) is not None:
        remedy = "Mend the file, or remove it: a model need not have one"
        yield Problem(f"{key}.{named}", model.tokenizer, unfit, remedy)
    own, size = vocabulary_of(place), None if folder is None else vocab_size(folder)
    if own is not None and size is not None and (last := max(own.values(), default=0)) >= size:
        token = next(token for token, number in own.items() if number == last)
        reason = f"its tokenizer has the id {last} ({token!r}), and the model embeds the ids 0 to {size - 1}"
        remedy = "Use the tokenizer that the model was saved with, or resize the model's embedding and save it"
        yield Problem(f"{key}.{named}", model.tokenizer, reason, remedy)


def _is_all(path: str) -> bool:
    """Return whether what is there now is all there will be: what a hub's cache lacks is downloaded when it is
    needed.
    """
    return Path(path).expanduser().is_dir() or offline()


def tokenizer_of(model: ModelConfig) -> TokenizerFacts | None:
    """Return the facts of the model's tokenizer; None where its files are not here, or are broken."""
    folder = model_folder(model.tokenizer)
    facts = None if folder is None or not _is_all(model.tokenizer) else read_tokenizer(folder)
    return None if facts is None or facts.fault is not None else facts


def check_template(config: Config) -> Iterator[Problem]:
    """Check whether messages can be rendered, where the config or the first row has some."""
    facts, data = tokenizer_of(config.actor_rollout_ref.model), config.data
    if facts is None or facts.chat_template or data.chat_template is not None:
        return
    if data.chat:
        yield Problem("data.chat", True, NO_TEMPLATE, WITH_TEMPLATE)
        return
    keys = {} if data.template is not None or data.reasoning_gym is not None else {"prompt_key": data.prompt_key}
    if learns_preferences(config):
        answers = ("chosen_key", "rejected_key") if data.label_key is None else ("response_key",)
        keys |= {name: getattr(data, name) for name in answers}
    for name, column in keys.items():
        if isinstance(first_value(data, column), list):
            reason = f"its rows are lists of messages, and {NO_TEMPLATE}"
            yield Problem(f"data.{name}", column, reason, WITH_TEMPLATE)


def check_sft_template(config: SftConfig) -> Iterator[Problem]:
    """Yield the problems of the chat template in fine-tuning, whose columns say what is rendered."""
    model, data = config.model, config.data
    facts = None if model.new is not None else tokenizer_of(model)
    if model.new is not None and (fault := fault_of_template(model.new.chat_template)) is not None:
        yield Problem("model.new.chat_template", model.new.chat_template, fault, "Mend the template")
    has = facts is None or facts.chat_template if model.new is None else model.new.chat_template is not None
    if has or data.chat_template is not None:
        return
    remedy = WITH_TEMPLATE if model.new is None else "Write model.new.chat_template, or use plain text"
    parts = [("data", None), *((f"data.mix[{index}]", part) for index, part in enumerate(data.mix))]
    for at, part in parts[1:] or parts:
        columns = example_columns(data, part)
        if columns.messages_key is not None:
            yield Problem(f"{at}.messages_key", columns.messages_key, NO_TEMPLATE, remedy)
        elif columns.chat:
            yield Problem(f"{at}.chat", True, NO_TEMPLATE, remedy)


def check_ends(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Check whether the tokens that end an answer are tokens, and an answer that counts can end at all."""
    section = config.actor_rollout_ref
    rollout, most = section.rollout, sampled_tokens(section.model, facts)
    for index, token in enumerate(rollout.stop_token_ids):
        if most is not None and token >= most:
            reason = f"the tokenizer has the ids 0 to {most - 1}, so that it would never end an answer"
            yield Problem(f"{ROLLOUT}.stop_token_ids[{index}]", token, reason, "Write the id of a token")
    if config.algorithm.overlong == "mask" and not rollout.stop_token_ids and rollout.ignore_eos:
        reason = "no answer ever ends before its limit (ignore_eos), so that every one would be left out"
        remedy = f"Write train, {ROLLOUT}.ignore_eos: false, or {ROLLOUT}.stop_token_ids"
        yield Problem("algorithm.overlong", "mask", reason, remedy)


def check_nucleus(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Check whether ``top_p`` ever keeps more than one token: the likeliest of n has a probability of 1/n or more."""
    rollout, count = config.actor_rollout_ref.rollout, sampled_tokens(config.actor_rollout_ref.model, facts)
    if count is not None and rollout.top_p <= 1 / count and count > 1:
        reason = (
            f"always the likeliest token, which has as much among {count}: answers to a prompt are all equal and have "
            "nothing to learn from"
        )
        yield Problem(f"{ROLLOUT}.top_p", rollout.top_p, reason, f"Write more than {1 / count:.2g}, such as 0.95")


def notes_on_ends(config: Config) -> Iterator[str]:
    """Note that no token ends an answer, where none does."""
    rollout, facts = config.actor_rollout_ref.rollout, tokenizer_of(config.actor_rollout_ref.model)
    if facts is not None and facts.ends is False and not rollout.stop_token_ids and not rollout.ignore_eos:
        yield (
            "neither the tokenizer nor the model names an end token: every answer has data.max_response_length tokens; "
            f"{ROLLOUT}.stop_token_ids names one"
        )


def first_value(data: DataConfig, column: str) -> object:
    """Return what the first row that can be read has there; None where there is none."""
    for name in data.train_files[:1]:
        try:
            (table,) = open_tables([name])
            row = next((row for row in islice(table.scan(), 10) if isinstance(row, Row)), None)
            return None if row is None else row.find(column)
        except (DataError, RowError, OSError, StopIteration):
            return None  # another check says what is wrong with it
    return None


def renders(config: Config) -> bool:
    """Return whether a chat template may have prompts to render: episodes of the user's own talk as they like."""
    data, episode = config.data, config.actor_rollout_ref.rollout.episode
    if data.chat or episode.type != SINGLE_TURN or episode.file is not None:
        return True
    made = data.template is not None or data.reasoning_gym is not None
    return not made and not isinstance(first_value(data, data.prompt_key), str)
