"""Arguments of a chat template and a template of one's own, from fine-tuning to a model that is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.runtime.build.finished import model_at_desk
from tests.e2e.seven import write_rows

TEMPLATE = """\
{% set off = enable_thinking is defined and not enable_thinking %}
{% for m in messages %}
{% if m.role == 'assistant' %}<{% if off %}--{% endif %}{{ m.content }}#{% else %}{{ m.content }}>{% endif %}
{% endfor %}
{% if add_generation_prompt %}<{% if off %}--{% endif %}{% endif %}"""
ROWS = [{"prompt": str(d), "answer": str(d), "response": str(d)} for d in range(4)]
SFT = {
    "model": {"new": {"alphabet": "#0123456789<>-", "hidden_size": 16, "num_layers": 1, "num_heads": 2}},
    "data": {"train_files": ["train.jsonl"], "chat": True, "train_batch_size": 4, "max_length": 32},
    "trainer": {"total_steps": 1, "output_dir": "sft"},
    "runtime": {"torch_threads": 1},
}
TRAIN = {
    "actor_rollout_ref": {"model": {"path": "sft/final"}, "rollout": {"n": 2}},
    "reward_manager": {"type": "keyword", "keyword": "0"},
    "data": {
        "train_files": ["train.jsonl"],
        "val_files": ["val.jsonl"],
        "chat": True,
        "drop_val_prompts": False,
        "train_batch_size": 2,
        "max_prompt_length": 16,
        "max_response_length": 4,
    },
    "evaluation": {"at_start": True},
    "trainer": {"total_steps": 1, "output_dir": "rl", "max_idle_steps": 2},
    "runtime": {"torch_threads": 1},
}


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that was tuned without thinking, by a template from a file."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / "val.jsonl", ROWS)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(SFT))
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(TRAIN))
    run("sft", "sft.yaml", "data.chat_template=own.jinja", "data.chat_template_kwargs={enable_thinking: false}")
    return tmp_path


def run(*words: str) -> str:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 or "nothing was learned" in result.output, result.output
    return result.output


def prompts(folder: Path) -> set[str]:
    """The ends of the prompts of a run."""
    lines = (folder / "rollouts.jsonl").read_text("utf-8").splitlines()
    return {str(json.loads(line)["prompt"])[1:] for line in lines}


def test_they_hold_from_fine_tuning_to_serving_and_each_may_be_changed_again(tuned: Path) -> None:
    run("train", "train.yaml")
    assert prompts(tuned / "rl") == {"><--"}
    thinking = ("--apply-chat-template-kwargs", '{"enable_thinking": true}')
    run("train", "train.yaml", *thinking, "trainer.output_dir=thinking")
    assert prompts(tuned / "thinking") == {"><"}
    assert "eval/reward" in run("eval", "rl", "data.chat_template_kwargs={enable_thinking: true}")
    argument = "data.chat_template_kwargs={enable_thinking: true}"
    for source, words, end in (("sft", [], "3><--"), ("thinking", [], "3><"), ("rl", [argument], "3><")):
        with model_at_desk(source, words) as served:
            answer: Any = asyncio.run(
                served.desk.ask({"op": "chat", "messages": [{"role": "user", "content": "3"}], "tools": None})
            )
            assert answer.details["prompt_tokens"] == len(end)


def test_what_the_template_does_not_ask_for_is_refused_before_a_model_is_loaded(tuned: Path) -> None:
    for name, words, said in (
        ("train", ("train.yaml", "data.chat_template_kwargs={enable_thinkin: false}"), "did you mean enable_thinking"),
        ("train", ("train.yaml", "data.chat=false", "data.chat_template=own.jinja"), "rows are plain text"),
        ("sft", ("sft.yaml", "data.chat_template=none.jinja"), "there is no such file"),
        ("eval", ("train.yaml", "data.chat_template=train.jsonl"), "never asks for 'messages'"),
        ("chat", ("sft", "data.chat_template_kwargs={style: terse}"), "it asks for enable_thinking"),
    ):
        result = CliRunner().invoke(app, [name, *words])
        assert result.exit_code == 2 or result.exit_code == 1
        assert said in result.output and "Traceback" not in result.output
