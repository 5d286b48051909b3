"""Code that a model's folder ships is run exactly where the config says so; nobody is asked."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tandem.base.errors import TandemError
from tandem.models.tokenizer import character_tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2] / "tandem"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of a class of its own, whose module leaves a trace when it is run."""
    character_tokenizer("ab\n", eos="\n").save_pretrained(tmp_path)
    declared = json.loads((tmp_path / "tokenizer_config.json").read_text())
    declared |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    (tmp_path / "own.py").write_text(
        "import pathlib\nfrom transformers import PreTrainedTokenizerFast\n"
        f"pathlib.Path({str(tmp_path / 'run')!r}).touch()\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    return tmp_path


class NobodyIsThere(io.StringIO):
    def readline(self, *_: object) -> str:
        pytest.fail("asked on stdin")


@pytest.mark.parametrize("trusted", [False, True])
def test_a_tokenizer_with_code_of_its_own(folder: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", NobodyIsThere("y\n"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    if trusted:
        found = load_tokenizer(folder, trust_remote_code=True)
        assert isinstance(found, PreTrainedTokenizerFast) and found("ab")["input_ids"]
    else:
        with pytest.raises(TandemError, match="trust_remote_code"):
            load_tokenizer(folder)
    assert (folder / "run").exists() == trusted


def test_every_load_of_something_that_may_ship_code_says_whether_it_is_run() -> None:
    """transformers asks on standard input where an ``Auto`` class isn't told."""
    silent = []
    for file in ROOT.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner = ast.unparse(call.func.value).rpartition(".")[2]
            if call.func.attr != "from_pretrained" or not (owner.startswith("Auto") or owner == "auto"):
                continue
            if "trust_remote_code" not in {keyword.arg for keyword in call.keywords}:
                silent.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert silent == []
