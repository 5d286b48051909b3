"""Short answers in words and lettered choices, in the forms that models write them in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.reward.scorers.questions import chosen, multiple_choice, normalised, qa_em, tagged_answer


@pytest.mark.parametrize(
    ("response", "exact", "contains"),
    [
        ("<answer>Paris</answer>", 1.0, 1.0),
        ("<answer> The  paris! </answer>", 1.0, 1.0),
        ("<answer>a</answer> no: <answer>Paris</answer>", 1.0, 1.0),
        ("<answer>Paris</answer> no: <answer>a</answer>", 0.0, 0.0),
        ("<answer>Paris, France</answer>", 0.0, 1.0),
        ("<answer>Paris", 0.0, 0.0),
        ("Paris", 0.0, 0.0),
        ("<answer></answer>", 0.0, 0.0),
        ("<answer>x</answer>" * 11 + "<answer>Paris</answer>", 0.25, 1.0),
    ],
)
def test_qa_em(response, exact, contains) -> None:
    assert qa_em(response, ["Paris"]) == exact
    assert qa_em(response, {"target": ["Rome", "Paris"]}, match="contains") == contains


def test_qa_em_takes_targets_as_data_files_give_them() -> None:
    for truth in ("Paris", ["Paris"], np.array(["Rome", "Paris"], dtype=object), {"target": "Paris"}):
        assert qa_em("<answer>paris</answer>", truth) == 1.0
    assert qa_em("<answer>x</answer>" * 11 + "<answer>Paris</answer>", "Paris", guesses=0.0) == 0.0
    for truth in (["The", "..."], [], None, {"answer": "x"}):
        with pytest.raises(DataError, match=r"ground.truth"):
            qa_em("<answer>the</answer>", truth, match="contains")


@given(st.text(), st.text(min_size=1))
def test_qa_em_never_raises_on_a_response(response, target) -> None:
    if normalised(target):
        for match in ("exact", "contains"):
            assert qa_em(response, target, match=match) in (0.0, 0.25, 1.0)
        assert qa_em(f"{response}<answer>{target}</answer>", target) in (0.25, 1.0) or "<answer>" in target
    assert tagged_answer(f"{response}<answer>x</answer>") == "x"


@pytest.mark.parametrize(
    ("response", "letters"),
    [
        ("B", "B"),
        ("(b)", "B"),
        ("**B.** because", "B"),
        ("The answer is (C).", "C"),
        ("**Answer:** D", "D"),
        ("Answer: $\\boxed{B}$", "B"),
        ("the correct option is A", "A"),
        ("The correct answer is option D, not A", "D"),
        ("the answer is B because it fits", "B"),
        ("Final answer: c)", "C"),
        ("The answer is:\nC", "C"),
        ("The answer is \\(B\\).", "B"),
        ("\\boxed{\\text{(C)}}", "C"),
        ("\\boxed{\\textbf{(D)}\\ 12}", "D"),
        ("<answer> D </answer>", "D"),
        ("答案是 B", "B"),
        ("所以答案：C。", "C"),
        ("故选A", "A"),
        ("I first thought the answer is A.\nBut the answer is B.", "B"),
        ("some words\n\n(E) the last", "E"),
        ("The answer is A and C", "AC"),
        ("Answer: A, C", "AC"),
        ("Answer: AC", "AC"),
        ("The answer is A or B", ""),
        ("The answer is not B", ""),
        ("the answer is a bit odd", ""),
        ("A man went home", ""),
        ("I think so", ""),
        ("Answer: Berlin", ""),
        ("Answer: Z", ""),
        ("", ""),
    ],
)
def test_the_choice_of_a_response(response, letters) -> None:
    assert chosen(response) == frozenset(letters)


def test_flexible_takes_the_last_letter_that_stands_alone() -> None:
    text = "It can't be A, so B) must hold"
    assert multiple_choice(text, "B") == 0.0
    assert multiple_choice(text, "B", method="flexible") == 1.0


def test_several_letters_are_all_wanted() -> None:
    assert multiple_choice("Answer: A, C", "CA") == 1.0
    assert multiple_choice("Answer: A", "A, C") == 0.0
    assert multiple_choice("Answer: A, C", "A") == 0.0


def test_a_number_counts_letters_from_zero() -> None:
    for truth in (1, "1", " 1\n", np.int64(1)):
        assert multiple_choice("Answer: B", truth) == 1.0
        assert multiple_choice("Answer: A", truth) == 0.0
    for truth in (9, "9", "-1", "1.0", "E", "", None, True, 1.5):
        with pytest.raises(DataError, match="is no choice of 'ABCD'"):
            multiple_choice("Answer: B", truth, letters="ABCD")


@given(st.text(), st.sampled_from(["strict", "flexible"]))
def test_multiple_choice_never_raises_on_a_response(text, method) -> None:
    assert multiple_choice(text, "A", method=method) in (0.0, 1.0)
