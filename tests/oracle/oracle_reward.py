"""Scorers and chat masks against the reference, and against a second opinion that shares no code with ours."""

from __future__ import annotations

from tandem.base.errors import DataError
from tests.oracle.oracle_file import Case
from tests.oracle.oracle_statistics import built
from tests.oracle.oracle_verdict import DIFFERENCES, Answer, Difference, adapter
from tests.oracle.right_score import right_dapo, right_gsm8k, right_length, right_math, right_route

VOCABULARY = "<pad>,<eos>,<unk>,\\n,then chr(32..126); one token per character"


@adapter("score", "gsm8k")
def gsm8k(case: Case) -> Answer:
    """What was extracted is not ours to give: numbers, not their spelling, are compared."""
    score, given = built("tandem.reward.scorers.rules", "gsm8k"), case.inputs.plain()
    result = score(given.pop("solution"), given.pop("ground_truth"), **given)
    return Answer({"score": result}, {"score": case.expected["score"]})


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
    """The built-in routes by data source; where the reference gives a dict, its score and accuracy are compared."""
    bind, resolve = built("tandem.reward.resolve", "bind"), built("tandem.reward.resolve", "resolve")
    sample, run_now = built("tandem.reward.outcome", "Sample"), built("tandem.reward.scoring", "run_now")
    given = case.inputs.plain()
    row = sample(given["solution"], given["ground_truth"], data_source=given["data_source"])
    verdict = run_now(bind(resolve("by_source")).score(row))
    if verdict.reason:
        raise DataError(verdict.reason)
    expected = case.expected.get("result")
    if not isinstance(expected, dict):
        return Answer({"result": verdict.reward}, {"result": expected})
    actual = {"result": verdict.reward, "acc": bool(verdict.metrics["acc"])}
    return Answer(actual, {"result": expected["score"], "acc": expected["acc"]})


@adapter("sft", "multi_turn_mask")
def multi_turn_mask(case: Case) -> Answer:
    """Encoded by our chat code, cut by our length policy; padding is only laid on for the comparison."""
    encode = built("tandem.data.chat", "encode_conversation")
    fit, policies = built("tandem.data.examples", "fit_example"), built("tandem.data.length", "Overlong")
    given = case.inputs
    assert given["vocab"] == VOCABULARY, "a case with another tokenizer"
    tokenizer = built("tandem.models.tokenizer", "character_tokenizer")(["\n", *map(chr, range(32, 127))])
    tokenizer.chat_template = given["template"]
    ids, mask = encode(tokenizer, given["messages"])
    policy, limit = policies(given["truncation"]), given["max_length"]
    example = fit(ids, mask, max_length=limit, on_overlong=policy, where=case.id)
    missing = limit - len(example.input_ids) if given["pad_mode"] == "right" else 0
    padded = [*example.input_ids, *[tokenizer.pad_token_id] * missing]
    return Answer({"input_ids": padded, "loss_mask": [*example.loss_mask, *[0] * missing]})


DIFFERENCES += [
    Difference(
        "score",
        "the whole text is read, commas group thousands, a full stop ends a sentence, a sign may be any dash, and "
        "numbers are equal by value",
        lambda case: True,
        right_gsm8k,
        frozenset({"gsm8k"}),
    ),
    Difference(
        "score",
        "the overlong penalty stops at its full value",
        lambda case: True,
        right_length,
        frozenset({"dapo_overlong"}),
    ),
    Difference(
        "score",
        "equality is that of mathematics, not of normalised strings, and an answer need not be in a box",
        lambda case: True,
        right_math,
        frozenset({"math"}),
    ),
    Difference(
        "score",
        "the whole text is read, numbers are equal by value, and a box on the answer line is the answer",
        lambda case: True,
        right_dapo,
        frozenset({"math_dapo"}),
    ),
    Difference(
        "score",
        "a box on the answer line is the answer: words around it are not fused with it",
        lambda case: isinstance(case.expected.get("result"), dict),
        right_route,
        frozenset({"default_router"}),
    ),
]
