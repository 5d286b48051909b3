"""Small tokenizers and files that the data tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.models.tokenizer import character_tokenizer

PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
TURNS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

Write = Callable[[str, Sequence[Mapping[str, object]]], Path]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(PRINTABLE)


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    made = character_tokenizer(PRINTABLE)
    made.chat_template = TURNS
    return made


@pytest.fixture
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges cross words, as those of real models do."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["system user assistant: the answer is yes\n\n no\n\n" * 20], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows under a file name; the ending chooses the format."""

    def write_rows(name: str, rows: Sequence[Mapping[str, object]]) -> Path:
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write_rows
