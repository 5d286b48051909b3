"""Numbers and mathematics found in text; the reference's faults that we don't share."""

from __future__ import annotations

import threading
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.reward.scorers.answers import extract_numbers, score_gsm8k, score_math


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("tail", ["x" * 480, " and so on" * 200, "\n" * 1000])
def test_b77_an_answer_counts_however_much_text_follows(method, tail) -> None:
    assert score_gsm8k("It is 40 + 2.\n#### 42" + tail, "42", method=method) == 1.0


def test_b77_the_last_marker_counts() -> None:
    text = "#### 10\nno, wait: #### 12" + " I checked it 3 times" * 40
    assert score_gsm8k(text, "12") == 1.0
    assert score_gsm8k(text, "10") == 0.0
    assert score_gsm8k("#### 12\nThe marker is ####.", "12") == 1.0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8,000", ["8000"]),
        ("8{,}000", ["8000"]),
        (r"8\,000 and 1,\!234{,}567", ["8000", "1234567"]),
        ("$130,000.", ["130000"]),
        (r"\$1,234.50, then", ["1234.50"]),
        ("[8.124,12.852]", ["8.124", "12.852"]),
        ("[100,200]", ["100", "200"]),
        (r"\[ 1,234 \]", ["1234"]),
        ("(100,200)", ["100", "200"]),
        (r"\{100,200\} or {1,200}", ["100", "200", "1", "200"]),
        ("(costs 1,234)", ["1234"]),
        ("5, 6 and 7.", ["5", "6", "7"]),
        ("1,2,3", ["1", "2", "3"]),
        ("1,2345", ["1", "2345"]),
        ("1234,567", ["1234", "567"]),
        ("1,234,5678", ["1", "234", "5678"]),
        ("-3, - 4, 7-5, −6", ["-3", "4", "7", "5", "-6"]),
        ("-$5 or $-5", ["-5", "-5"]),
        (".5 and 5. and 0.50", [".5", "5", "0.50"]),
        ("1 000", ["1", "000"]),
        ("١٢ ... none", []),
    ],
)
def test_b79_numbers_in_text(text, numbers) -> None:
    assert extract_numbers(text) == [Decimal(number) for number in numbers]


@pytest.mark.parametrize("written", ["8,000", "8{,}000", "$8,000.", "8000.00", "8000 apples", r"8\,000"])
def test_b79_a_thousand_is_a_thousand(written) -> None:
    assert score_gsm8k(f"#### {written}", "8000") == 1.0
    assert score_gsm8k(f"#### {written}", "8,000") == 1.0
    assert score_gsm8k(f"#### {written}", "000") == 0.0


@pytest.mark.parametrize("written", ["**42**", "$42$", r"\boxed{42}", r"$\boxed{42}$", "`42`", r"\(42\)", "**$42**"])
def test_markup_around_a_marked_number_is_no_matter(written) -> None:
    assert score_gsm8k(f"so\n#### {written}", "42") == 1.0
    assert score_gsm8k(f"so\n#### {written}", "2") == 0.0


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("４２", 42), ("－４．５", -4.5), ("4e3", 4000), ("1.5E-2", 0.015), ("4 × 10^3", 4000), ("4e3 m", 4000)),
        *((r"4\times10^{3}", 4000), ("2 x 10^-2", 0.02), ("4e", 4), ("12ex", 12), ("4e3x", 4), ("1e999", "1e999")),
    ],
)
def test_wide_digits_and_powers_of_ten_have_their_value(written: str, value: object) -> None:
    assert score_gsm8k(f"so\n#### {written}", value) == 1.0
    assert score_gsm8k(f"so\n#### {written}", 3) == 0.0
    assert extract_numbers(f"it is {written}")[0] == Decimal(str(value))


@pytest.mark.parametrize("written", ["5,6", "3/4", "[5,6]", "--5", "five"])
def test_strict_wants_one_number_behind_the_marker(written) -> None:
    assert [score_gsm8k(f"#### {written}", truth) for truth in ("5", "56", "3", "4", "-5")] == [0.0] * 5


def test_a_ground_truth_may_be_a_number_or_a_whole_solution() -> None:
    solution = "48/2 = <<48/2=24>>24 clips.\n#### 72"
    assert score_gsm8k("#### 72", solution) == 1.0
    assert score_gsm8k("#### 72", 72) == 1.0
    with pytest.raises(DataError, match="'none at all' has no number"):
        score_gsm8k("#### 72", "none at all")


@given(st.integers(-(10**15), 10**15), st.text(alphabet="abc ,.\n#$[]", max_size=30))
def test_any_spelling_of_an_integer_is_read_back(number, tail) -> None:
    for written in (f"{number}", f"{number:,}", f"{number:,}".replace(",", "{,}"), f"{number}.00", f"{number:,}."):
        assert score_gsm8k(f"so\n#### {written} {tail}", str(number)) == 1.0
        assert extract_numbers(f"it is {written}")[-1] == number


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=0, max_value=99999), min_size=1))
def test_lists_are_never_fused(numbers) -> None:
    assert extract_numbers("[" + ",".join(map(str, numbers)) + "]") == numbers
    assert extract_numbers("; ".join(f"${number}" for number in numbers)) == numbers


@given(st.text(), st.sampled_from(["strict", "flexible"]))
def test_no_text_raises(text, method) -> None:
    assert score_gsm8k(text, "1", method=method) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", True),
        (r"first \boxed{1}, then \boxed{2}", "2", True),
        (r"first \boxed{1}, then \boxed{2}", "1", False),
        (r"roots \boxed{1} and \boxed{2}", r"\{1, 2\}", True),
        (r"\boxed{8{,}000}", "8000", True),
        ("I don't know", "5", False),
        (r"\boxed{unclosed", "5", False),
    ],
)
def test_mathematics_is_compared_as_mathematics(response, truth, right) -> None:
    assert score_math(response, truth) == float(right)


def test_b75_math_scores_the_same_in_any_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(score_math(rf"\boxed{{{i}}}", "2") for i in range(4)))
    thread.start()
    thread.join(60)
    assert found == [0.0, 0.0, 1.0, 0.0]


def test_b75_a_reference_without_mathematics_is_an_error_not_a_zero() -> None:
    with pytest.raises(DataError, match="has no mathematics"):
        score_math("5", "")
