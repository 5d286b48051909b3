"""The built-in scorers of single samples. ``weighted_sum``, which adds several scorers, is in ``scoring``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from tandem.base.errors import DataError
from tandem.base.procedural import RECIPE, create_task
from tandem.reward.ranges import BelowRight, Count, NotNegative, Whole
from tandem.reward.registry import Objection, register_reward
from tandem.reward.scorers.answers import score_gsm8k


@register_reward("none")
def none() -> float:
    """Return 0 for every answer: nothing is scored. For runs in which only a teacher is learned from."""
    return 0.0


@register_reward("exact")
def exact(response: str, ground_truth: object, *, stop: str | None = None) -> float:
    """Return 1 if the answer is the ground truth, white space around both aside, else 0.

    With ``stop`` (not empty) the answer ends where this text first occurs.
    """
    if stop:
        response = response.split(stop, 1)[0]
    return float(response.strip() == _text(ground_truth).strip())


def check_keyword(parameters: Mapping[str, Any]) -> Iterator[Objection]:
    """Object to an empty text, which every answer has."""
    if not parameters["keyword"]:
        yield Objection("keyword", "every answer has an empty text in it", "Write the text to look for")


@register_reward("keyword", check=check_keyword)
def keyword(response: str, *, keyword: str) -> float:
    """Return 1 if ``keyword`` occurs in the answer, else 0."""
    return float(keyword in response)


@register_reward("gsm8k")
def gsm8k(
    response: str,
    ground_truth: object,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: BelowRight = 0.0,
) -> float:
    """Return 1 if the answer's number is that of the ground truth, else 0; ``strict`` wants it behind ``#### ``.

    ``format_score``: what an answer gets whose number is read and wrong.
    """
    return score_gsm8k(response, ground_truth, method=method, format_score=format_score)


@register_reward("match_fraction")
def match_fraction(response: str, ground_truth: object) -> float:
    """Return the fraction of positions, of the longer of answer and ground truth, at which both have the same
    character.
    """
    expected = _text(ground_truth)
    longer = max(len(response), len(expected))
    return sum(a == b for a, b in zip(response, expected, strict=False)) / longer if longer else 1.0


@register_reward("length_penalty")
def length_penalty(response_length: int, *, target: Whole, over: Count, penalty: NotNegative = 1.0) -> float:
    """Return 0 up to ``target`` tokens, then linearly down to ``-penalty`` at ``target + over`` tokens, and no lower.

    The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13) with ``target`` = L_max - L_cache and
    ``over`` = L_cache. Raises ``ValueError`` unless ``over`` is positive.
    """
    if over <= 0:
        raise ValueError(f"over = {over}: write how many tokens beyond target get the full penalty, 1 or more")
    return -penalty * min(max(response_length - target, 0) / over, 1.0)


def _text(ground_truth: object) -> str:
    if ground_truth is None:
        raise DataError("the data row has no ground truth: set data.answer_key to its column")
    return str(ground_truth)


@register_reward("reasoning_gym", packages=("reasoning_gym",))
def reasoning_gym(response: str, extra_info: Mapping[str, Any], *, answer_tag: str | None = None) -> float:
    """Return the task's own score of ``response``, 0 to 1.

    ``extra_info["reasoning_gym"]`` is the recipe from the row. ``answer_tag``: score what stands in the last
    ``<tag>…</tag>`` (0 if there is none) instead of the whole response; blanks around it are taken off.
    """
    if RECIPE not in extra_info:
        raise DataError(f"extra_info has no {RECIPE!r}: this scorer is for prompts of a reasoning_gym source")
    task = create_task(json.dumps(extra_info[RECIPE]["recipe"]))
    answer: str | None = response.strip()
    if answer_tag is not None:
        tag = re.escape(answer_tag)
        found = re.findall(f"<{tag}>(.*?)</{tag}>", response, re.DOTALL)
        answer = found[-1].strip() if found else None
    return float(task.score_answer(answer, task[extra_info[RECIPE]["index"]]))
