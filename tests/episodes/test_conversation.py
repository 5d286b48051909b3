"""What follows a sampled turn: with four families of templates it is what the whole conversation has there, in ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import DataError
from tandem.data.chat import encode_chat_prompt
from tandem.episodes.conversation import checked_new, continuation, turn_text
from tandem.episodes.parsers import FORMATS
from tandem.models.tokenizer import encode_text
from tests.episodes.families import FAMILIES, Family, tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
TOKENIZERS = {family.name: tokenizer(family) for family in FAMILIES}
ASKED = [{"role": "user", "content": "what is 1+1"}]


def called(family: Family) -> tuple[list[int], dict[str, Any]]:
    """A turn that calls the tool, as ids and as a message."""
    made = TOKENIZERS[family.name]
    ids = [*encode_text(made, family.call), made.eos_token_id]
    parsed = FORMATS[family.name](turn_text(made, ids, [made.eos_token_id]))
    (call,) = parsed.calls
    function = {"name": call.name, "arguments": call.arguments}
    message = {"role": "assistant", "content": parsed.content}
    return ids, message | {"tool_calls": [{"id": "000100000", "type": "function", "function": function}]}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@given(answer=st.text(st.sampled_from("the answer is 12\n ab"), max_size=20))
def test_a_tool_result_continues_as_in_the_whole_conversation(family: Family, answer: str) -> None:
    made = TOKENIZERS[family.name]
    ids, message = called(family)
    result = {"role": "tool", "name": "add", "tool_call_id": "000100000", "content": answer}
    _, prompt = encode_chat_prompt(made, ASKED, tools=TOOLS)
    behind = continuation(made, [result], ids, [made.eos_token_id], TOOLS)
    _, whole = encode_chat_prompt(made, [*ASKED, message, result], tools=TOOLS)
    if family.name == "mistral":  # its template shows the tools before the last message only if that is a user's
        _, prompt = encode_chat_prompt(made, [*ASKED, message, result][:1])
    assert prompt + ids + behind == whole


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_user_goes_on_after_plain_text(family: Family) -> None:
    made = TOKENIZERS[family.name]
    said = [*encode_text(made, "the answer"), made.eos_token_id]
    new = [{"role": "user", "content": "is it 12"}]
    _, prompt = encode_chat_prompt(made, ASKED)
    _, whole = encode_chat_prompt(made, [*ASKED, {"role": "assistant", "content": "the answer"}, *new])
    assert prompt + said + continuation(made, new, said, [made.eos_token_id]) == whole


def test_what_was_sampled_may_be_spelt_otherwise_than_a_tokenizer_would() -> None:
    """The ids of a turn are no function of its text: nothing here asks for them."""
    made = TOKENIZERS["hermes"]
    spelt = [token for letter in "the answer" for token in encode_text(made, letter)]
    assert turn_text(made, spelt, []) == "the answer"
    assert spelt != encode_text(made, "the answer")


def test_several_results_follow_one_turn() -> None:
    made = TOKENIZERS["hermes"]
    results = [{"role": "tool", "tool_call_id": f"00010000{i}", "content": str(i)} for i in range(3)]
    text = made.decode(continuation(made, results, [made.eos_token_id], [made.eos_token_id]))
    assert text.count("<tool_response>") == 3
    assert text.endswith("<|im_start|>assistant\n")


def test_a_template_without_ends_is_refused() -> None:
    made = tokenizer(FAMILIES[0])
    made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(DataError, match="doesn't end an assistant's turn"):
        continuation(made, [{"role": "user", "content": "go on"}], [made.eos_token_id], [made.eos_token_id])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([{"role": "user", "content": "b"}], "message 1 is not what it was"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}], "message 2 is not what it was"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "y"}], "nothing follows"),
        ([{"role": "user", "content": "a"}], "message 2 is not what it was"),
        ("a", "a list of messages"),
    ],
)
def test_the_past_can_not_be_changed(given: Any, reason: str) -> None:
    known = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(DataError, match=reason):
        checked_new(known, given)


@pytest.mark.parametrize("message", [{"foo": 1}, {"role": None, "content": "a"}, {"content": "a"}])
def test_a_message_without_a_role_is_named(message: dict[str, object]) -> None:
    with pytest.raises(DataError, match=r"message 2 has no role: write"):
        checked_new([], [{"role": "user", "content": "a"}, message])
