"""A turn is learned up to its end token and no further; where there is none, that is told with the remedy."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import DataError
from tandem.data.base_source import as_examples, as_rows
from tandem.data.chat import encode_conversation
from tandem.data.examples import ConversationSource, ExampleColumns
from tandem.models.tokenizer import character_tokenizer, end_ids, load_tokenizer

TURN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}"
HEADER = "{% if add_generation_prompt %}[assistant]{% endif %}"
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ENDS = {
    "an end token": (TURN.replace("END", "{{ eos_token }}") + HEADER, "a<eos>", True),
    "a line after the end token": (TURN.replace("END", "{{ eos_token }}\n") + HEADER, "a<eos>", True),
    "the next header always": (TURN.replace("END", "{{ eos_token }}") + "[assistant]", "a<eos>", True),
    "the next header and no end token": (TURN.replace("END", ";") + "[assistant]", "a;[assistant]", False),
    "another word": (TURN.replace("END", ";") + HEADER, "a;", False),
    "nothing": (TURN.replace("END", "") + HEADER, "a", False),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_turn_is_learned_up_to_its_end_token(
    tokenizer: PreTrainedTokenizerFast, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    template, learned, ended = ENDS[name]
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    ids, mask = encode_conversation(tokenizer, TALK)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == learned
    columns = ExampleColumns(messages_key="messages")
    table = as_rows([{"messages": TALK}] * 3, name="rows")
    with caplog.at_level(logging.WARNING):
        ConversationSource([table], tokenizer=tokenizer, columns=columns, max_length=100)
        as_examples([{"messages": TALK}], tokenizer=tokenizer)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (0 if ended else 2)
    assert all("no end token of the model (it has '<eos>')" in text and "eos_token" in text for text in told)
    assert ended or told[0].startswith("3 of 3 learned turns end with")


def test_the_end_tokens_of_the_generation_config_count(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    semicolon = tokenizer.encode(";")[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [semicolon, 1]}))
    loaded = load_tokenizer(tmp_path, chat_template=TURN.replace("END", ";\n") + HEADER)
    assert end_ids(loaded) == {semicolon, loaded.eos_token_id}
    ids, mask = encode_conversation(loaded, TALK)
    assert loaded.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "a;"


def test_a_broken_generation_config_beside_a_tokenizer_is_named(tmp_path: Path) -> None:
    character_tokenizer("ab", eos="\n").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"its generation_config\.json can't be read"):
        end_ids(load_tokenizer(tmp_path))


def test_a_tokenizer_that_was_made_reads_no_file_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    made = character_tokenizer("xyz", eos="\n")
    assert end_ids(made) == {made.eos_token_id}
