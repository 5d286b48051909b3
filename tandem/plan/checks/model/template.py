"""Whether the turns of a chat template end with an end token of the model, by the files of its folder alone."""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.base.errors import DataError, Problem
from tandem.base.regular import regular
from tandem.config.model import ModelConfig
from tandem.config.schema import Config, DataConfig, SftConfig, SftDataConfig
from tandem.data.chat import endless_turns
from tandem.models.chat_template import (
    GENERATION_MARKS,
    environment,
    fault_of_template,
    faults_of_arguments,
    read_template,
    with_defaults,
)
from tandem.plan.files.mix import example_columns
from tandem.plan.files.model import model_folder

_SAID = "what was said"


def notes_on_template(config: Config) -> Iterator[str]:
    """Note what to know of a run whose prompts the chat template wraps."""
    if config.data.chat:
        yield from _notes(*chosen_template(config.actor_rollout_ref.model, config.data))


def notes_on_conversations(config: SftConfig) -> Iterator[str]:
    """Note what to know of a fine-tuning on conversations."""
    data, new = config.data, config.model.new
    columns = [example_columns(data), *(example_columns(data, part) for part in data.mix)]
    if not any(found.chat or found.messages_key is not None for found in columns):
        return
    if new is None:
        yield from _notes(*chosen_template(config.model, data))
    elif (template := _chosen(new.chat_template, data)) is not None:
        yield from _notes(template, [new.alphabet[:1]])


def _notes(template: str | None, ends: list[str]) -> Iterator[str]:
    after = None if template is None or not ends else _after_turn(template, ends[0])
    if after is not None and not any(end in after for end in ends):
        ending = (
            f"the chat template ends a turn of the assistant with {after[:30]!r}"
            if after.strip()
            else ("the chat template ends a turn of the assistant with nothing")
        )
        yield endless_turns(ending, ", ".join(map(repr, ends)))


def template_of(path: str) -> tuple[str | None, list[str]]:
    """Return the chat template and the texts of the end tokens; None or none where the files don't tell."""
    folder = model_folder(path)
    if folder is None:
        return None, []
    config, file = _read(folder / "tokenizer_config.json"), folder / "chat_template.jinja"
    try:
        template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, ValueError):
        return None, []
    listed = _read(folder / "generation_config.json").get("eos_token_id")
    ends = _texts(folder, config, [str(token) for token in (listed if isinstance(listed, list) else [listed])])
    own = config.get("eos_token")
    ends.append(own.get("content") if isinstance(own, Mapping) else own)
    return template if isinstance(template, str) else None, [end for end in dict.fromkeys(ends) if isinstance(end, str)]


def _texts(folder: Path, config: Mapping[str, Any], ids: list[str]) -> list[object]:
    """Return the texts of special tokens, by their ids; the large file is read only if the small one lacks some."""
    small = config.get("added_tokens_decoder") or {}
    names = {token: entry.get("content") for token, entry in small.items()}
    if not set(ids) <= {*names, "None"}:
        added = _read(folder / "tokenizer.json").get("added_tokens", [])
        names |= {str(entry["id"]): entry["content"] for entry in added}
    return [names.get(token) for token in ids]


def _read(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(regular(file).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, Mapping) else {}


def chosen_template(model: ModelConfig, data: DataConfig | SftDataConfig) -> tuple[str | None, list[str]]:
    """Return the chat template that ``data`` make of the model's own, and the texts of the end tokens; None or none
    where the files don't tell.
    """
    template, ends = template_of(model.tokenizer)
    return _chosen(template, data), ends


def _chosen(template: str | None, data: DataConfig | SftDataConfig) -> str | None:
    try:
        if data.chat_template is not None:
            template = read_template(data.chat_template)
        return None if template is None else with_defaults(template, data.chat_template_kwargs)
    except (DataError, TypeError):  # another check says so
        return None


def check_arguments(config: Config | SftConfig) -> Iterator[Problem]:
    """Check the template's file, and whether the template has a place for each argument."""
    data, new = config.data, None
    if isinstance(config, Config):
        model: ModelConfig = config.actor_rollout_ref.model
    else:
        model, new = config.model, config.model.new
    file, template = data.chat_template, template_of(model.tokenizer)[0] if new is None else new.chat_template
    if file is not None:
        try:
            template = read_template(file)
        except DataError as error:
            yield Problem("data.chat_template", file, str(error), "Name a file of a chat template, as Jinja")
            return
        if new is not None and new.chat_template is not None:
            reason = "model.new.chat_template says it already"
            yield Problem("data.chat_template", file, reason, "Leave one of the two out")
    if fault_of_template(template) is None:
        for name, fault in faults_of_arguments(data.chat_template_kwargs, template).items():
            value = data.chat_template_kwargs[name]
            yield Problem(f"data.chat_template_kwargs.{name}", value, fault, "Leave it out, or write what is asked for")


def refusal_of(config: Config, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in its words why the chat template of a run refuses ``messages``; None where it doesn't, or can't be
    rendered here.
    """
    template, ends = chosen_template(config.actor_rollout_ref.model, config.data)
    try:
        if template is not None:
            _rendered(template, messages, ends[0] if ends else "", add_generation_prompt=True)
    except _Refused as error:
        return str(error)
    except Exception:  # a template is foreign code: it raises what it likes, and the run will say it
        return None
    return None


def least_tokens(config: Config, messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many tokens a run makes of ``messages``, without tools; None where that can't be known here."""
    model = config.actor_rollout_ref.model
    template, ends = chosen_template(model, config.data)
    folder = model_folder(model.tokenizer)
    if template is None or folder is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        text = _rendered(template, messages, ends[0] if ends else "", add_generation_prompt=True)
        made: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
        return len(made.encode(text, add_special_tokens=False).ids)
    except Exception:  # as above, and files that are none of a tokenizer
        return None


def _after_turn(template: str, end: str) -> str | None:
    """Return what the template writes after the text of the assistant; None where it can't be rendered here."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _SAID}]
    try:
        text = _rendered(template, talk, end, add_generation_prompt=False)
    except Exception:  # as above
        return None
    _, found, after = text.rpartition(_SAID)
    return after if found else None


class _Refused(Exception):
    """What a template says with ``raise_exception``."""


def _rendered(template: str, messages: Sequence[Mapping[str, Any]], end: str, *, add_generation_prompt: bool) -> str:
    def refuse(message: str) -> None:
        raise _Refused(message)

    renderer = environment()
    renderer.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    renderer.globals["raise_exception"] = refuse
    renderer.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return renderer.from_string(GENERATION_MARKS.sub("", template)).render(
        messages=messages, add_generation_prompt=add_generation_prompt, bos_token="", eos_token=end, tools=None
    )
