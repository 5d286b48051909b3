"""Calls of tools in what models write: each format, several calls, and what is no call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.episodes.parsers import FORMATS, Call, format_of

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
ARGUMENTS = st.dictionaries(
    st.from_regex(r"arg_[a-z]{0,5}", fullmatch=True),
    st.integers(-999, 999)
    | st.booleans()
    | st.text(st.sampled_from("abc \"'{}[];"), max_size=9)
    | st.lists(st.integers()),
    max_size=3,
)
CALLS = st.lists(st.builds(Call, NAMES.map(lambda name: f"t_{name}"), ARGUMENTS), min_size=1, max_size=3)


def hermes(calls: list[Call]) -> str:
    bodies = [json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls]
    return "Let me see.\n" + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def llama3(calls: list[Call]) -> str:
    return "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls)


def marked_llama3(calls: list[Call]) -> str:
    return "Let me see.<|python_tag|>" + llama3(calls)


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls])


def newer_mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{json.dumps(c.arguments)}" for c in calls)


def pythonic(calls: list[Call]) -> str:
    bodies = [f"{c.name}({', '.join(f'{k}={v!r}' for k, v in c.arguments.items())})" for c in calls]
    return f"[{', '.join(bodies)}]"


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("hermes", hermes),
        ("llama3", llama3),
        ("llama3", marked_llama3),
        ("mistral", mistral),
        ("mistral", newer_mistral),
        ("pythonic", pythonic),
    ],
)
@given(calls=CALLS)
def test_what_was_written_is_read(name, write, calls: list[Call]) -> None:  # type: ignore[no-untyped-def]
    found = FORMATS[name](write(calls))
    assert list(found.calls) == calls
    assert found.errors == ()
    assert found.content in ("", "Let me see.")


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(st.sampled_from("ab 1{}[]()\"':,;=<>/|"), max_size=40) | st.text(max_size=20))
def test_no_text_breaks_a_parser(name: str, text: str) -> None:
    found = FORMATS[name](text)
    json.dumps([call.arguments for call in found.calls])


@pytest.mark.parametrize("name", FORMATS)
def test_plain_words_are_content(name: str) -> None:
    found = FORMATS[name](" The answer is 12. ")
    assert (found.content, found.calls, found.errors) == ("The answer is 12.", (), ())


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", "<tool_call>{oops}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "without </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "a call is an object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": 3}</tool_call>', "a call is an object"),
        ("llama3", '{"name": "f", "parameters": ', "not JSON"),
        ("mistral", "[TOOL_CALLS] f(1)", "not JSON"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{", "not JSON"),
        ("pythonic", "[f(x=1]", "not a list of calls"),
        ("pythonic", "[f(1)]", "arguments without a name"),
        ("pythonic", "[f(x=g())]", "not a list of calls"),
        ("pythonic", "[f(x={1})]", "not a list of calls"),
        ("pythonic", "[1, 2]", "no call of a tool"),
    ],
)
def test_what_is_no_call_is_said(name: str, text: str, error: str) -> None:
    found = FORMATS[name](text)
    assert found.calls == ()
    assert error in " ".join(found.errors)


def test_a_good_call_beside_a_bad_one_is_kept() -> None:
    found = FORMATS["hermes"]('<tool_call>{</tool_call><tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    assert found.calls == (Call("f", {"x": 1}),)
    assert len(found.errors) == 1


def test_templates_tell_the_format() -> None:
    assert format_of("… <tool_call> …") == "hermes"
    assert format_of("… [TOOL_CALLS] …") == "mistral"
    assert format_of("… <|python_tag|> …") == "llama3"
    assert format_of("{{ messages }}") is None
