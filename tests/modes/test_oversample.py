"""More groups are begun than a step needs: in every mode it trains on as many as ever, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.seven import train

ROLLOUT = "actor_rollout_ref.rollout"
PROMPTS, SPARE, N, STEPS = 5, 3, 4, 3


@pytest.mark.parametrize(
    ("execution", "words"),
    [
        ("{mode: colocate}", ()),
        ("{mode: hybrid, max_staleness: 1, num_iters_per_train_update: 5}", (f"{ROLLOUT}.on_weight_update=abort",)),
        ("{mode: hybrid, max_staleness: 0, data_plane: {capacity_groups: 7}}", (f"{ROLLOUT}.dispatch=longest_first",)),
        ("{mode: fully_async, max_staleness: 1}", ("algorithm.filter_groups={enable: true, max_draws: 500}",)),
        ("{mode: hybrid, max_staleness: 1}", ("runtime.threads=false",)),
    ],
)
def test_a_step_trains_on_the_groups_that_are_done_first(
    task: Path, tmp_path: Path, execution: str, words: tuple[str, ...]
) -> None:
    """Answers of a model that knows nothing end at random, up to 40 tokens."""
    run = train(
        task,
        f"trainer.output_dir={tmp_path}",
        f"execution={execution}",
        f"{ROLLOUT}.oversample={SPARE}",
        f"{ROLLOUT}.n={N}",
        f"{ROLLOUT}.max_num_seqs=32",
        f"data.train_batch_size={PROMPTS}",
        "data.max_response_length=40",
        f"trainer.total_steps={STEPS}",
        *words,
    )
    assert len(run.rows) == STEPS
    for row in run.rows:
        drawn_anew = sum(count for name, count in row.items() if name.startswith("dropped/"))
        assert PROMPTS <= row["oversample/asked"] <= PROMPTS + SPARE + drawn_anew
        assert row["oversample/asked"] == PROMPTS + row["oversample/cancelled"] + drawn_anew
        assert 0 < row["oversample/length_taken"] <= 40
        assert row["lag/max"] <= 1
    assert sum(run.column("oversample/cancelled")) > 0
    samples = run.session.run.progress.samples
    assert f"trained {STEPS * PROMPTS * N}," in samples and samples.endswith("left in the queue 0")


def test_long_answers_are_taken_less_often(task: Path, tmp_path: Path) -> None:
    """Of 5 + 5 groups that run side by side, the halves that are done first are the shorter ones."""
    run = train(
        task,
        f"trainer.output_dir={tmp_path}",
        "execution={mode: colocate}",
        f"{ROLLOUT}.oversample=5",
        f"{ROLLOUT}.n={N}",
        "data.train_batch_size=5",
        "data.max_response_length=60",
        "trainer.total_steps=2",
    )
    assert run.column("oversample/cancelled") == [5.0, 5.0]
    taken, asked = run.column("oversample/length_taken"), run.column("oversample/length_asked")
    assert all(short < all_ for short, all_ in zip(taken, asked, strict=True))
