"""A folder with everything that a generated config may name: tiny models, data of each kind, a scorer, a source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import yaml
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.models.loading import new_model, save_pretrained_atomic
from tandem.models.tokenizer import character_tokenizer

ALPHABET = "\n0123456789>+="
TEMPLATE = (
    "{% for message in messages %}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
CODE = """
from zlib import crc32

from tandem import BaseDataSource


def varied(response):
    return crc32(response.encode()) % 1000 / 1000


def in_parts(response, ground_truth):
    return {"score": varied(response), "length": float(len(response))}


def sometimes(response):
    if crc32(response.encode()) % 20 == 0:
        raise ValueError("no score for this one")
    return varied(response)


class Digits(BaseDataSource):
    def __init__(self, rows=20):
        self.rows = rows

    def get_train_dataset(self):
        return [self.row(f"{x}+", x) for x in range(self.rows)]

    def get_val_dataset(self):
        return [self.row(f"{x}>", x) for x in range(3)]

    def row(self, prompt, x):
        return {"prompt": prompt, "answer": str(x), "response": str(x), "topic": f"t{x % 2}", "id": prompt}
"""


def make_world(folder: Path) -> Path:
    """Write it; the folder."""
    for name, width in (("model", 16), ("other", 24)):
        _model(folder / name, width)
    rows = [{"prompt": f"{x}+", "answer": str(x), "topic": f"t{x % 2}", "id": f"r{x}"} for x in range(40)]
    _write(folder, "train", rows)
    _write(folder, "val", [{"prompt": f"{x}>", "answer": str(x), "topic": "t0", "id": f"v{x}"} for x in range(3)])
    _write(folder, "pairs", [{"prompt": f"{x}+", "chosen": f"{x}", "rejected": f"{x + 1}"} for x in range(40)])
    _write(folder, "held_pairs", [{"prompt": f"{x}>", "chosen": f"{x}", "rejected": f"{x + 1}"} for x in range(3)])
    _write(folder, "labelled", [{"prompt": f"{x}+", "response": f"{x}", "good": x % 2 == 0} for x in range(40)])
    _write(folder, "examples", [{"prompt": f"{x}+", "response": f"{x}"} for x in range(40)])
    _write(folder, "held_examples", [{"prompt": f"{x}>", "response": f"{x}"} for x in range(3)])
    talks = [[{"role": "user", "content": f"{x}"}, {"role": "assistant", "content": f"{x}"}] for x in range(40)]
    _write(folder, "talks", [{"messages": talk} for talk in talks])
    _write(folder, "asked", [{"prompt": talk[:1], "answer": "1"} for talk in talks])
    (folder / "code.py").write_text(CODE)
    _adapter(folder)
    return folder


def run(*words: str) -> Any:
    """A command of ``tandem`` in this process."""
    return CliRunner().invoke(app, list(words))


def _model(folder: Path, width: int) -> None:
    tokenizer = character_tokenizer(ALPHABET, eos="\n", pad=None)
    tokenizer.chat_template = TEMPLATE
    shape = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer),
    }  # fmt: skip
    save_pretrained_atomic(new_model(shape, seed=width), tokenizer, folder)


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def _adapter(folder: Path) -> None:
    tree = {
        "model": {"path": str(folder / "model"), "lora_rank": 2},
        "data": {"train_files": str(folder / "examples.jsonl"), "train_batch_size": 4, "max_length": 16},
        "trainer": {"total_steps": 1, "export": "adapter", "logger": [], "output_dir": str(folder / "adapted")},
    }
    (folder / "adapter.yaml").write_text(yaml.safe_dump(tree))
    result = run("sft", str(folder / "adapter.yaml"))
    assert result.exit_code == 0, result.output
