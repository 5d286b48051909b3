"""Fine-tuning on a mix: planned, counted, held-out loss, resumed bit by bit, and told when nothing is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tandem.cli.app import app
from tandem.config.load import load_words
from tandem.config.schema import SftConfig
from tandem.observe.metrics import METRICS_FILE, read_rows
from tandem.plan.sft import compile_sft_plan
from tests.e2e.seven import equal, write_rows

TIMES = ("time/", "cpu/", "throughput/", "system/")
TEMPLATE = "{% for m in messages %}{{ '>' if m['role'] == 'user' else '' }}{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def mixed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run on digits (two thirds) and on pairs of digits in other columns (one third)."""
    place = tmp_path_factory.mktemp("mix")
    rows = [{"prompt": f"{d}>", "response": str(d) * 4} for d in range(10)]
    write_rows(place / "digits.jsonl", rows[:8])
    write_rows(place / "pairs.jsonl", [{"q": f"{d}{d}>", "a": str(d) * 2} for d in range(10)])
    write_rows(place / "val.jsonl", rows[:2])
    tree = {
        "model": {"path": str(task.parent / "model")},
        "data": {
            "mix": [
                {"files": str(place / "digits.jsonl"), "weight": 2.0},
                {"files": [str(place / "pairs.jsonl")], "prompt_key": "q", "response_key": "a", "name": "two"},
            ],
            "val_files": [str(place / "val.jsonl")],
            "train_batch_size": 6,
            "max_length": 16,
        },
        "optim": {"lr": 3.0e-3, "schedule": "linear"},
        "evaluation": {"interval": 4},
        "trainer": {"total_steps": 12, "logger": [], "output_dir": str(place / "run"), "save_interval": 4},
        "runtime": {"torch_threads": 1},
    }
    (place / "sft.yaml").write_text(yaml.safe_dump(tree))
    return place / "sft.yaml"


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["sft", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def lines(folder: Path, *, without: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    rows = read_rows(folder / METRICS_FILE)
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMES)}
        for row in rows
        if row["step"] not in without
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()
    return found


def test_the_plan_tells_the_shares(mixed: Path) -> None:
    plan = compile_sft_plan(load_words([str(mixed)], SftConfig))
    assert plan.problems == ()
    assert [(part.name, round(part.share, 3), part.rows) for part in plan.mix] == [
        ("digits", 0.667, 8),
        ("two", 0.333, 10),
    ]
    assert (plan.rows, plan.updates) == (18, 12)
    shown = CliRunner().invoke(app, ["plan", str(mixed)]).output
    assert "67% of the mix" in shown and "33% of the mix" in shown


def test_a_resumed_run_is_bit_equal_to_one_never_interrupted(mixed: Path, tmp_path: Path) -> None:
    saving = ("trainer.save_interval=5", "trainer.keep_checkpoints=9")
    run(mixed, *saving, f"trainer.output_dir={tmp_path / 'whole'}")
    # a run that is killed after step 5 leaves the checkpoint of step 5 and lines beyond it
    run(mixed, *saving, f"trainer.output_dir={tmp_path / 'parts'}")
    for folder in (tmp_path / "parts" / "checkpoints").iterdir():
        if folder.name != "step_00000005":
            folder.rename(tmp_path / folder.name)
    told = run(mixed, *saving, f"trainer.output_dir={tmp_path / 'parts'}", "trainer.resume=auto")
    assert "resumed after step 5; 7 steps left" in told
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_each_step_has_its_share_and_the_held_out_loss_falls(mixed: Path, tmp_path: Path) -> None:
    run(mixed, f"trainer.output_dir={tmp_path}", "trainer.save_interval=0")
    rows = lines(tmp_path)
    assert [(row["data/digits"], row["data/two"]) for row in rows] == [(4.0 * k, 2.0 * k) for k in range(1, 13)]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(losses) == 3 and losses[-1] < losses[0]
    model, tokenizer = (kind.from_pretrained(tmp_path / "final") for kind in (AutoModelForCausalLM, AutoTokenizer))
    nll = 0.0
    for digit in (0, 1):
        ids = tokenizer(f"{digit}>{str(digit) * 4}\n", return_tensors="pt", add_special_tokens=False)["input_ids"]
        logprobs = model(ids).logits.detach().log_softmax(-1)[0, 1:-1]
        nll -= float(logprobs.gather(1, ids[0, 2:, None]).sum())
    assert losses[-1] == pytest.approx(nll / 10, rel=1e-4)


def test_a_finished_run_is_told_that_nothing_is_left(mixed: Path, tmp_path: Path) -> None:
    finished = tmp_path / "run"
    output = f"trainer.output_dir={finished}"
    easy = ("evaluation.stop_at_accuracy=0.01", "data.train_batch_size=12", "data.mix=[]", "evaluation.interval=4")
    rows = [{"prompt": f"{d}>", "response": str(d)} for d in range(3)]
    files = (
        f"data.train_files=[{write_rows(tmp_path / 'one.jsonl', rows * 4)}]",
        f"data.val_files=[{write_rows(tmp_path / 'val.jsonl', rows)}]",
        "trainer.total_steps=24",
        "trainer.save_interval=24",
    )
    run(mixed, output, *easy, *files)
    stopped = read_rows(finished / METRICS_FILE)[-1]["step"]
    assert int(str(stopped)) < 24
    before = weights(finished)
    told = run(mixed, output, *easy, *files, "trainer.resume=auto")
    assert f"nothing is left to do: the accuracy of 0.01 that was asked for was reached at step {stopped}" in told
    assert equal(before, weights(finished))
    further = run(mixed, output, *easy[1:], *files, "trainer.resume=auto")
    assert f"resumed after step {stopped}" in further
    done = run(mixed, output, *easy[1:], *files, "trainer.resume=auto")
    assert "nothing is left to do: all 24 steps are done; raise trainer.total_steps" in done


def test_adapters_are_tuned_on_a_mix_too(mixed: Path, tmp_path: Path) -> None:
    run(mixed, f"trainer.output_dir={tmp_path}", "model.lora_rank=4", "optim.lr=0.01", "trainer.save_interval=0")
    losses = [row["eval/loss"] for row in lines(tmp_path) if "eval/loss" in row]
    assert losses[-1] < losses[0]


def test_held_out_conversations_have_a_loss_and_no_accuracy(mixed: Path, task: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task.parent / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    talk = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "77"}]
    talks = write_rows(tmp_path / "talks.jsonl", [{"messages": talk}] * 6)
    other = write_rows(tmp_path / "other.jsonl", [{"messages": [{**talk[0], "content": "8"}, talk[1]]}])
    run(
        mixed, f"trainer.output_dir={tmp_path / 'run'}", f"model.tokenizer_path={tmp_path / 'tokenizer'}",
        f"data.train_files=[{talks}]", "data.mix=[]", "data.messages_key=messages", f"data.val_files=[{other}]",
        "trainer.save_interval=0",
    )  # fmt: skip
    evaluated = [row for row in lines(tmp_path / "run") if "eval/loss" in row]
    assert len(evaluated) == 3 and not any("eval/accuracy" in row for row in evaluated)
