"""One spelling for signs and LaTeX's short forms, and the scorers that read either."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.reward.scorers.answers import extract_numbers, score_gsm8k, score_math
from tandem.reward.scorers.final_answer import same_answer
from tandem.reward.scorers.mathematics import math_dapo, prime_math
from tandem.reward.scorers.rules import gsm8k
from tandem.reward.scorers.spelling import MINUS, plain_signs, spelled_out

SHORT = [
    (r"\frac ab", r"\frac{a}{b}"),
    (r"\frac{a}b", r"\frac{a}{b}"),
    (r"\frac a{b}", r"\frac{a}{b}"),
    (r"\frac \pi 4", r"\frac{\pi}{4}"),
    (r"\frac\pi4", r"\frac{\pi}{4}"),
    (r"\frac{\pi}4", r"\frac{\pi}{4}"),
    (r"\dfrac12", r"\frac{1}{2}"),
    (r"\tfrac 1 2", r"\frac{1}{2}"),
    (r"\cfrac{1}2", r"\frac{1}{2}"),
    (r"\frac1{10}", r"\frac{1}{10}"),
    (r"\frac{\sqrt3}2", r"\frac{\sqrt{3}}{2}"),
    (r"\frac\sqrt32", r"\frac{\sqrt{3}}{2}"),
    (r"\frac1{\frac23}", r"\frac{1}{\frac{2}{3}}"),
    (r"\frac\alpha\beta", r"\frac{\alpha}{\beta}"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"\sqrt\pi", r"\sqrt{\pi}"),
    (r"\sqrt[3]2", r"\sqrt[3]{2}"),
    (r"\binom52", r"\binom{5}{2}"),
]
WHOLE = [r"\frac{a}{b}", r"\frac", r"\frac{1", r"\fraction", r"\frac1", "x^2", "", r"\leftarrow 12", "{}}{"]


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        *((r"\sqrt[3] 8", "2"), (r"\binom 5 2", "10"), (r"\binom52", "10"), (r"\frac12", "0.5")),
        *((r"\frac12+\frac 3 2", "2"), (r"$\sqrt[3]8$", "2"), ("５", "5"), ("−３", "-3")),
    ],
)
@pytest.mark.parametrize("swapped", [False, True], ids=["answer", "truth"])
def test_a_short_form_has_its_value(answer: str, value: str, swapped: bool) -> None:
    answer, truth = (value, answer) if swapped else (answer, value)
    assert prime_math(f"\\boxed{{{answer}}}", truth) == 1.0
    assert prime_math(f"\\boxed{{{answer}}}", "7") == 0.0


@pytest.mark.parametrize(("short", "long"), SHORT)
def test_short_forms_are_spelt_out(short: str, long: str) -> None:
    assert spelled_out(short) == long
    assert spelled_out(f"${short} + {short}$") == f"${long} + {long}$"


@given(st.text(alphabet="\\frac sqrtpi{}[]12ab", max_size=40))
def test_spelling_out_twice_is_spelling_out_once(text: str) -> None:
    once = spelled_out(text)
    assert spelled_out(once) == once
    assert [c for c in once if c not in "{} dtc"] == [c for c in text if c not in "{} dtc"]  # nothing else moved


@pytest.mark.parametrize("text", WHOLE)
def test_what_is_spelt_out_or_nothing_of_the_kind_stays(text: str) -> None:
    assert spelled_out(spelled_out(text)) == spelled_out(text)
    assert spelled_out(text).replace("{1}", "1") == text


@pytest.mark.parametrize("piece", ["\\frac", "\\frac1", "\\frac{", "\\sqrt", "\\frac\\sqrt", "{", "\\frac{1}", "–"])
def test_a_long_text_is_spelt_out_in_one_pass(piece: str) -> None:
    assert len(spelled_out(plain_signs(piece * 20_000, prose=True))) >= 20_000


@pytest.mark.parametrize(("short", "long"), SHORT)
@pytest.mark.parametrize("swapped", [False, True], ids=["answer", "truth"])
def test_mathematics_in_a_short_form_equals_the_long_one(short: str, long: str, swapped: bool) -> None:
    answer, truth = (long, short) if swapped else (short, long)
    assert score_math(f"so \\boxed{{{answer}}}", truth) == 1.0
    assert math_dapo(f"Answer: ${answer}$", truth)["score"] == 1.0
    assert prime_math(f"\\boxed{{{answer}}}", truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [(r"\frac ab", r"\frac ba"), (r"\frac \pi 4", r"\frac{\pi}{3}"), (r"\frac12", r"\frac{1}{3}"), ("–3", "3")],
)
def test_another_value_in_a_short_form_is_wrong(answer: str, truth: str) -> None:
    assert score_math(f"\\boxed{{{answer}}}", truth) == 0.0
    assert math_dapo(f"Answer: {answer}", truth)["score"] == -1.0
    assert prime_math(f"\\boxed{{{answer}}}", truth) == 0.0


@pytest.mark.parametrize("dash", MINUS)
def test_any_dash_in_front_of_a_number_is_a_minus(dash: str) -> None:
    assert extract_numbers(f"it is {dash}3") == [-3]
    assert extract_numbers(f"pages 2{dash}3 (x{dash}4)") == [2, 3, 4]
    for method in ("strict", "flexible"):
        assert score_gsm8k(f"#### {dash}3", "-3", method=method) == 1.0
        assert score_gsm8k(f"#### {dash}3", "3", method=method) == 0.0
        assert score_gsm8k("#### -3", f"{dash}3", method=method) == 1.0
    assert score_math(f"\\boxed{{{dash}3}}", "-3") == score_math("\\boxed{-3}", f"{dash}3") == 1.0
    assert math_dapo(f"Answer: {dash}3", "-3")["score"] == math_dapo("Answer: -3", f"{dash}3")["score"] == 1.0


@pytest.mark.parametrize("plus", "+＋")
def test_a_plus_in_front_changes_no_number(plus: str) -> None:
    for method in ("strict", "flexible"):
        assert score_gsm8k(f"#### {plus}4", "4", method=method) == 1.0
        assert score_gsm8k("#### 4", f"{plus}4", method=method) == 1.0
        assert score_gsm8k(f"#### {plus}4", "-4", method=method) == 0.0
    assert same_answer(f"{plus}4", "4") and same_answer(f"{plus}x", "x")
    assert score_math(f"\\boxed{{{plus}4}}", "4") == 1.0


@pytest.mark.parametrize("mark", ["*", "**", "***", "_", "__", "`", "~~", '"', "$"])
@pytest.mark.parametrize("number", ["-3", "+3", "3", "–3", "1,003"])
def test_emphasis_around_a_number_keeps_its_sign(mark: str, number: str) -> None:
    plain = str(extract_numbers(number)[0])
    for method in ("strict", "flexible"):
        assert score_gsm8k(f"so\n#### {mark}{number}{mark}", plain, method=method) == 1.0
        assert score_gsm8k(f"so\n#### {mark}{number}{mark}", str(-int(plain)), method=method) == 0.0
    if mark not in ('"', "$"):
        assert score_math(f"\\boxed{{{mark}{number}{mark}}}", plain) == 1.0
    assert math_dapo(f"Answer: {mark}{number}{mark}", plain)["score"] == 1.0


def test_the_place_of_a_sign_and_braces_around_one_character_make_no_other_answer() -> None:
    assert same_answer(r"-\frac12", r"\frac{-1}{2}") and same_answer(r"-\frac12", "-1/2")
    assert same_answer("x^2", "x^{2}") and same_answer("x_1", "x_{1}")
    assert not same_answer(r"\frac24", r"\frac12") and not same_answer("x^2", "x_2")


def test_a_number_that_is_read_and_wrong_gets_the_format_score() -> None:
    for method in ("strict", "flexible"):
        assert gsm8k("#### 5", "4", method=method, format_score=0.1) == 0.1
        assert gsm8k("#### 4", "4", method=method, format_score=0.1) == 1.0
        assert gsm8k("no idea", "4", method=method, format_score=0.1) == 0.0
    assert gsm8k("#### 5", "4") == 0.0


def test_math_dapo_takes_the_box_of_an_answer_that_only_boxes() -> None:
    assert math_dapo(r"\boxed{42}", "42") == {"score": 1.0, "acc": 1.0}
    assert math_dapo(r"\boxed{43}", "42") == {"score": -1.0, "acc": 0.0}
    assert math_dapo("Answer: 41\n so \\boxed{42}", "42")["score"] == -1.0  # the line comes first
    assert score_math(r"it is \fbox{8}", "8") == 1.0
