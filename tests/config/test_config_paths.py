"""Paths mean the same wherever they are written."""

from __future__ import annotations

import pytest

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
