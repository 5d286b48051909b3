"""Whether the turns of a chat template end with an end token of the model, by the files of its folder alone."""

from __future__ import annotations

import datetime
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.regular import regular
from tandem.config.schema import Config, SftConfig
from tandem.data.chat import endless_turns
from tandem.plan.mix import example_columns
from tandem.plan.model import model_folder

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_SAID = "what was said"


def notes_on_template(config: Config) -> Iterator[str]:
    """Note what to know of a run whose prompts the chat template wraps."""
    if config.data.chat:
        yield from _notes(*template_of(config.actor_rollout_ref.model.tokenizer))


def notes_on_conversations(config: SftConfig) -> Iterator[str]:
    """Note what to know of a fine-tuning on conversations."""
    data, new = config.data, config.model.new
    columns = [example_columns(data), *(example_columns(data, part) for part in data.mix)]
    if not any(found.chat or found.messages_key is not None for found in columns):
        return
    if new is None:
        yield from _notes(*template_of(config.model.tokenizer))
    elif new.chat_template is not None:
        yield from _notes(new.chat_template, [new.alphabet[:1]])


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


def fault_of_template(template: str | None) -> str | None:
    """Return why a chat template can't be rendered at all; None where it may be, or there is none."""
    import jinja2

    try:
        if template is not None:
            _environment().parse(_MARKS.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        return f"the chat template is none that can be rendered: line {error.lineno}: {error.message}"
    return None


def refusal_of(path: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in its words why the chat template of a tokenizer refuses ``messages``; None where it doesn't, or can't be
    rendered here.
    """
    template, ends = template_of(path)
    try:
        if template is not None:
            _rendered(template, messages, ends[0] if ends else "", add_generation_prompt=True)
    except _Refused as error:
        return str(error)
    except Exception:  # a template is foreign code: it raises what it likes, and the run will say it
        return None
    return None


def least_tokens(path: str, messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many tokens a tokenizer makes of ``messages``, without tools; None where that can't be known here."""
    template, ends = template_of(path)
    folder = model_folder(path)
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

    environment = _environment()
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(_MARKS.sub("", template)).render(
        messages=messages, add_generation_prompt=add_generation_prompt, bos_token="", eos_token=end, tools=None
    )


def _environment() -> SandboxedEnvironment:
    """Return what renders templates as transformers does."""
    import jinja2.sandbox

    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
