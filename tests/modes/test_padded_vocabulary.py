"""A model that embeds more than its tokenizer knows is sampled, scored and taught over tokens alone, in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.control.eval import run_eval
from tandem.models.loading import load_model, new_model, save_pretrained_atomic
from tandem.models.tokenizer import load_tokenizer
from tests.e2e.seven import SHAPE, make_task, train, write_rows

ROWS = 64
MODES = {
    "colocate": (),
    "hybrid": ("execution={mode: hybrid, num_iters_per_train_update: 2}",),
    "fully_async": ("execution={mode: fully_async, num_iters_per_train_update: 2}",),
}
SHORT = ("trainer.total_steps=2", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4")


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """The task with 12 tokens in 64 rows, which an untrained model likes as well, and a teacher of another shape."""
    task = make_task(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "model")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, rows, size in (("model", ROWS, 64), ("teacher", 40, 32)):
        model = new_model({**SHAPE, **ids, "vocab_size": rows, "hidden_size": size}, seed=0)
        save_pretrained_atomic(model, tokenizer, tmp_path / name)
    write_rows(tmp_path / "val.jsonl", [{"prompt": "3>", "answer": "3333"}])
    return task


@pytest.mark.parametrize("mode", MODES)
def test_only_tokens_are_sampled_and_every_role_scores_them_alike(padded: Path, mode: str) -> None:
    teacher = f"actor_rollout_ref.teacher.path={padded.parent / 'teacher'}"
    learning = ("algorithm.kl.in=loss", teacher, "algorithm.distillation={type: reverse_kl, coef: 0.1}")
    run = train(padded, *MODES[mode], *SHORT, *learning, "algorithm.old_logprobs=recompute")
    batch = run.session.run.progress.trained[0]
    responses = batch.ragged("responses").values
    assert int(responses.max()) < 12 and len(responses) > 16
    names = [name for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs") if name in batch.batch]
    assert len(names) == 3
    for name in names:  # an untrained model is near uniform: log(1/12) = -2.48 for a token, log(1/64) = -4.16 without
        assert float(batch.ragged(name).values.mean()) > -2.9
    assert float(batch.ragged("teacher_logprobs").values.mean()) > -2.9
    assert load_model(run.output / "final").get_input_embeddings().weight.shape == (ROWS, 64)


def test_evaluation_samples_tokens_only(padded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One token in 12 is right by chance, where one row in 64 would be."""
    held_out = (f"data.val_files=[{padded.parent / 'val.jsonl'}]", "evaluation={n: 64, temperature: 1.0}")
    assert run_eval(padded, held_out) == 0
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(found["eval/reward"]) > 0.05
