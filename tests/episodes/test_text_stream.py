"""What is told of a turn on the way: always a beginning of its content, and all of it that can be relied on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.episodes.parsers import FORMATS
from tandem.episodes.replies import reply_of, stopped
from tandem.episodes.text_stream import TextStream
from tandem.rollout.protocol import SampleOutput
from tests.episodes.families import FAMILIES, Family, tokenizer

TOKENIZERS = {family.name: tokenizer(family) for family in FAMILIES}
PIECES = ["is", " ", "\n", "the", "answer", "[", "{", "<", "<tool", "_call>", "}", "12", "x", "ST", "STOP", "="]


def told(made: Any, ids: list[int], tool_format: str | None, stop: list[str], reason: str) -> tuple[list[str], str]:
    """The parts of a turn of these tokens, and its content."""
    parts: list[Any] = []
    telling = TextStream(made, [made.eos_token_id], parts.append, tool_format=tool_format, stop=stop, details=True)
    logprobs = [-float(i) for i in range(len(ids))]
    for token, logprob in zip(ids, logprobs, strict=True):
        telling(0, [token], [logprob])
    zeros = torch.zeros(len(ids), dtype=torch.int32)
    sample = SampleOutput(torch.tensor(ids), torch.tensor(logprobs), zeros, reason)  # type: ignore[arg-type]
    sample, found = stopped(made, sample, stop)
    reply = reply_of(made, sample, [made.eos_token_id], [], tool_format=tool_format, stop=found)
    given_ = [token for part in parts for token in part["token_ids"]]
    assert reply["token_ids"][: len(given_)] == given_
    assert [value for part in parts for value in part["logprobs"]] == logprobs[: len(given_)]
    return [part["text"] for part in parts], reply["content"]


@given(
    family=st.sampled_from(FAMILIES),
    pieces=st.lists(st.sampled_from([*PIECES, *(family.call for family in FAMILIES)]), max_size=12),
    tools=st.booleans(),
    stop=st.lists(st.sampled_from(["STOP", "\n", "the answer"]), max_size=2),
    reason=st.sampled_from(["stop", "length"]),
)
def test_it_is_a_beginning_of_the_content(
    family: Family, pieces: list[str], tools: bool, stop: list[str], reason: str
) -> None:
    made = TOKENIZERS[family.name]
    ids = made.encode("".join(pieces), add_special_tokens=False)
    ids += [made.eos_token_id] if reason == "stop" or not ids else []
    for tool_format in FORMATS if tools else [None]:
        parts, content = told(made, ids, tool_format, stop, reason)
        assert content.startswith("".join(parts)) and all(parts)
        if tool_format is None and not stop:
            assert "".join(parts) == content


@pytest.mark.parametrize("name", FORMATS)
def test_words_before_a_call_are_told_and_the_call_is_not(name: str) -> None:
    family = next(one for one in FAMILIES if one.name == name)
    made = TOKENIZERS[name]
    for text, content in ((f"the {family.call}", "the"), ("the answer is 12", "the answer is 12")):
        if name in ("llama3", "pythonic") and content == "the":
            text, content = family.call, ""  # all of a turn is calls there
        parts, _ = told(made, [*made.encode(text, add_special_tokens=False), made.eos_token_id], name, [], "stop")
        assert "".join(parts) == content


def test_a_character_is_told_once_all_its_bytes_are_there() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    text = "är 天気 🙂!"
    parts, content = told(made, made.encode(text, add_special_tokens=False), None, [], "length")
    assert parts == list(text) and content == text
