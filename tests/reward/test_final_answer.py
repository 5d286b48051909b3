"""Where answers stand, their plain spelling, and the scorers that read them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.reward.scorers.final_answer import as_fraction, last_answer_line, last_box, plain, same_answer
from tandem.reward.scorers.mathematics import dapo_answer, math_dapo, prime_math


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{2} then \boxed{3", "2"),
        (r"\boxed{\boxed{5}}", r"\boxed{5}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{8}", "8"),
        (r"\boxed 7$", "7"),
        (r"\boxed{1} and \boxed 2", "2"),
        (r"\boxed{}", ""),
        (r"\boxed {9}", "9"),
        (r"{\boxed{unclosed}", "unclosed"),
        (r"\boxed{unclosed", None),
        ("no box", None),
    ],
)
def test_the_last_complete_box_is_found(text, box) -> None:
    assert last_box(text) == box


@given(st.text(alphabet="{\\boxedfrac 12", max_size=60), st.integers(0, 999))
def test_a_box_behind_text_that_closes_none_is_the_last(text, number) -> None:
    assert last_box(f"{text}\n \\boxed{{{number}}}") == str(number)


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "}", "\\boxed ", "answer:", "answer is ", "$", "\\text{", "1,111"])
def test_a_long_text_is_read_in_one_pass(piece) -> None:
    assert math_dapo(piece * 30_000, "7")["score"] == -1.0
    assert math_dapo(piece * 30_000 + "\n\\boxed{7}", "7", strict_box=True)["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Answer: 42", "42"),
        ("answer : 1\nAnswer: 2", "2"),
        ("ANSWER:\n7", "7"),
        ("Answer: 3\nAnswer:", "3"),
        ("no", None),
        ("Answer:", None),
    ],
)
def test_the_last_answer_line_with_an_answer_is_found(text, line) -> None:
    assert last_answer_line(text) == line


@pytest.mark.parametrize(
    ("written", "spelt"),
    [
        (r"$\dfrac12$", r"\frac{1}{2}"),
        (r"\frac1{2}", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("x = 5", "5"),
        ("x <= 5", "x<=5"),
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        ("1,2", "1,2"),
        ("(100,200)", "(100,200)"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"\text{yes}", "yes"),
        (r"5 \text{ cm}", "5"),
        (r"12 square meters.", "12"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        ("**42**.", "42"),
        (r"\$5.50", "5.50"),
        (r"\leftarrow", r"\leftarrow"),
        ("mine", "mine"),
        ("", ""),
    ],
)
def test_plain_spelling(written, spelt) -> None:
    assert plain(written) == spelt
    assert plain(spelt) == spelt


def test_answers_are_equal_as_numbers_or_as_text() -> None:
    assert same_answer("12.0", "12")
    assert same_answer("007", "7")
    assert same_answer("-3", "−3")
    assert not same_answer("12", "1,2")
    assert not same_answer("(100,200)", "100200")
    assert as_fraction("6/8") == (as_fraction("3/4")[0], False)
    assert as_fraction(r"-\frac{1}{2}") == as_fraction("-1/2")
    assert as_fraction("1/0") is None


def test_math_dapo_reads_the_answer_line_or_the_box() -> None:
    assert math_dapo("Answer: 42", "42") == {"score": 1.0, "acc": 1.0}
    assert math_dapo("Answer: 43", "42") == {"score": -1.0, "acc": 0.0}
    assert math_dapo("Answer: 43", "42", wrong=0.0)["score"] == 0.0
    assert math_dapo("Answer: 42", "42", strict_box=True)["score"] == -1.0
    assert math_dapo(r"it is \boxed{42}", 42, strict_box=True)["score"] == 1.0
    assert math_dapo(r"Answer: so it is \boxed{13}", "13")["score"] == 1.0
    assert dapo_answer("nothing") is None
    with pytest.raises(DataError, match=r"data\.answer_key"):
        math_dapo("Answer: 1", None)


@pytest.mark.parametrize("tail", ["x" * 480, " and so on" * 200, "\n" * 1000])
def test_b77_dapo_reads_the_whole_text(tail) -> None:
    assert math_dapo("Answer: 3\n" + tail, "3")["score"] == 1.0
    assert math_dapo("\\boxed{3}" + tail, "3", strict_box=True)["score"] == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", True),
        (r"\boxed{2\pi}", "6.28", True),
        (r"\boxed{3.14159}", r"\pi", True),
        (r"\boxed{3.2}", r"\pi", False),
        (r"\boxed{x+1}", "1+x", True),
        (r"\boxed{\frac{2}{4}}", r"\frac12", False),
        (r"\boxed{1/2}", r"\frac12", True),
        (r"\boxed{50\%}", "0.5", True),
        (r"\boxed{(100,200)}", "(100, 200)", True),
        (r"\boxed{(100,200)}", "100200", False),
        ("So the answer is 7. Good.", "7", True),
        ("We get 5, then 7", "7", True),
        (r"\boxed{}", "7", False),
        ("", "7", False),
    ],
)
def test_prime_math_compares_values(response, truth, right) -> None:
    assert prime_math(response, truth) == float(right)


def test_prime_math_takes_its_parameters() -> None:
    assert prime_math(r"\boxed{\frac{2}{4}}", r"\frac12", lowest_terms=False) == 1.0
    assert prime_math(r"\boxed{3.3}", "3", tolerance=0.1) == 1.0


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="\\boxed{}frac$0123456789.,+-=xy/%()answer is:\n ", max_size=40))
def test_no_text_raises_and_every_score_is_in_its_range(text) -> None:
    assert math_dapo(text, "1")["score"] in (1.0, -1.0)
    assert math_dapo(text, "1", strict_box=True)["score"] in (1.0, -1.0)
    assert as_fraction(text) is None or same_answer(text, text)
