"""Prompts in whatever form a loop has them, and how the config's sampling reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.base.errors import ContractError
from tandem.config.model import RolloutConfig
from tandem.data.prompts import Prompt
from tandem.models.tokenizer import character_tokenizer
from tandem.roles.rollout.generation import as_prompts, end_tokens, training_sampling


def test_b29_the_engine_is_told_which_distribution_the_log_probs_are_of() -> None:
    rollout = RolloutConfig(n=4, temperature=0.8, top_p=0.9, top_k=7, logprobs_of="full", stop_token_ids=[9])
    sampling = training_sampling(rollout, 16, ends=(2,))
    assert (sampling.logprobs_of, sampling.top_p, sampling.top_k) == ("full", 0.9, 7)
    assert (sampling.n, sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (4, 16, 0.8, (2, 9))
    plain = training_sampling(RolloutConfig(), 16, ends=(2,))
    assert (plain.logprobs_of, plain.top_p, plain.top_k, plain.greedy) == ("sampled", 1.0, -1, False)


def test_ignoring_the_end_keeps_only_the_stops_that_were_written() -> None:
    rollout = RolloutConfig(ignore_eos=True, stop_token_ids=[9])
    assert training_sampling(rollout, 4, ends=(2, 3)).stop_token_ids == (9,)


def test_prompts_come_as_text_ids_messages_or_drawn() -> None:
    tokenizer = character_tokenizer("0123456789>: usr", eos=">")
    tokenizer.chat_template = "{% for turn in messages %}u:{{ turn['content'] }}{% endfor %}>"
    ids = tokenizer("12", add_special_tokens=False)["input_ids"]
    drawn = Prompt("uid", tuple(ids), "12")
    prompts = as_prompts(["12", ids, torch.tensor(ids), drawn, [{"role": "user", "content": "12"}]], tokenizer)
    assert [prompt.prompt_ids for prompt in prompts[:4]] == [tuple(ids)] * 4
    assert prompts[3] is drawn
    assert prompts[4].text == "u:12>"
    assert prompts[4].messages is not None


@pytest.mark.parametrize("wrong", [None, 3, [], [1.5], {"prompt": "12"}])
def test_what_is_no_prompt_is_named(wrong: object) -> None:
    with pytest.raises(ContractError, match="prompt 1 is"):
        as_prompts(["1", wrong], character_tokenizer("01>", eos=">"))


def test_an_answer_ends_with_any_end_token_of_model_or_tokenizer() -> None:
    class Model:
        class generation_config:
            eos_token_id = [5, 7]  # noqa: RUF012

    tokenizer = character_tokenizer("01>", eos=">")
    assert end_tokens(Model(), tokenizer) == tuple(sorted({5, 7, tokenizer.eos_token_id}))  # type: ignore[arg-type]
    Model.generation_config.eos_token_id = None  # type: ignore[assignment]
    assert end_tokens(Model(), tokenizer) == (tokenizer.eos_token_id,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("12", r"prompts is the text '12': give a list of prompts, such as \['12'\]"),
        ([], "there are no prompts"),
        (["1", [0, 99]], r"prompt 1 holds the token id 99: the tokenizer knows 0 to \d"),
        ([[-1]], "prompt 0 holds the token id -1"),
    ],
)
def test_prompts_that_would_be_misread_are_refused(wrong: Any, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        as_prompts(wrong, character_tokenizer("01>", eos=">"))
