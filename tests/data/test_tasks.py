"""Procedural tasks: the same questions in every process, scored by the package's own rule."""

from __future__ import annotations

import json
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.prompts import PromptColumns, PromptSource
from tandem.data.tasks import TaskTable
from tandem.reward.scorers.rules import reasoning_gym as score_answer

COLUMNS = PromptColumns("question", answer_key="answer", extra_keys=("reasoning_gym",))


def source(table: TaskTable, tokenizer: PreTrainedTokenizerFast) -> PromptSource:
    return PromptSource([table], tokenizer=tokenizer, columns=COLUMNS, max_prompt_length=200, streaming=True)


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install 'tandem-rl\[tasks\]'"):
        TaskTable(dataset="chain_sum")


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_answers_are_scored_after_any_checkpoint(self, tokenizer: PreTrainedTokenizerFast) -> None:
        made = source(TaskTable(dataset="chain_sum", size=20, seed=3, max_terms=3), tokenizer)
        assert len(made) == 20
        for prompt in made.take(20):
            saved = json.loads(json.dumps(prompt.extra_info))
            assert prompt.data_source == "chain_sum"
            assert score_answer(f" {prompt.ground_truth}\n", saved) == 1.0
            assert score_answer("no idea", saved) == 0.0
            tagged = f"<answer>0</answer> no: <answer> {prompt.ground_truth} </answer>."
            assert score_answer(tagged, saved, answer_tag="answer") == 1.0
            assert score_answer(f"{prompt.ground_truth}", saved, answer_tag="answer") == 0.0

    def test_the_seed_chooses_the_questions(self, tokenizer: PreTrainedTokenizerFast) -> None:
        one, same, other = (source(TaskTable(dataset="chain_sum", size=5, seed=s), tokenizer) for s in (1, 1, 2))
        assert one.items[:] == same.items[:]
        assert [p.text for p in one.items] != [p.text for p in other.items]

    def test_a_task_with_several_right_answers_uses_its_own_rule(self) -> None:
        row = next(TaskTable(dataset="countdown", size=1, seed=0).scan())
        assert not isinstance(row, Exception)
        target = row.values["answer"]
        assert score_answer(str(target), {"reasoning_gym": row.values["reasoning_gym"]}) == 1.0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dataset": "chain_sums"}, "unknown reasoning_gym dataset 'chain_sums': did you mean 'chain_sum'"),
            ({"dataset": "chain_sum", "max_term": 3}, "has no parameter 'max_term': did you mean 'max_terms'"),
            ({"dataset": "chain_sum", "min_terms": -1}, "refuses .*min_terms must be positive"),
            ({"dataset": "chain_sum", "size": 0}, "refuses .*size must be positive"),
        ],
    )
    def test_what_the_package_lacks_is_named(
        self, tokenizer: PreTrainedTokenizerFast, options: dict[str, object], message: str
    ) -> None:
        with pytest.raises(DataError, match=message):
            source(TaskTable(**options), tokenizer)  # type: ignore[arg-type]

    def test_a_prompt_of_another_source_has_no_recipe(self) -> None:
        with pytest.raises(DataError, match="this scorer is for prompts of a reasoning_gym source"):
            score_answer("1", {})
