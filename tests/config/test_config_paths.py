"""Paths mean the same wherever they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError
from tandem.config.load import load_words
from tandem.config.schema import Config


def test_a_leading_tilde_is_the_home_of_the_user_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    tree = {
        "actor_rollout_ref": {"model": {"path": "~/model", "tokenizer_path": "~/tok", "adapter_path": "~/lora"}},
        "data": {"train_files": "~/train.jsonl", "val_files": ["~/a.jsonl", "b~.jsonl"]},
        "reward_manager": {"type": "mine", "file": "~/mine.py"},
        "trainer": {"output_dir": "~/runs/x", "resume": "~/runs/x/step"},
    }
    config = Config.model_validate(tree)
    model = config.actor_rollout_ref.model
    assert (model.path, model.tokenizer, model.adapter_path) == (
        "/home/someone/model",
        "/home/someone/tok",
        "/home/someone/lora",
    )
    assert config.data.train_files == ["/home/someone/train.jsonl"]
    assert config.data.val_files == ["/home/someone/a.jsonl", "b~.jsonl"]
    assert config.reward_manager.file == "/home/someone/mine.py"
    assert (config.trainer.output_dir, config.trainer.resume) == ("/home/someone/runs/x", "/home/someone/runs/x/step")
    source = Config.model_validate({**tree, "data": {"source": {"file": "~/rows.py", "type": "Rows"}}}).data.source
    assert source is not None and source.file == "/home/someone/rows.py"


KEYS = [
    "actor_rollout_ref.model.path",
    "data.train_files",
    "trainer.output_dir",
    "reward_manager.file",
    "trainer.resume",
]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ('"a\\0b"', "it holds a null byte"),
        ("x" * 300, "a name in it has more than 255 bytes"),
        ("数" * 100, "a name in it has more than 255 bytes"),
        ("~nobody-here/x", "there is no user 'nobody-here' whose home"),
        ("loop", "a link that leads back to itself"),
        ("'runs/x '", "begins or ends with white space, and nothing is called so"),
        ('"x\\n"', "begins or ends with white space"),
    ],
    ids=["null byte", "long", "long in UTF-8", "no user", "loop", "blank", "line"],
)
@pytest.mark.parametrize("key", KEYS)
def test_what_no_file_can_be_called_is_refused_in_every_path(
    key: str, path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    given = [] if key.startswith("actor") else ["actor_rollout_ref.model.path=m"]
    with pytest.raises(ConfigError) as caught:
        load_words([*given, f"{key}={path}"], Config)
    (problem,) = caught.value.problems
    assert problem.key == key and reason in problem.reason and problem.remedy == "Write the path of a file or folder"


def test_a_path_in_another_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        load_words(["actor_rollout_ref.model.path=m", "trainer.output_dir=\udcff"], Config)


@pytest.mark.parametrize("path", ["ünï cödé/数据 x", "a: b", "a #b", "./x/../y", "~/x y"])
def test_spaces_and_other_letters_are_part_of_a_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_words(["actor_rollout_ref.model.path=m", f"trainer.output_dir={path}"], Config)
    assert config.trainer.output_dir == path.replace("~", "/home/someone")
