"""A reference with weights of its own that was refreshed: what a checkpoint must hold of it."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from tandem.base.errors import ConfigError, DeadlineError
from tandem.roles.serving import ForwardModel
from tandem.session.session import ServedSession
from tests.e2e.seven import equal, prepare, train

ASYNC = "execution={mode: fully_async, max_staleness: 0, num_iters_per_train_update: 2, deadline_s: 60}"
WORDS = (
    "algorithm.kl={in: loss, coef: 0.05}",
    "actor_rollout_ref.ref.update_interval=2",
    "data.train_batch_size=4",
    "trainer.save_interval=3",
    "trainer.exact=true",
)
MODELS = {"whole": (), "adapters": ("actor_rollout_ref.model.lora_rank=4",)}


@pytest.mark.parametrize("model", MODELS)
def test_a_resume_between_two_refreshes_goes_on_as_if_nothing_had_been(task: Path, tmp_path: Path, model: str) -> None:
    words = (task, *WORDS, *MODELS[model], ASYNC)
    whole = train(*words, "trainer.total_steps=5", f"trainer.output_dir={tmp_path / 'whole'}")
    again = (*words, f"trainer.output_dir={tmp_path / 'again'}", "trainer.resume=auto")
    train(*again, "trainer.total_steps=3")
    resumed = train(*again, "trainer.total_steps=5")
    assert [row["step"] for row in resumed.rows] == [1, 2, 3, 4, 5]
    assert resumed.column("kl/mean") == whole.column("kl/mean")
    assert equal(resumed.weights, whole.weights)


def test_a_checkpoint_without_the_reference_of_its_step_is_refused_at_once(task: Path, tmp_path: Path) -> None:
    hybrid = "execution={mode: hybrid, max_staleness: 0}"
    words = (task, *WORDS, "trainer.save_interval=1", "trainer.total_steps=3", f"trainer.output_dir={tmp_path}")
    train(*words, hybrid)
    saved = f"trainer.resume={tmp_path / 'checkpoints' / 'step_00000003'}"
    with pytest.raises(ConfigError, match=r"step 3 needs the reference of step 2, and .* has none"):
        prepare(*words, ASYNC, saved)


def test_another_interval_than_that_of_the_saved_reference_is_refused(task: Path, tmp_path: Path) -> None:
    words = (task, *WORDS, ASYNC, "trainer.total_steps=3", f"trainer.output_dir={tmp_path}")
    train(*words)
    for interval, wanted in (("null", 0), ("5", 0)):
        with pytest.raises(ConfigError, match=rf"needs the reference of step {wanted}, and .* has that of step 2"):
            prepare(*words, "trainer.resume=auto", f"actor_rollout_ref.ref.update_interval={interval}")


def test_a_stall_is_blamed_on_a_reference_that_waits_for_weights(task: Path, tmp_path: Path) -> None:
    session = prepare(task, *WORDS, ASYNC, f"trainer.output_dir={tmp_path}")
    assert isinstance(session, ServedSession)
    (reference,) = (model for model in session.roles.models if model.name == "reference")
    assert "reference" not in session.samples.waits.causes(0)
    waiting = threading.Thread(target=_waits, args=(reference,), daemon=True)
    waiting.start()
    while reference.awaited is None:
        time.sleep(0.01)
    told = session.samples.waits.causes(0)
    waiting.join()
    session.run.closing.close()
    assert re.search(r"reference waits for weights version 2 or newer, it has 0", told)


def _waits(model: ForwardModel) -> None:
    with pytest.raises(DeadlineError):
        model.adopt(2, 2, 1.0)
