"""A stand-in for the pretrained model that the examples name."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a token per character and a chat template, as a Hugging Face folder."""
    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = TEMPLATE
    shape = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_pretrained_atomic(new_model(shape, seed=0), tokenizer, folder)
    return folder


@pytest.fixture(autouse=True)
def project_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples name their files as seen from the project's folder."""
    monkeypatch.chdir(ROOT)
