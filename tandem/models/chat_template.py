"""Chat templates: one from a file instead of the tokenizer's own, and arguments that become defaults of it.

An argument is written into the template itself, as what a name means where whoever renders it says nothing. So every
place that renders, in this process or another, sees the same; and a saved tokenizer goes on so, whoever serves it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.errors import DataError
from tandem.base.regular import regular

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment
    from transformers import PreTrainedTokenizerBase

GENERATION_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""What transformers adds to Jinja: it marks the text of the assistant."""
MESSAGES = "messages"
_GIVEN = frozenset(
    {
        *(MESSAGES, "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("image_token", "additional_special_tokens", "raise_exception", "strftime_now"),
    }
)
"""What every rendering is given anyway."""


def environment() -> SandboxedEnvironment:
    """Return what renders templates as transformers does."""
    import jinja2.sandbox

    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )


def fault_of_template(template: str | None) -> str | None:
    """Return why a chat template can't be rendered at all; None where it may be, or there is none."""
    import jinja2

    try:
        if template is not None:
            environment().parse(GENERATION_MARKS.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        return f"the chat template is none that can be rendered: line {error.lineno}: {error.message}"
    return None


def names_in(template: str) -> frozenset[str]:
    """Return the names that ``template`` asks of whoever renders it; it can be parsed."""
    import jinja2.meta

    return frozenset(jinja2.meta.find_undeclared_variables(environment().parse(GENERATION_MARKS.sub("", template))))


def read_template(file: str) -> str:
    """Return the chat template in ``file``. Raises ``DataError`` with the reason why there is none."""
    try:
        text = regular(Path(file).expanduser()).read_text("utf-8")
    except FileNotFoundError:
        raise DataError("there is no such file") from None
    except (OSError, ValueError) as error:
        raise DataError(f"it can't be read ({error})") from None
    if (fault := fault_of_template(text)) is not None:
        raise DataError(fault)
    if MESSAGES not in names_in(text):
        raise DataError(f"it never asks for {MESSAGES!r}, so that all prompts would be equal")
    return text


def faults_of_arguments(arguments: Mapping[str, Any], template: str | None) -> dict[str, str]:
    """Return what is wrong with arguments of a chat template, by their names; of None, what would be with any."""
    names = None if template is None else names_in(template) - _GIVEN
    faults = ((name, _fault(name, value, names)) for name, value in arguments.items())
    return {name: fault for name, fault in faults if fault is not None}


def _fault(name: str, value: Any, names: frozenset[str] | None) -> str | None:
    if name in _GIVEN:
        return "a template is given this anyway"
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        return "it is no name that a template could ask for"
    try:
        _literal(value)
    except TypeError as error:
        return str(error)
    if names is None or name in names:
        return None
    near = difflib.get_close_matches(name, names, n=1)
    asks = f"it asks for {', '.join(sorted(names))}" if names else "it asks for no arguments at all"
    return f"the chat template doesn't use it{f': did you mean {near[0]}?' if near else ''}; {asks}"


def with_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    """Return ``template`` with ``arguments`` as what their names mean where a rendering says nothing else.

    Each becomes one line before it, which writes nothing itself.
    """
    lines = (f"{{% set {n} = {n} if {n} is defined else {_literal(value)} %}}\n" for n, value in arguments.items())
    return "".join(lines) + template


def _literal(value: Any) -> str:
    """Return how Jinja writes a value of JSON. Raises ``TypeError`` for any other."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value - value == 0:  # neither infinite nor NaN
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"a template takes text, numbers, true, false, null, and lists and mappings of such, not {value!r}")


def set_template(
    tokenizer: PreTrainedTokenizerBase, file: str | None = None, arguments: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Set the template of ``tokenizer`` to the one in ``file``, with ``arguments``; return it. Raises ``DataError``."""
    if file is not None:
        try:
            tokenizer.chat_template = read_template(file)
        except DataError as error:
            raise DataError(f"data.chat_template = {file!r}: {error}") from None
    if arguments:
        own: Any = tokenizer.chat_template
        if not own:
            raise DataError(f"data.chat_template_kwargs: the tokenizer {tokenizer.name_or_path!r} has no chat template")
        by_name = dict(own) if isinstance(own, Mapping) else {"": own}
        faults = [faults_of_arguments(arguments, template) for template in by_name.values()]
        for name, fault in faults[0].items():
            if all(name in others for others in faults):
                raise DataError(f"data.chat_template_kwargs.{name} = {arguments[name]!r}: {fault}")
        changed = {name: with_defaults(template, arguments) for name, template in by_name.items()}
        tokenizer.chat_template = changed if isinstance(own, Mapping) else changed[""]
    return tokenizer
