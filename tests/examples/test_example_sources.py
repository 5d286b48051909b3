"""The data of the examples: training never draws what the evaluation asks."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.base.user_code import load_class
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.reward.resolve import import_file
from tandem.reward.scorers.rules import exact


def source(file: str, name: str, **parameters: object) -> Any:
    return load_class(file, name, parameters, key="data.source")


@pytest.mark.parametrize(
    ("file", "name", "count", "held_out"),
    [("examples/quickstart/sums.py", "Sums", 10_000, 512), ("examples/smollm2/additions.py", "Additions", 100, 25)],
)
def test_every_sum_is_either_trained_or_held_out(file: str, name: str, count: int, held_out: int) -> None:
    made = source(file, name)
    train, val = ({tuple(row.items()) for row in rows} for rows in (made.get_train_dataset(), made.get_val_dataset()))
    assert not train & val
    assert (len(train | val), len(val)) == (count, held_out)


def test_the_warm_up_never_sees_a_held_out_sum_and_errs_half_of_the_time() -> None:
    held_out = {row["prompt"] for row in source("examples/quickstart/sums.py", "Sums").get_val_dataset()}
    rows = source("examples/quickstart/sums.py", "SumsWithErrors", rows=4000).get_train_dataset()
    assert not held_out & {row["prompt"] for row in rows}
    wrong = sum(row["response"] != str(sum(map(int, row["prompt"].rstrip("=").split("+")))) for row in rows)
    assert 0.40 < wrong / len(rows) < 0.50  # a tenth of the replaced digits are right by chance


def test_the_shown_sums_are_no_question_of_the_evaluation() -> None:
    made = source("examples/smollm2/additions.py", "Additions")
    prompt = load_words(["examples/smollm2/addition.yaml"], Config).data.template
    assert prompt is not None
    asked = [f"{row['x']} + {row['y']} = {row['answer']}\n" for row in made.get_val_dataset()]
    assert not [line for line in asked if line in prompt]
    assert len([line for line in prompt.splitlines() if line.endswith(("= 3", "= 8"))]) == 2


@pytest.mark.parametrize(
    ("response", "score"), [(" 7", 1.0), (" 7\n8 +", 1.0), (" 7 + 8", 0.0), (" 17\n", 0.0), ("\n7", 0.0)]
)
def test_the_answer_ends_with_its_line(response: str, score: float) -> None:
    reward = load_words(["examples/smollm2/addition.yaml"], Config).reward_manager
    assert reward.type == "exact"
    assert exact(response, 7, **reward.parameters) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [("12", 1.0), ("5 + 7 equals 12.", 1.0), ("12 is 5 + 7", 0.0), ("112", 0.0), ("twelve", 0.0), ("", 0.0)],
)
def test_the_last_number_counts(response: str, score: float) -> None:
    reward = load_words(["examples/smollm2/addition_chat.yaml"], Config).reward_manager
    assert reward.file is not None
    assert import_file(reward.file).last_number(response, 12) == score
