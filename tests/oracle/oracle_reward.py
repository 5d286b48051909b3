"""Scorers and chat masks against the reference."""

from __future__ import annotations

from tests.oracle.oracle_file import Case
from tests.oracle.oracle_statistics import built
from tests.oracle.oracle_verdict import Answer, adapter


@adapter("score", "gsm8k")
def gsm8k(case: Case) -> Answer:
    score = built("tandem.reward.scorers", "score_gsm8k")
    return Answer(
        {"score": score(case.inputs["solution"], case.inputs["ground_truth"])}, {"score": case.expected["score"]}
    )


@adapter("score", "math")
def math(case: Case) -> Answer:
    score = built("tandem.reward.scorers", "score_math")
    return Answer({"score": score(case.inputs["solution"], case.inputs["ground_truth"])})
