"""Engines of the user's own in runs: where they can live, and what they must show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem import build_actor_rollout_ref
from tandem.base.errors import ConfigError, TandemError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tests.e2e.seven import equal, train

SHORT = (
    *("trainer.total_steps=2", "trainer.exact=true", "trainer.rollouts_per_step=4", "runtime.threads=true"),
    "data.train_batch_size=4",
)
PLUGIN = "plugins=[tests.modes.own_engines]"


def test_an_engine_that_shares_nothing_takes_turns_in_colocate_and_trains_the_same(task: Path, tmp_path: Path) -> None:
    shared = train(task, f"trainer.output_dir={tmp_path / 'shared'}", *SHORT)
    name = "actor_rollout_ref.rollout.name=test_apart"
    apart = train(task, f"trainer.output_dir={tmp_path / 'apart'}", *SHORT, PLUGIN, name)
    assert (shared.session.plan.pushed, apart.session.plan.pushed) == ("nothing", "merged")
    assert apart.prompts == shared.prompts
    assert [row["reward/mean"] for row in apart.rows] == [row["reward/mean"] for row in shared.rows]
    assert equal(apart.weights, shared.weights)


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
def test_an_engine_that_does_not_show_what_it_generates_with_ends_the_run_at_the_first_push(
    task: Path, tmp_path: Path, mode: str
) -> None:
    words = ("actor_rollout_ref.rollout.name=test_silent", f"execution.mode={mode}", PLUGIN, *SHORT)
    with pytest.raises(TandemError, match="rollout-0 answered no fingerprint to weights version 0"):
        train(task, f"trainer.output_dir={tmp_path}", *words)


def test_a_loop_of_ones_own_needs_an_engine_that_shares_its_parameters(task: Path) -> None:
    config = load_words([str(task), PLUGIN, "actor_rollout_ref.rollout.name=test_apart"], Config)
    with pytest.raises(ConfigError, match="weights of its own only") as caught:
        build_actor_rollout_ref(config.actor_rollout_ref)
    assert [problem.key for problem in caught.value.problems] == ["actor_rollout_ref.rollout.name"]
