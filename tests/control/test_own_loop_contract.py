"""A loop of one's own: what it asks for is done, or refused with what to write instead."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import (
    ActorRolloutRef,
    DataProto,
    build_actor_rollout_ref,
    build_critic,
    build_dataloader,
    build_reward_manager,
    compute_grpo_loss,
)
from tandem.base.errors import ConfigError, ContractError
from tandem.config.load import load_words
from tandem.config.schema import Config
from tandem.plan.plan import compile_plan
from tests.e2e.seven import make_task


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("own"))


def config_of(task: Path, *words: str) -> Config:
    return load_words([str(task), *words], Config)


def built(task: Path, *words: str) -> ActorRolloutRef:
    return build_actor_rollout_ref(config_of(task, *words).actor_rollout_ref)


PROMPTS = ["1>", "2>", "3>"]


def rewards_of(samples: DataProto) -> torch.Tensor:
    return torch.randn(len(samples), generator=torch.Generator().manual_seed(0))


# --- several passes over the same samples ----------------------------------------------------------------------------


def clipped(task: Path, *words: str) -> ActorRolloutRef:
    """Steps so large that the second pass is clipped, if its ratio is to the policy that generated."""
    return built(task, "actor_rollout_ref.actor.optim.lr=0.05", *words)


def test_passes_by_hand_compare_with_the_policy_of_the_first(task: Path) -> None:
    made = clipped(task, "algorithm.old_logprobs=recompute")
    samples = made.rollout(PROMPTS)
    loss = compute_grpo_loss(samples, rewards_of(samples), made)
    fractions = [made.actor.step(loss)["loss/clipfrac"] for _ in range(3)]
    assert fractions[0] == 0 < min(fractions[1:])
    built_in = clipped(task, "actor_rollout_ref.actor.ppo_epochs=3")
    samples = built_in.rollout(PROMPTS)
    built_in.actor.step(compute_grpo_loss(samples, rewards_of(samples), built_in))
    weights = dict(built_in.actor.export())
    assert all(torch.allclose(tensor, weights[name], atol=1e-6) for name, tensor in made.actor.export())


def test_passes_whose_old_policy_nobody_kept_are_refused(task: Path) -> None:
    made = clipped(task)
    samples = made.rollout(PROMPTS)
    loss = compute_grpo_loss(samples, rewards_of(samples), made)
    made.actor.step(loss)
    with pytest.raises(ContractError, match=r"version 0, which were trained since.*ppo_epochs.*: recompute"):
        made.actor.step(loss)
    with pytest.raises(ContractError, match=r"samples are of weights version 0.*every ratio would start at 1 again"):
        compute_grpo_loss(samples, rewards_of(samples), made)


def test_mini_batches_by_hand_are_refused_once_the_weights_moved(task: Path) -> None:
    made = clipped(task)
    samples = made.rollout(PROMPTS)
    parts = [samples[start : start + 8] for start in (0, 8, 16)]
    losses = [compute_grpo_loss(part, rewards_of(part), made) for part in parts]
    made.actor.step(losses[0])
    with pytest.raises(ContractError, match="trained since"):
        made.actor.step(losses[1])
    with pytest.raises(ContractError, match="trained since"):
        compute_grpo_loss(parts[2], rewards_of(parts[2]), made)


@pytest.mark.parametrize("words", ["algorithm.old_logprobs=rollout", "algorithm.use_tis=true"])
def test_samples_that_come_late_are_told_from_the_present_policy(task: Path, words: str) -> None:
    made = clipped(task, words)
    late, samples = made.rollout(PROMPTS), made.rollout(PROMPTS)
    made.actor.step(compute_grpo_loss(samples, rewards_of(samples), made))
    loss = compute_grpo_loss(late, rewards_of(late), made)
    ratio = (loss.batch.ragged("old_logprobs").values - late.ragged("rollout_logprobs").values).abs().max()
    assert ratio == 0 if "rollout" in words else ratio > 0.1
    assert made.actor.step(loss)["optim/applied"] == 1


def test_old_logprobs_that_the_batch_brings_are_taken(task: Path) -> None:
    made = clipped(task, "algorithm.old_logprobs=recompute")
    samples = made.rollout(PROMPTS)
    first = compute_grpo_loss(samples, rewards_of(samples), made)
    made.actor.step(first)
    brought = samples.union(first.batch.select("old_logprobs"))
    second = compute_grpo_loss(brought, rewards_of(samples), made)
    assert torch.equal(second.batch.ragged("old_logprobs").values, first.batch.ragged("old_logprobs").values)
    assert made.actor.step(second)["loss/clipfrac"] > 0


def test_a_step_that_trained_nothing_makes_no_sample_late(task: Path) -> None:
    made = clipped(task)
    samples = made.rollout(PROMPTS)
    made.actor.step(compute_grpo_loss(samples, torch.zeros(len(samples)), made))  # no group has a signal
    assert made.actor.steps == 1 and made.actor.updates == 0
    assert made.actor.step(compute_grpo_loss(samples, rewards_of(samples), made))["optim/applied"] == 1


# --- keys ------------------------------------------------------------------------------------------------------------


def test_answers_that_were_cut_are_left_out_where_the_config_says_so(task: Path) -> None:
    made = built(task, "algorithm.overlong=mask")
    samples = made.rollout(PROMPTS)
    cut = samples.dense("truncated")
    assert cut.any() and not cut.all()
    batch = compute_grpo_loss(samples, rewards_of(samples), made).batch
    trained = torch.tensor([bool(row.any()) for row in batch.ragged("response_mask").rows()])
    assert torch.equal(trained, ~cut)


def test_the_reference_follows_at_its_interval(task: Path) -> None:
    words = ("algorithm.kl={in: loss, coef: 0.1}", "actor_rollout_ref.ref.update_interval=2")
    made = built(task, *words)
    seen = []
    for _ in range(3):
        samples = made.rollout(PROMPTS)
        loss = compute_grpo_loss(samples, rewards_of(samples), made)
        own = made.actor.old_logprobs(samples).ragged("old_logprobs").values
        seen.append(torch.equal(loss.batch.ragged("ref_logprobs").values, own))
        made.actor.step(loss)
    assert seen == [True, False, True]


REFUSED = {
    "execution.mode=fully_async": r"execution\.mode = 'fully_async': a loop of your own is synchronous.*Write colocate",
    "execution={mode: hybrid, max_staleness: 2}": r"execution\.mode = 'hybrid'.*Write colocate",
    "algorithm.filter_groups.enable=true": r"filter_groups\.enable = True: .*leave out groups yourself",
    "algorithm.adv_estimator=remax": r"adv_estimator = 'remax': it needs reward_baselines.*such as grpo",
    "trainer.resume=auto": r"trainer\.resume = 'auto'.*Leave it out",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_only_the_built_in_loops_do_is_refused_before_the_model_is_loaded(task: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[words]):
        built(task, words)


def test_settings_that_the_loop_does_not_read_are_told_once(task: Path) -> None:
    with pytest.warns(UserWarning, match=r"evaluation\.interval, trainer\.save_interval are not used: .* yours to do"):
        built(task, "trainer.save_interval=5", "evaluation.interval=3")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        built(task)


def test_a_loop_over_epochs_ends_with_the_steps_that_alone_were_written(
    task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 prompts, 2 batches of 4 an epoch: 5 steps are 2 epochs and a half."""
    config = config_of(task, "trainer.total_steps=5", "data.train_batch_size=4")
    loader = build_dataloader(config)
    passes = config.trainer.total_epochs
    assert passes == 3
    batches = [batch for _ in range(passes) for batch in loader]
    assert [len(batch.prompts) for batch in batches] == [4] * 5
    assert list(loader) == []
    drawn = [prompt.uid for batch in batches for prompt in batch.prompts]
    assert len(set(drawn[:10])) == 10, "what an epoch leaves over begins the next one"
    assert loader.left_over == 2
    told = "data: 10 rows, 10 kept; 2 left over in each epoch, less than a batch of 4, begin the next one"
    assert told in capsys.readouterr().out


def test_steps_end_a_loop_that_has_more_epochs(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(task, "trainer.total_steps=3", "trainer.total_epochs=9", "data.train_batch_size=5")
    loader = build_dataloader(config)
    assert config.trainer.total_epochs == 9 and loader.left_over == 0
    assert sum(1 for _ in range(9) for _ in loader) == 3
    assert capsys.readouterr().out == ""


LENGTHS = {  # 10 prompts, 2 batches of 4 an epoch; epochs joined end to end: 3 are 7 batches and a half
    "trainer.total_steps=5": 5,
    "trainer.total_steps=null trainer.total_epochs=3": 7,
    "trainer.total_steps=5 trainer.total_epochs=2": 5,
    "trainer.total_steps=9 trainer.total_epochs=3": 7,
    "trainer.total_steps=null": 2,
}


@pytest.mark.parametrize("words", LENGTHS)
def test_a_loop_over_steps_makes_those_of_the_built_in_loop(
    task: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(task, "data.train_batch_size=4", *words.split())
    planned = compile_plan(config).batch.steps
    loader = build_dataloader(config)
    assert sum(1 for _ in loader.steps()) == planned == LENGTHS[words]
    assert list(loader.steps()) == []
    assert compile_plan(config).batch.steps == planned, "the epochs that the loader names bound nothing"
    del loader
    assert "the loop ended" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"), [("trainer.total_steps=5", "2 of 5"), ("trainer={total_epochs: 3}", "2 of 6")]
)
def test_a_loop_that_ends_before_the_run_is_told_of(
    task: Path, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in build_dataloader(config_of(task, "data.train_batch_size=4", words)):
        pass
    assert f"the loop ended after {told} steps. One pass over the loader is one epoch" in capsys.readouterr().out


def test_the_epochs_of_a_loop_are_a_number_before_its_loader_is_made(task: Path) -> None:
    config = config_of(task, "trainer.total_steps=3", "data.train_batch_size=5")
    build_actor_rollout_ref(config.actor_rollout_ref)
    epochs, taken = range(config.trainer.total_epochs or 0), 0
    loader = build_dataloader(config)
    for _ in epochs:
        taken += sum(1 for _ in loader)
    assert taken == 3 and config.trainer.total_epochs == 2


def test_the_passes_of_a_run_are_a_number_where_nothing_else_bounds_it(task: Path) -> None:
    assert config_of(task, "trainer.total_steps=null").trainer.total_epochs == 1
    assert config_of(task).trainer.total_epochs is None  # total_steps says when it ends


def test_the_threads_are_those_of_the_config(task: Path) -> None:
    torch.set_num_threads(2)
    built(task)
    assert torch.get_num_threads() == 1


# --- calls -----------------------------------------------------------------------------------------------------------


def test_a_whole_config_stands_for_its_section(task: Path) -> None:
    config = config_of(task)
    assert build_actor_rollout_ref(config).seed == 0
    assert build_reward_manager(config, inline=True).components == ()
    gae = config_of(task, "algorithm.adv_estimator=gae", "critic.enable=true")
    assert build_critic(gae).steps == 0


@pytest.mark.parametrize("temperature", [0, 0.0])
def test_a_rollout_at_temperature_0_is_greedy(task: Path, temperature: float) -> None:
    made = built(task)
    rows = [row.tolist() for row in made.rollout(PROMPTS, temperature=temperature).ragged("responses").rows()]
    assert all(row == rows[i // 8 * 8] for i, row in enumerate(rows))


@pytest.mark.parametrize("top_p", [0, 1.5, "0.9", float("nan"), True])
def test_a_nucleus_without_tokens_is_refused(task: Path, top_p: Any) -> None:
    with pytest.raises(ContractError, match=r"rollout top_p = .*write above 0 and at most 1"):
        built(task).rollout(PROMPTS, top_p=top_p)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), "1.0", True])
def test_a_temperature_without_a_distribution_is_refused(task: Path, temperature: Any) -> None:
    with pytest.raises(ContractError, match=r"rollout temperature = .*write above 0, or 0 for greedy answers"):
        built(task).rollout(PROMPTS, temperature=temperature)


def test_a_batch_gives_its_columns_by_name(task: Path) -> None:
    samples = built(task).rollout(PROMPTS)
    assert samples["responses"] is samples.batch["responses"]
    assert samples["prompt_text"] == samples.non_tensor_batch["prompt_text"]
    with pytest.raises(ContractError, match="column 'answers' is not in this batch; it has"):
        samples["answers"]


def test_what_is_no_such_part_is_named(task: Path) -> None:
    made, config = built(task), config_of(task)
    samples = made.rollout(PROMPTS)
    rewards: Any = rewards_of(samples)
    loss = compute_grpo_loss(samples, rewards, made)
    wrong: list[tuple[Any, str]] = [
        (lambda: build_actor_rollout_ref(str(task)), "give config.actor_rollout_ref of a config from load_config.*str"),  # type: ignore[arg-type]
        (lambda: build_critic(None), "give config.critic of a config"),  # type: ignore[arg-type]
        (lambda: build_reward_manager(config.data), "takes config.reward_manager, got DataConfig"),  # type: ignore[arg-type]
        (lambda: build_dataloader(config.data), "takes the whole config of a run, got DataConfig"),  # type: ignore[arg-type]
        (lambda: compute_grpo_loss(samples, rewards, config), "actor_rollout_ref is a Config"),  # type: ignore[arg-type]
        (lambda: compute_grpo_loss(samples[0], rewards, made), "rollout_outputs is a DataProtoItem"),  # type: ignore[arg-type]
        (lambda: compute_grpo_loss(samples, None, made), "rewards can't be read as numbers"),  # type: ignore[arg-type]
        (lambda: compute_grpo_loss(samples, ["1"] * len(samples), made), "rewards can't be read as numbers"),  # type: ignore[arg-type]
        (lambda: made.actor.step(samples), "takes the Loss that compute_grpo_loss gives, got DataProto"),  # type: ignore[arg-type]
    ]
    for call, told in wrong:
        with pytest.raises(ContractError, match=told):
            call()
    with pytest.raises(AttributeError, match=r"a Loss has no 'backward': .*give it to actor\.step"):
        loss.backward()
