"""Tokenizers: exact round trips, through folders too, and no token that is made up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from tandem.base.errors import DataError, TandemError
from tandem.data.examples import fit_example
from tandem.data.length import Overlong
from tandem.models.tokenizer import (
    character_tokenizer,
    check_vocabulary,
    decode_text,
    encode_text,
    leading_ids,
    load_tokenizer,
)

ALPHABET = "\n\t abc.,'0123😀é正"
made = character_tokenizer(ALPHABET)


@given(st.text(ALPHABET, max_size=20))
def test_one_token_per_character_and_back(text: str) -> None:
    ids = encode_text(made, text)
    assert len(ids) == len(text)
    assert decode_text(made, ids) == text


def test_ids_follow_the_alphabet() -> None:
    assert encode_text(made, ALPHABET) == list(range(3, 3 + len(ALPHABET)))
    assert (made.pad_token_id, made.eos_token_id, made.unk_token_id, len(made)) == (0, 1, 2, 3 + len(ALPHABET))
    ends = character_tokenizer("\nab", eos="\n", pad=None)
    assert ends.get_vocab() == {"<unk>": 0, "\n": 1, "a": 2, "b": 3}
    assert (ends.pad_token_id, ends.eos_token_id) == (1, 1)


@pytest.mark.parametrize("config", [None, LlamaConfig(), Qwen2Config()], ids=["alone", "llama", "qwen2"])
def test_a_folder_gives_the_same_tokenizer(tmp_path: Path, config: LlamaConfig | None) -> None:
    if config is not None:
        config.save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "  a , b .\n\t'c 😀"
    assert encode_text(loaded, text) == encode_text(made, text)
    assert decode_text(loaded, encode_text(loaded, text)) == text
    assert (loaded.pad_token, loaded.eos_token, loaded.unk_token) == ("<pad>", "<eos>", "<unk>")
    if not isinstance(config, Qwen2Config):
        plain = AutoTokenizer.from_pretrained(tmp_path)
        assert plain(text)["input_ids"] == encode_text(made, text)
        assert plain.decode(encode_text(made, text)) == text
        assert set(plain("a")) == {"input_ids", "attention_mask"}


def test_a_character_without_a_token_is_refused() -> None:
    with pytest.raises(DataError, match="no token for 'X', 'z'"):
        encode_text(made, "a X z")
    with pytest.raises(DataError, match="half of a surrogate pair"):
        encode_text(made, "\ud83d")


@pytest.mark.parametrize("alphabet", ["aba", ["ab", "c"], ["a", ""]])
def test_an_alphabet_is_of_single_characters(alphabet: str | list[str]) -> None:
    with pytest.raises(TandemError, match="each entry is one character, once"):
        character_tokenizer(alphabet)


def test_padding_uses_a_token_there_is(tmp_path: Path) -> None:
    bare = character_tokenizer("ab")
    bare.pad_token = None
    size = len(bare)
    bare.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.pad_token_id, len(loaded)) == (loaded.eos_token_id, size)
    check_vocabulary(loaded, size)
    with pytest.raises(TandemError, match=rf"token 'b' has id {size - 1}, but the model embeds only {size - 1}"):
        check_vocabulary(loaded, size - 1)
    bare.eos_token = None
    bare.save_pretrained(tmp_path / "none")
    with pytest.raises(TandemError, match="neither a pad nor an end token"):
        load_tokenizer(tmp_path / "none")


def test_a_missing_folder_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match=r"absent: no such folder.*save_pretrained"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "weights.bin").touch()
    with pytest.raises(TandemError, match="is a file"):
        load_tokenizer(tmp_path / "weights.bin")
    with pytest.raises(TandemError, match=r"holds weights\.bin; it needs a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_plain_prompt_begins_as_the_tokenizer_says(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    assert leading_ids(made) == []
    begins = character_tokenizer("ab", unk="<s>")
    begins.bos_token = "<s>"
    begins._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <eos>", special_tokens=[("<s>", 2), ("<eos>", 1)]
    )
    assert begins("a")["input_ids"] == [2, 3, 1]
    assert leading_ids(begins) == [2]
    begins.bos_token = "a"  # another is seen, though each is asked for once
    assert leading_ids(begins) == []


def test_a_chat_template_can_be_replaced(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    chat_tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == chat_tokenizer.chat_template
    assert load_tokenizer(tmp_path, chat_template="x").chat_template == "x"


def test_examples_become_tensors() -> None:
    example = fit_example([3, 4, 70_000], [0, 1, 1], max_length=3, on_overlong=Overlong.ERROR, where="row")
    assert torch.tensor(example.input_ids).tolist() == [3, 4, 70_000]
    assert torch.tensor(example.loss_mask).bool().tolist() == [False, True, True]


def test_a_hub_that_can_not_be_reached_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreachable:
        @staticmethod
        def from_pretrained(name: str, **more: object) -> object:
            for retry in range(5):
                logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry %d/5].", retry)
            raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(transformers, "AutoTokenizer", Unreachable)
    with pytest.raises(TandemError, match="the hub gave none") as caught:
        load_tokenizer("someone/some-model")
    assert not caplog.records and "\n" not in str(caught.value)
    logging.getLogger("huggingface_hub.utils._http").warning("later")
    assert [record.message for record in caplog.records] == ["later"]
