"""Arguments of chat templates: as defaults inside the template they say what they would say from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.models.chat_template import (
    environment,
    fault_of_template,
    faults_of_arguments,
    names_in,
    read_template,
    set_template,
    with_defaults,
)
from tandem.models.tokenizer import character_tokenizer, load_tokenizer

PIECES = (
    "text ",
    "\n",
    "  ",
    "{{ a }}",
    "{{- b -}}",
    "{% if a %}yes\n{% endif %}",
    "  {%- if b is defined and b is false %}off{% endif %}\n",
    "{% if a is not defined %}{% set a = 'own' %}{% endif %}",
    "{% macro m(x) %}[{{ x }}{{ a }}]{% endmacro %}{{ m(b) }}",
    "{% for m in messages %}{{ m }}{{ a }}\n{% endfor %}",
    "{% generation %}{{ b }}{% endgeneration %}",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
TEMPLATE = """\
{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}
{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}
{% if add_generation_prompt %}<a>{% if not enable_thinking %}{{ '-' * width | default(1) }}{% endif %}{% endif %}"""


def rendered(template: str, **given: Any) -> str:
    """What transformers would make of it; an error by its name."""
    plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    try:
        return environment().from_string(plain).render(messages=["one", "two"], **given)
    except Exception as error:
        return type(error).__name__


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.dictionaries(st.sampled_from("ab"), VALUES))
def test_a_default_says_what_the_argument_says(template: str, arguments: dict[str, Any]) -> None:
    assert rendered(with_defaults(template, arguments)) == rendered(template, **arguments)


@given(st.sampled_from(PIECES), VALUES, VALUES)
def test_who_renders_still_has_the_last_word(template: str, default: Any, said: Any) -> None:
    arguments = {"a": default, "b": default}
    assert rendered(with_defaults(template, arguments), a=said, b=said) == rendered(template, a=said, b=said)


@given(VALUES, VALUES)
def test_of_two_defaults_the_later_holds(first: Any, second: Any) -> None:
    template = with_defaults(with_defaults("{{ a }}", {"a": first}), {"a": second})
    assert rendered(template) == rendered("{{ a }}", a=second) and names_in(template) == {"a"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enable_thinkin": False}, "did you mean enable_thinking"),
        ({"date": "today"}, "it asks for enable_thinking, width"),
        ({"messages": []}, "given this anyway"),
        ({"a-b": 1}, "no name"),
        ({"enable_thinking": {1, 2}}, "a template takes text, numbers"),
        ({"width": float("inf")}, "a template takes text, numbers"),
    ],
)
def test_an_argument_that_would_do_nothing_is_refused(arguments: dict[str, Any], said: str) -> None:
    (name,) = arguments
    assert said in faults_of_arguments(arguments, TEMPLATE)[name]
    tokenizer = character_tokenizer("ab<>-uq")
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(DataError, match=f"data.chat_template_kwargs.{name} = ") as found:
        set_template(tokenizer, arguments=arguments)
    assert said in str(found.value) and tokenizer.chat_template == TEMPLATE


def test_where_no_template_is_known_a_name_may_be_one() -> None:
    assert faults_of_arguments({"enable_thinking": False}, None) == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"\xff\xfe{{ messages }}", "can't be read"),
        (b"{% for m in messages %}", "none that can be rendered: line 1"),
        (json.dumps({"chat_template": TEMPLATE}).encode()[:2] + b'"a": 1}', "never asks for 'messages'"),
        (b"", "never asks for 'messages'"),
    ],
)
def test_a_file_that_holds_no_template_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.chat_template = ") as found:
        set_template(character_tokenizer("ab"), str(file))
    assert said in str(found.value)
    with pytest.raises(DataError, match="can't be read"):
        read_template(str(tmp_path))


def test_a_saved_tokenizer_renders_as_it_did(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    tokenizer = set_template(character_tokenizer("ab<>-uq"), str(tmp_path / "own.jinja"), {"enable_thinking": False})
    assert fault_of_template(str(tokenizer.chat_template)) is None
    tokenizer.save_pretrained(tmp_path / "saved")
    messages = [{"role": "user", "content": "q"}]
    for one in (tokenizer, load_tokenizer(tmp_path / "saved")):
        shown = [
            one.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **said)
            for said in ({}, {"enable_thinking": True}, {"width": 2})
        ]
        assert shown == ["<u>q<a>-", "<u>q<a>", "<u>q<a>--"]
    with pytest.raises(DataError, match="has no chat template"):
        set_template(character_tokenizer("ab"), arguments={"enable_thinking": False})


def test_of_several_templates_one_must_ask_for_it() -> None:
    tokenizer = character_tokenizer("ab<>-uq")
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ messages }}"}
    set_template(tokenizer, arguments={"enable_thinking": False})
    messages = [{"role": "user", "content": "q"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "<u>q<a>-"
