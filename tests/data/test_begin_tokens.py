"""One begin token, one template, one end token, whatever was done to the rows beforehand; a cut keeps the first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.base_source import as_examples, as_rows
from tandem.data.chat import encode_pair
from tandem.data.examples import ConversationSource, ExampleColumns
from tandem.data.length import Overlong, cut
from tandem.data.preferences import Lengths, PreferenceColumns, PreferenceSource
from tandem.data.prompts import PromptColumns, PromptSource
from tandem.roles.rollout.generation import as_prompts
from tests.data.conftest import PRINTABLE

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n{% endfor %}### assistant\n"


@pytest.fixture(scope="module")
def beginning() -> PreTrainedTokenizerFast:
    """A tokenizer that puts ``<bos>`` before every text."""
    special = {"<bos>": 0, "<eos>": 1, "<unk>": 2, "<|user|>": 3, "<|assistant|>": 4}
    vocabulary = special | {character: i for i, character in enumerate(PRINTABLE, start=len(special))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<eos>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    made.chat_template = TEMPLATE
    return made


def prompts(tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], **settings: Any) -> list[int]:
    columns = PromptColumns(chat=settings.pop("chat", False))
    settings = {"max_prompt_length": 100, **settings}
    (prompt,) = PromptSource([as_rows([row], name="rows")], tokenizer=tokenizer, columns=columns, **settings).items
    return list(prompt.prompt_ids)


RENDERED = "<bos><|user|>1+1<eos><|assistant|>"


def test_a_prompt_that_was_rendered_beforehand_has_one_begin_token(beginning: PreTrainedTokenizerFast) -> None:
    rendered = prompts(beginning, {"prompt": RENDERED})
    assert rendered == beginning.encode(RENDERED, add_special_tokens=False)
    assert rendered == prompts(beginning, {"prompt": RENDERED.removeprefix("<bos>")})
    assert rendered == prompts(beginning, {"prompt": "1+1"}, chat=True)
    assert rendered == list(as_prompts([RENDERED], beginning)[0].prompt_ids)


def test_so_have_pairs_and_texts_and_the_answers_of_preferences(beginning: PreTrainedTokenizerFast) -> None:
    whole = beginning.encode(RENDERED + "2<eos>", add_special_tokens=False)
    ids, mask = encode_pair(beginning, RENDERED, "2")
    assert (ids, sum(mask)) == (whole, 2)
    assert encode_pair(beginning, RENDERED, "2<eos>") == (ids, mask)
    for text in (RENDERED + "2", RENDERED + "2<eos>", (RENDERED + "2").removeprefix("<bos>")):
        (example,) = as_examples([{"text": text}], tokenizer=beginning)
        assert list(example.input_ids) == whole
    row = {"prompt": RENDERED, "chosen": "2", "rejected": "3<eos>"}
    (pair,) = PreferenceSource(
        [as_rows([row], name="rows")],
        tokenizer=beginning,
        columns=PreferenceColumns(PromptColumns()),
        lengths=Lengths(100, 10),
    ).items
    assert [*pair.prompt_ids, *pair.answers[0].ids] == whole
    assert beginning.decode(pair.answers[1].ids) == "3<eos>"


@pytest.mark.parametrize("text", [RENDERED, RENDERED.removeprefix("<bos>"), "\n <|user|>1+1"])
def test_a_template_is_not_put_into_another(beginning: PreTrainedTokenizerFast, text: str) -> None:
    refused = pytest.raises(DataError, match=r"row 1: .*a chat template was applied to it already.*chat: false")
    with refused:
        prompts(beginning, {"prompt": text}, chat=True)
    with refused:
        columns = ExampleColumns(chat=True)
        table = as_rows([{"prompt": text, "response": "2"}], name="rows")
        ConversationSource([table], tokenizer=beginning, columns=columns, max_length=100)
    answers = {role: [{"role": "assistant", "content": role}] for role in ("chosen", "rejected")}
    with refused:
        PreferenceSource(
            [as_rows([{"prompt": text, **answers}], name="rows")],
            tokenizer=beginning,
            columns=PreferenceColumns(PromptColumns()),
            lengths=Lengths(100, 20),
        )


def test_nor_one_that_is_written_in_words(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = WORDS
    with pytest.raises(DataError, match="begins with '### user'"):
        prompts(tokenizer, {"prompt": "### user\n1+1\n### assistant\n"}, chat=True)
    assert prompts(tokenizer, {"prompt": "What is ### user?"}, chat=True)


def test_a_cut_from_the_left_keeps_the_begin_token(beginning: PreTrainedTokenizerFast) -> None:
    left = {"on_overlong": Overlong.LEFT}
    for row, chat in (({"prompt": "123456"}, False), ({"prompt": "123456"}, True), ({"prompt": "<bos>123456"}, False)):
        ids = prompts(beginning, row, chat=chat, max_prompt_length=4, **left)
        assert (len(ids), ids[0], ids.count(0)) == (4, 0, 1)
    assert beginning.decode(prompts(beginning, {"prompt": "123456"}, max_prompt_length=4, **left)) == "<bos>456"
    assert beginning.decode(prompts(beginning, {"prompt": "123456"}, max_prompt_length=1, **left)) == "6"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 8), st.integers(0, 1))
def test_a_cut_gives_the_end_after_what_begins(tokens: list[int], limit: int, begins: int) -> None:
    kept = list(cut(tokens, limit, Overlong.LEFT, begins=begins))
    assert len(kept) == min(limit, len(tokens))
    if len(tokens) > limit:
        first = begins if begins < limit else 0
        assert kept[:first] == tokens[:first]
        assert kept[first:] == tokens[len(tokens) - limit + first :]
    assert list(cut(tokens, limit, Overlong.RIGHT, begins=begins)) == tokens[:limit]


def test_a_tokenizer_without_a_begin_token_is_as_it_was(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = prompts(tokenizer, {"prompt": "123456"}, max_prompt_length=4, on_overlong=Overlong.LEFT)
    assert tokenizer.decode(ids) == "3456"
