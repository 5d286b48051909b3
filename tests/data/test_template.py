"""The template of a prompt: columns are filled in, other braces stand for themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.data.rows import Row, RowError
from tandem.data.template import Template, TemplateError

ROW = Row("rows", 1, {"x": 3, "question": "Q", "größe": 2})


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        (r"{question} Answer in \boxed{}.", r"Q Answer in \boxed{}."),
        (r"\frac{1}{\sqrt{2}} {x}", r"\frac{1}{\sqrt{2}} 3"),
        ('{"a": {x}, "b": {"c": 1}}', '{"a": 3, "b": {"c": 1}}'),
        ("{{x}} {x:3d}", "{x}   3"),
        ("{{{x}}}", "{3}"),
        ("{x:2d}+{x!r:>3}={{}}", " 3+  3={}"),
        ("}{ {x} }}", "}{ 3 }}"),
        (r"\begin{{aligned}} {größe}", r"\begin{aligned} 2"),
        ("{0} {x}", "{0} 3"),
    ],
)
def test_braces_that_are_no_column_stand_for_themselves(text: str, filled: str) -> None:
    assert Template(text).fill(ROW) == filled


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{x.__class__}", "no plain column name"),
        ("{x[0]} {x}", "no plain column name"),
        ("{x", "expected '}'"),
        ("no column", "names no column"),
        (r"\boxed{}", "names no column"),
        ("{{x}}", "names no column"),
    ],
)
def test_what_is_a_mistake_is_told_with_what_to_write(text: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as told:
        Template(text)
    assert "{{ and }}" in str(told.value)


@given(st.text("ab {}", max_size=12))
def test_what_str_format_takes_is_filled_as_it_does(text: str) -> None:
    row = Row("rows", 1, {"a": "{b}", "b": 7, "ab": "A", "ba": "B", "aa": "", "bb": "}}"})
    try:
        template = Template(text)
        ours = template.fill(row)
    except (TemplateError, RowError):
        return
    try:
        theirs = text.format(**row.values)
    except (ValueError, LookupError):
        return
    assert ours == theirs
