"""Scorers of questions with a short answer in words, or with lettered choices."""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tandem.base.errors import DataError
from tandem.reward.ranges import BelowRight
from tandem.reward.registry import Objection, register_reward
from tandem.reward.scorers.final_answer import last_box

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MOST_ANSWERS = 10  # more tags than this are guesses


@register_reward("qa_em")
def qa_em(
    response: str,
    ground_truth: object,
    *,
    match: Literal["exact", "contains"] = "exact",
    guesses: BelowRight = 0.25,
) -> float:
    """Return 1 if the last ``<answer>...</answer>`` is one of the targets (case, articles and punctuation aside), else
    0.

    ``ground_truth`` is a text, a list of texts, or ``{"target": ...}``. ``match: contains``: the answer only has to
    contain a target. Under ``exact`` a right answer behind more than 10 answers gives ``guesses``.
    """
    targets = [words for target in _targets(ground_truth) if (words := normalised(target))]
    if not targets:
        raise DataError(f"ground_truth {str(ground_truth)[:80]!r} has no words: qa_em compares words")
    opened, answer = response.count("<answer>"), tagged_answer(response)
    if answer is None:
        return 0.0
    given = normalised(answer)
    if match == "contains":
        return float(any(target in given for target in targets))
    if given not in targets:
        return 0.0
    return guesses if max(opened, response.count("</answer>")) > _MOST_ANSWERS else 1.0


def tagged_answer(text: str) -> str | None:
    """Return what stands in the last closed ``<answer>`` tag."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def normalised(text: str) -> str:
    """Return the text in lower case, without articles and ASCII punctuation, words one blank apart (as SQuAD compares
    answers).
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _targets(ground_truth: object) -> Iterable[str]:
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target")
    if hasattr(ground_truth, "tolist"):  # an array, as parquet gives lists
        ground_truth = ground_truth.tolist()
    if ground_truth is None:
        raise DataError("the data row has no ground truth: set data.answer_key to its column")
    if isinstance(ground_truth, Sequence) and not isinstance(ground_truth, str):
        return [str(target) for target in ground_truth]
    return [str(ground_truth)]


_LETTERS = "ABCDEFGHIJ"
_MARKUP = re.compile(r"\\[()\[\]]|\\(?:text|textbf|mathrm|mathbf)\s*\{|[*_`$]")
_SAID = re.compile(
    r"(?:answer|option|choice)(?:\s+(?:choice|option))?\s*(?:is|are|would\s+be|should\s+be|[:=])[\s:]*"
    r"(?:(?:option|choice)\s+)?|(?:答案|选项)应?该?[是为选:：\s]+|(?:故|应|因此)选[:：\s]*",
    re.IGNORECASE,
)
_OPENING = re.compile(r"[\s\"'\[({#>-]*")
_LIST_OF_LETTERS = re.compile(r"[a-z](?![A-Za-z])|[A-Z]+(?![A-Za-z])(?:\s*(?:,|、|/|&|and\b|和)\s*[A-Z](?![A-Za-z]))*")
_CLOSING = re.compile(r"[\s\"'\])}.,:;!?。，；！-]|$")
_OTHER = re.compile(r"[\s)\]}]*(?:or\b|或)[\s(\[{]*[A-Za-z](?![A-Za-z])")
_SENTENCE = re.compile(r"\s+[a-z]")  # goes on behind an "A" or "I" that may be a word
_STANDING = re.compile(r"(?<![A-Za-z0-9'’])[A-Z](?![A-Za-z0-9'’])(?!\s+[a-z])")


def check_letters(parameters: Mapping[str, Any]) -> Iterator[Objection]:
    """Check for letters of the Latin alphabet, two at least, each once."""
    letters = parameters["letters"].upper()
    if len(letters) < 2 or len(set(letters)) < len(letters) or not (letters.isascii() and letters.isalpha()):
        reason = "there are two letters to choose from at least, of A to Z, each once"
        yield Objection("letters", reason, 'Write for example "ABCD"')


@register_reward("multiple_choice", check=check_letters)
def multiple_choice(
    response: str,
    ground_truth: object,
    *,
    letters: str = _LETTERS,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    r"""Return 1 if the answer chooses the letter of the ground truth, or all of its letters and no other; else 0.

    The choice is read, in this order, from the last ``\boxed{}``, the last ``<answer>``, the last "answer is",
    "Answer:" or "答案是", or a last line that is or begins with a letter: ``B``, ``(b)``, ``**B.** text``.
    ``flexible``: else from the last capital letter that stands alone. ``ground_truth`` is letters (``B``, ``A, C``), or
    an integer (``1``, also as text), which counts from 0. ``letters`` are those that there are, each once.
    """
    expected = _expected_letters(ground_truth, letters)
    return float(chosen(response, letters, flexible=method == "flexible") == expected)


def chosen(response: str, letters: str = _LETTERS, *, flexible: bool = False) -> frozenset[str]:
    """Return the letters that a response chooses; none where it doesn't say, or says one *or* another."""
    for marked in (last_box(response), tagged_answer(response)):
        if marked is not None and (found := _letters_at(_MARKUP.sub("", marked), 0, letters, alone=True)):
            return found
    text = _MARKUP.sub("", response)
    for said in reversed(list(_SAID.finditer(text))):
        if found := _letters_at(text, said.end(), letters, alone=False):
            return found
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and (found := _letters_at(lines[-1], 0, letters, alone=True)):
        return found
    standing = [letter for letter in _STANDING.findall(text) if letter in letters] if flexible else []
    return frozenset(standing[-1:])


def _letters_at(text: str, start: int, letters: str, *, alone: bool) -> frozenset[str]:
    """Return the choice that is written from ``start`` on, if there is one.

    ``alone``: no words have announced it, so a sentence that begins with a single letter is none.
    """
    opening = _OPENING.match(text, start)
    found = _LIST_OF_LETTERS.match(text, opening.end() if opening else start)
    if found is None or _CLOSING.match(text, found.end()) is None or _OTHER.match(text, found.end()):
        return frozenset()
    written = [c.upper() for c in found[0].replace("and", "") if c.isascii() and c.isalpha()]
    word = found[0].islower() or (len(written) == 1 and (alone or written[0] in "AI"))
    if word and _SENTENCE.match(text, found.end()):
        return frozenset()
    chosen_ = frozenset(written)
    return chosen_ if len(chosen_) == len(written) and chosen_ <= set(letters.upper()) else frozenset()


def _expected_letters(ground_truth: object, letters: str) -> frozenset[str]:
    number = _whole(ground_truth)
    if number is not None:
        if 0 <= number < len(letters):
            return frozenset(letters[number].upper())
    elif isinstance(ground_truth, str):
        written = re.sub(r"[\s(),.、]", "", ground_truth)
        if written and all(c.upper() in letters.upper() for c in written):
            return frozenset(written.upper())
    raise DataError(
        f"ground_truth {str(ground_truth)[:80]!r} is no choice of {letters!r}: write a letter, or a number from 0 on"
    )


def _whole(value: object) -> int | None:
    """Return an integer, also one written as text (``"1"``) or of NumPy."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.strip().isdecimal() else None
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        return None
    return operator.index(value)  # type: ignore[arg-type]
