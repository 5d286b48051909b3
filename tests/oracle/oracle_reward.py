"""Scorers and chat masks against the reference.

Where scores differ, ours must agree with a second opinion: for ``gsm8k`` plain arithmetic on the number behind the last
marker, for ``math`` the math-verify package.
"""

from __future__ import annotations

import re
from decimal import Decimal

from tandem.base.errors import DataError, TandemError
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_statistics import built
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, adapter

NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"


@adapter("score", "gsm8k")
def gsm8k(case: Case) -> Answer:
    score = built("tandem.reward.scorers.rules", "gsm8k")
    given = score(case.inputs["solution"], case.inputs["ground_truth"], method=case.inputs["method"])
    return Answer({"score": given}, {"score": case.expected["score"]})


@adapter("score", "math")
def math(case: Case) -> Answer:
    score = built("tandem.reward.scorers.mathematics", "math")
    try:
        return Answer({"score": score(case.inputs["solution"], case.inputs["ground_truth"])})
    except ValueError as refusal:
        raise DataError(str(refusal)) from refusal


@adapter("score", "dapo_overlong")
def dapo_overlong(case: Case) -> Answer:
    penalty = built("tandem.reward.scorers.rules", "length_penalty")
    given = case.inputs
    punished = penalty(
        given["response_length"],
        target=given["max_resp_len"] - given["buffer_len"],
        over=given["buffer_len"],
        penalty=given["penalty_factor"],
    )
    return Answer({"reward": given["base_score"] + punished})


@adapter("score", "math_dapo")
def math_dapo(case: Case) -> Answer:
    score, find = (
        built("tandem.reward.scorers.mathematics", "math_dapo"),
        built("tandem.reward.scorers.mathematics", "dapo_answer"),
    )
    solution, strict = case.inputs["solution"], case.inputs["strict_box_verify"]
    given = score(solution, case.inputs["ground_truth"], strict_box=strict)
    prediction = find(solution, strict_box=strict)
    missing = None if strict else "[INVALID]"  # the reference's two ways to say it
    return Answer({**given, "pred": missing if prediction is None else prediction})


@adapter("score", "prime_math")
def prime_math(case: Case) -> Answer:
    score = built("tandem.reward.scorers.mathematics", "prime_math")
    return Answer({"correct": score(case.inputs["solution"], case.inputs["ground_truth"])})


@adapter("score", "qa_em")
def qa_em(case: Case) -> Answer:
    score = built("tandem.reward.scorers.questions", "qa_em")
    solution, targets = case.inputs["solution"], case.inputs["targets"]
    return Answer({"em": score(solution, targets), "sub_em": score(solution, targets, match="contains")})


@adapter("score", "default_router")
def default_router(case: Case) -> Answer:
    """The built-in routes by data source; where the reference gives a dict, its score is compared."""
    bind, resolve = built("tandem.reward.resolve", "bind"), built("tandem.reward.resolve", "resolve")
    sample, run_now = built("tandem.reward.outcome", "Sample"), built("tandem.reward.scoring", "run_now")
    given = case.inputs
    row = sample(given["solution"], given["ground_truth"], data_source=given["data_source"])
    verdict = run_now(bind(resolve("by_source")).score(row))
    if verdict.reason:
        raise DataError(verdict.reason)
    expected = case.expected.get("result")
    return Answer({"result": verdict.reward}, {"result": expected["score"] if isinstance(expected, dict) else expected})


def dapo_by_value(case: Case, outcome: Answer | TandemError) -> bool:
    """Ours is right exactly if the whole text's last answer line (or box) is the truth, by simpler means than ours."""
    if isinstance(outcome, TandemError):
        return False
    solution, truth = case.inputs["solution"], case.inputs["ground_truth"]
    strict = case.inputs.get("strict_box_verify", False)
    lines = [solution] if strict else re.findall(r"(?i)answer\s*:\s*([^\n]*\S)", solution)[-1:]
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", lines[0]) if lines else []
    found = boxes[-1] if boxes else "" if strict or not lines else lines[0]
    found = re.sub(r"[\s$]|\\\\?%$", "", found.rpartition("=")[2]).rstrip(".")
    equal = found == truth
    if re.fullmatch(NUMBER, found) and re.fullmatch(NUMBER, truth):
        equal = value(found) == value(truth)
    given = outcome.actual.get("score", outcome.actual.get("result"))
    return bool(given == (1.0 if equal else -1.0))


def value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def right_number(case: Case, outcome: Answer | TandemError) -> bool:
    """Ours is 1 exactly if the number behind the last ``#### `` (flexible: the last number) has the right value."""
    if isinstance(outcome, TandemError):
        return False
    solution, flexible = case.inputs["solution"], case.inputs["method"] == "flexible"
    found = re.findall(NUMBER if flexible else rf"#### +[*_`$]*({NUMBER})", solution)
    truth = case.inputs["ground_truth"]
    right = bool(found) and re.fullmatch(NUMBER, truth) is not None and value(found[-1]) == value(truth)
    return bool(outcome.actual["score"] == float(right))


def right_mathematics(case: Case, outcome: Answer | TandemError) -> bool:
    """Ours is math-verify's own verdict; a ground truth in which it finds nothing is refused."""
    parse, verify = built("math_verify", "parse"), built("math_verify", "verify")
    gold = parse(f"${case.inputs['ground_truth']}$", parsing_timeout=None)
    if isinstance(outcome, TandemError):
        return not case.inputs["ground_truth"].strip() or not gold
    answer = parse(case.inputs["solution"], parsing_timeout=None)
    return bool(outcome.actual["score"] == float(verify(gold, answer, timeout_seconds=None)))


def penalty_has_a_floor(case: Case, outcome: Answer | TandemError) -> bool:
    """Beyond the longest response allowed ours is the full penalty, as DAPO defines it."""
    full = case.inputs["base_score"] - case.inputs["penalty_factor"]
    return isinstance(outcome, Answer) and abs(outcome.actual["reward"] - full) < 1e-6


@adapter("sft", "multi_turn_mask")
def multi_turn_mask(case: Case) -> Answer:
    """Encoded by our chat code, cut by our length policy; padding is only laid on for the comparison."""
    encode = built("tandem.data.chat", "encode_conversation")
    fit, policies = built("tandem.data.examples", "fit_example"), built("tandem.data.length", "Overlong")
    given = case.inputs
    tokenizer = built("tandem.models.tokenizer", "character_tokenizer")(["\n", *map(chr, range(32, 127))])
    tokenizer.chat_template = given["template"]
    ids, mask = encode(tokenizer, given["messages"])
    policy, limit = policies(given["truncation"]), given["max_length"]
    example = fit(ids, mask, max_length=limit, on_overlong=policy, where=case.id)
    missing = limit - len(example.input_ids) if given["pad_mode"] == "right" else 0
    padded = [*example.input_ids, *[tokenizer.pad_token_id] * missing]
    return Answer({"input_ids": padded, "loss_mask": [*example.loss_mask, *[0] * missing]})


GSM8K = frozenset({"gsm8k"})
DAPO = frozenset({"math_dapo"})
DIFFERENCES += [
    Difference(
        "score",
        "an answer is looked for in the whole text, not in its last 300 characters",
        lambda case: len(case.inputs["solution"]) > 300,
        right_number,
        GSM8K,
    ),
    Difference(
        "score",
        "a comma groups thousands, and a full stop ends a sentence: neither makes another number",
        lambda case: re.search(r"\d,\d{3}|\d\.(\s|$)", case.inputs["solution"]) is not None,
        right_number,
        GSM8K,
    ),
    Difference(
        "score",
        "numbers are equal by value, not by spelling",
        lambda case: re.search(r"\d", case.inputs["solution"]) is not None,
        right_number,
        GSM8K,
    ),
    Difference(
        "score",
        "the overlong penalty stops at its full value",
        lambda case: case.inputs["response_length"] > case.inputs["max_resp_len"],
        penalty_has_a_floor,
        frozenset({"dapo_overlong"}),
    ),
    Difference(
        "score",
        "equality is that of mathematics (math-verify), not of normalised strings",
        lambda case: True,
        right_mathematics,
        frozenset({"math"}),
    ),
    Difference(
        "score",
        "an answer is looked for in the whole text, not in its last 300 (or 100) characters",
        lambda case: len(case.inputs["solution"]) > 100,
        dapo_by_value,
        DAPO,
    ),
    Difference(
        "score",
        "numbers are equal by value, not by spelling",
        lambda case: re.search(r"\d", case.inputs["ground_truth"]) is not None,
        dapo_by_value,
        DAPO,
    ),
    Difference(
        "score",
        "a box on the answer line is the answer: words around it are not fused with it",
        lambda case: re.search(r"(?i)answer\s*:[^\n]*\S[^\n]*\\boxed", case.inputs["solution"]) is not None,
        dapo_by_value,
        frozenset({"math_dapo", "default_router"}),
    ),
]
