"""What ``docs/errors.md`` says of bad input is what the code says, and each kind has a test."""

from __future__ import annotations

import pytest

from tests.docs.errors_page import HEAD, PAGE, names_in, read_kinds, texts_of_the_code

KINDS = read_kinds(PAGE.read_text("utf-8"))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.wrong[:60] for kind in KINDS])
def test_a_kind_is_said_as_the_page_says_and_shown_by_a_test(kind) -> None:  # type: ignore[no-untyped-def]
    missing = [part for part in kind.said if part not in texts_of_the_code()]
    assert not missing, f"{PAGE.name}:{kind.line}: the code says nothing like it"
    for file, name in kind.tests:
        assert name in names_in(file), f"{PAGE.name}:{kind.line}: tests/{file} has no {name}"


def test_no_kind_is_told_twice() -> None:
    assert len({kind.wrong for kind in KINDS}) == len(KINDS) >= 90


@pytest.mark.parametrize(
    "row",
    [
        "| x | y | `said` | no test |",
        "| x | y | nothing | `plan/test_plan_sft.py::test_sft_refusals` |",
        "| x | y | z |",
    ],
)
def test_a_row_without_a_message_or_a_test_is_an_error(row: str) -> None:
    with pytest.raises(ValueError, match="line 3"):
        read_kinds(f"{HEAD}\n| --- | --- | --- | --- |\n{row}")


def test_what_the_code_does_not_say_is_found() -> None:
    assert "this is said nowhere in the source" not in texts_of_the_code()
    assert "test_sft_refusals" in names_in("plan/test_plan_sft.py")
    assert names_in("plan/test_absent.py") == set()
