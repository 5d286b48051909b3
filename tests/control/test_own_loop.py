"""The public API: a training loop of the user's own, and a trainer of their own."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem import (
    BaseDataSource,
    BaseTrainer,
    DataProto,
    build_actor_rollout_ref,
    build_critic,
    build_dataloader,
    build_reward_manager,
    compute_grpo_loss,
    get_lora_model,
    load_config,
    load_model,
)
from tandem.base.errors import ConfigError, ContractError, DataError, TandemError
from tandem.config.load import load_words
from tandem.config.model import CriticConfig, ModelConfig
from tandem.config.schema import Config, SftConfig
from tandem.models.tokenizer import load_tokenizer
from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.e2e.seven import equal, make_task, train


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("own"))


def test_a_loop_of_ten_lines_learns(task: Path) -> None:
    config = load_config(task, ["data.train_batch_size=5"])
    assert isinstance(config, Config)
    actor_rollout_ref = build_actor_rollout_ref(config.actor_rollout_ref)
    reward_manager = build_reward_manager(config.reward_manager, inline=True)
    critic = build_critic(config.critic) if config.critic.enable else None
    dataloader = build_dataloader(config)
    curve = []
    for _ in range(20):
        for batch in dataloader:
            rollout_outputs = actor_rollout_ref.rollout(batch.prompts)
            rewards = reward_manager(rollout_outputs)
            loss = compute_grpo_loss(
                rollout_outputs=rollout_outputs, rewards=rewards, actor_rollout_ref=actor_rollout_ref, critic=critic
            )
            actor_rollout_ref.actor.step(loss)
            curve.append(float(rewards.mean()))
    assert mean(curve[-5:]) >= mean(curve[:5]) + 0.2
    assert actor_rollout_ref.actor.steps == len(curve) == 40
    assert actor_rollout_ref.engine.version == 39  # the last one that was generated with


class DigitRewardManager:
    """As a user writes it: items have a tokenizer and unpadded rows."""

    def __call__(self, data: DataProto) -> torch.Tensor:
        rewards = torch.zeros(len(data), dtype=torch.float32)
        for i, item in enumerate(data):
            text = item.tokenizer.decode(item.batch["responses"])
            assert len(item.batch["prompts"]) == 2
            rewards[i] = text.count(item.non_tensor_batch["ground_truth"][0]) / 4
        return rewards


def test_every_part_of_the_algorithm_works_in_a_loop_of_ones_own(task: Path) -> None:
    words = (
        "algorithm.kl.in=reward", "algorithm.kl.coef=0.01", "algorithm.use_tis=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=5", "data.train_batch_size=10",
    )  # fmt: skip
    config = load_words([str(task), *words], Config)
    made, manager = build_actor_rollout_ref(config.actor_rollout_ref), DigitRewardManager()
    (batch,) = build_dataloader(config)
    for step in range(2):
        outputs = made.rollout(batch.prompts)
        assert set(outputs.ragged("token_versions").values.tolist()) == {step}
        rewards = manager(outputs)
        rewards[0] = float("nan")  # one that could not be scored
        loss = compute_grpo_loss(outputs, rewards, made)
        assert {"ref_logprobs", "old_logprobs", "tis_weights", "advantages"} <= set(loss.batch.columns)
        assert not loss.batch.ragged("response_mask")[0].any()
        metrics = made.actor.step(loss)
        assert metrics["optim/applied"] == 2
    assert outputs.dense("group_ids").tolist() == [i for i in range(10) for _ in range(8)]


def test_rollouts_never_repeat_their_streams_and_follow_the_weights(task: Path) -> None:
    config = load_words([str(task), "actor_rollout_ref.rollout.n=2"], Config)
    made = build_actor_rollout_ref(config.actor_rollout_ref)

    def answers(outputs: DataProto) -> list[list[int]]:
        return [row.tolist() for row in outputs.ragged("responses")]

    prompts = ["1>", "2>", "3>"]
    first, second = made.rollout(prompts), made.rollout(prompts)
    assert answers(first) != answers(second)
    again = build_actor_rollout_ref(config.actor_rollout_ref)
    assert answers(again.rollout(prompts)) == answers(first)
    greedy_like = made.rollout(prompts, temperature=1e-3)
    rows = answers(greedy_like)
    assert rows[0::2] == rows[1::2]  # no randomness is left
    with pytest.raises(ContractError, match="prompt 1 is 3"):
        made.rollout(["1>", 3])
    for shape in ((5,), (6, 1), ()):
        with pytest.raises(ContractError, match=r"give one number per sample, shape \(6,\)"):
            compute_grpo_loss(first, torch.ones(shape), made)


def test_the_loop_of_ones_own_is_the_built_in_one(task: Path, tmp_path: Path) -> None:
    """Same prompts and weights of step 0: the same gradient, whatever the random streams are called."""
    run = train(task, f"trainer.output_dir={tmp_path}", "data.train_batch_size=4", "trainer.total_steps=1")
    config = load_words([str(task), "data.train_batch_size=4"], Config)
    made = build_actor_rollout_ref(config.actor_rollout_ref)
    assert run.session.progress.trained is not None
    batch, update = run.session.progress.trained
    samples = batch.select(*[name for name in batch.columns if name not in ("advantages", "returns", "token_rewards")])
    metrics = made.actor.step(compute_grpo_loss(samples, batch.dense("rewards"), made))
    assert metrics["grad/norm"] == update["grad/norm"]
    assert equal(dict(made.actor.export()), run.weights)


PPO = ("algorithm.adv_estimator={type: gae, lam: 0.95}", "critic.enable=true", "critic.optim.lr=3.0e-3")


def test_a_critic_is_trained_by_the_loop_as_it_stands(task: Path) -> None:
    config = load_words([str(task), *PPO, "data.train_batch_size=5"], Config)
    made, manager = build_actor_rollout_ref(config.actor_rollout_ref), DigitRewardManager()
    critic = build_critic(config.critic) if config.critic.enable else None
    assert critic is not None
    curve = []
    for _ in range(16):
        for batch in build_dataloader(config):
            outputs = made.rollout(batch.prompts)
            rewards = manager(outputs)
            metrics = made.actor.step(compute_grpo_loss(outputs, rewards, made, critic=critic))
            curve.append(float(rewards.mean()))
    assert mean(curve[-5:]) >= mean(curve[:5]) + 0.15
    assert critic.steps == critic.updates == made.actor.updates == 32
    assert metrics["value/applied"] == metrics["optim/applied"] == 1


def test_a_critic_may_be_driven_by_hand(task: Path, tmp_path: Path) -> None:
    """Values before, its step where one likes: the same training as that of the built-in loop."""
    words = [str(task), *PPO, "data.train_batch_size=4", "critic.warmup_steps=1"]
    run = train(*words, f"trainer.output_dir={tmp_path}", "trainer.total_steps=2")
    config = load_words(words, Config)
    made, critic = build_actor_rollout_ref(config.actor_rollout_ref), build_critic(config.critic)
    assert run.session.progress.trained is not None and run.session.composite.critic is not None
    batch, _ = run.session.progress.trained
    with pytest.raises(ContractError, match=r"critic=build_critic\(config\.critic\)"):
        computed = ("values", "advantages", "returns", "token_rewards")
        samples = batch.select(*(name for name in batch.columns if name not in computed))
        compute_grpo_loss(samples, batch.dense("rewards"), made)
    valued = critic.values(samples)
    assert not valued.ragged("values").values.any()  # a new head
    loss = compute_grpo_loss(valued, batch.dense("rewards"), made)
    assert loss.critic is None
    assert critic.step(loss.batch)["value/applied"] == 1
    assert "loss/policy" not in made.actor.step(loss) and "loss/policy" in made.actor.step(loss)  # after the warm-up
    assert critic.values(samples).ragged("values").values.any()


def test_a_critic_of_a_section_made_by_hand(task: Path) -> None:
    critic = build_critic(CriticConfig(enable=True, model=ModelConfig(path=str(task.parent / "model"))))
    assert critic.steps == 0
    with pytest.raises(ConfigError, match=r"critic\.model.*belongs to no config"):
        build_critic(CriticConfig(enable=True))


def test_what_cannot_work_is_refused_when_it_is_built(task: Path) -> None:
    config = load_words([str(task), "actor_rollout_ref.rollout.temperature=0"], Config)
    with pytest.raises(ConfigError, match="temperature"):
        build_actor_rollout_ref(config.actor_rollout_ref)
    with pytest.raises(ConfigError, match="nothing reads its values"):
        build_critic(load_words([str(task), "critic.enable=true"], Config).critic)
    with pytest.raises(ConfigError, match="no critic to build"):
        build_critic(config.critic)
    with pytest.raises(DataError, match="10 usable rows give no batch of 16"):
        build_dataloader(load_words([str(task)], Config))


# --- fine-tuning -----------------------------------------------------------------------------------------------------


class Rows(BaseDataSource):
    """Rows of text."""

    def get_train_dataset(self) -> Any:
        return [{"prompt": f"{d}>", "response": str(d) * 4} for d in range(10)]


class OwnTrainer(BaseTrainer):
    """As a user writes it."""

    def __init__(self, config: SftConfig, model: Any, tokenizer: Any) -> None:
        super().__init__(config)
        self.model = get_lora_model(model, config.model.lora_rank)
        self.tokenizer = tokenizer
        self.seen: list[int] = []

    def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(len(batch["input_ids"]))
        outputs = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
        loss: torch.Tensor = outputs.loss
        return loss


def sft_config(task: Path, tmp_path: Path, **changes: Any) -> SftConfig:
    tree = {
        "model": {"path": str(task.parent / "model"), **changes.pop("model", {})},
        "data": {"train_files": [str(task.parent / "train.jsonl")], "train_batch_size": 10, "max_length": 16},
        "optim": {"lr": 3e-3, **changes.pop("optim", {})},
        "trainer": {"total_steps": 30, "output_dir": str(tmp_path), "logger": [], **changes.pop("trainer", {})},
    }
    return SftConfig.model_validate(tree)


def test_a_trainer_of_ones_own_learns_logs_and_saves(task: Path, tmp_path: Path) -> None:
    config = sft_config(task, tmp_path)
    trainer = OwnTrainer(config, load_model(config.model.path), load_tokenizer(config.model.path))
    final = trainer.fit(Rows())
    assert trainer.seen == [10] * 30
    rows = read_rows(tmp_path / METRICS_FILE)
    losses = [float(str(row["loss/sft"])) for row in rows]
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert losses[-1] < losses[0] / 2
    saved = AutoModelForCausalLM.from_pretrained(final)
    assert equal(saved.state_dict(), trainer.model.state_dict())
    assert (tmp_path / "report.html").is_file()


def test_adapters_are_merged_into_what_is_saved(task: Path, tmp_path: Path) -> None:
    config = sft_config(task, tmp_path, model={"lora_rank": 4}, trainer={"total_steps": 3})
    trainer = OwnTrainer(config, load_model(config.model.path), load_tokenizer(config.model.path))
    saved = AutoModelForCausalLM.from_pretrained(trainer.fit(Rows()))
    ids = torch.tensor([[3, 12]])
    with torch.no_grad():
        assert torch.allclose(saved(ids).logits, trainer.model(ids).logits, atol=1e-4)
    assert all("lora" not in name for name in saved.state_dict())


def test_a_trainer_without_its_model_says_so(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"BaseTrainer: set self\.model and self\.tokenizer"):
        BaseTrainer(sft_config(task, tmp_path)).fit(Rows())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_no_weight(task: Path, tmp_path: Path, poison: float) -> None:
    class Poisoned(OwnTrainer):
        def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().compute_loss(batch) * (poison if len(self.seen) == 2 else 1.0)

    config = sft_config(task, tmp_path, trainer={"total_steps": 3})
    trainer = Poisoned(config, load_model(config.model.path), load_tokenizer(config.model.path))
    trainer.fit(Rows())
    rows = read_rows(tmp_path / METRICS_FILE)
    assert [row["updates"] for row in rows] == [1, 1, 2]
    assert all(bool(tensor.isfinite().all()) for tensor in trainer.model.state_dict().values())


@pytest.mark.parametrize(("key", "value"), [("resume", "auto"), ("save_interval", 5)])
def test_settings_that_a_trainer_of_ones_own_would_ignore_are_refused(
    task: Path, tmp_path: Path, key: str, value: Any
) -> None:
    config = sft_config(task, tmp_path, trainer={key: value})
    trainer = OwnTrainer(config, load_model(config.model.path), load_tokenizer(config.model.path))
    with pytest.raises(ConfigError, match=rf"trainer\.{key} = {value!r}: a trainer of your own runs from start to end"):
        trainer.fit(Rows())


def test_a_run_that_changed_no_weight_is_no_success(task: Path, tmp_path: Path) -> None:
    class Broken(OwnTrainer):
        def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().compute_loss(batch) * float("nan")

    config = sft_config(task, tmp_path, trainer={"total_steps": 2})
    trainer = Broken(config, load_model(config.model.path), load_tokenizer(config.model.path))
    with pytest.raises(TandemError, match="not one optimizer step was applied in 2 steps"):
        trainer.fit(Rows())


def test_weight_decay_leaves_norms_alone(task: Path, tmp_path: Path) -> None:
    class Still(OwnTrainer):
        def compute_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return 1e-12 * super().compute_loss(batch)

    optim = {"lr": 0.1, "weight_decay": 0.5, "eps": 1.0}
    config = sft_config(task, tmp_path, optim=optim, trainer={"total_steps": 1})
    before = load_model(config.model.path)
    trainer = Still(config, load_model(config.model.path), load_tokenizer(config.model.path))
    trainer.fit(Rows())
    for (name, old), new in zip(before.named_parameters(), trainer.model.parameters(), strict=True):
        factor = 1.0 if "norm" in name else 0.95
        assert torch.allclose(new, factor * old, atol=1e-6), name


def test_rows_that_lose_all_labels_are_dropped_before_and_counted(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Long(BaseDataSource):
        def get_train_dataset(self) -> Any:
            kept, lost = {"prompt": "1>", "response": "11"}, {"prompt": "1>" * 9, "response": "11"}
            return [kept, lost] * 5

    config = sft_config(task, tmp_path)
    config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"on_overlong": "right", "train_batch_size": 2}),
            "trainer": config.trainer.model_copy(update={"total_steps": None, "total_epochs": 1}),
        }
    )
    trainer = OwnTrainer(config, load_model(config.model.path), load_tokenizer(config.model.path))
    trainer.fit(Long())
    assert trainer.seen == [2, 2]
    losses = [row["loss/sft"] for row in read_rows(tmp_path / METRICS_FILE)]
    assert all(isinstance(loss, float) and loss == loss for loss in losses)
    told = "data: 10 rows, 5 kept, 5 dropped (nothing to learn); 1 left over at the end, less than a batch of 2"
    assert told in capsys.readouterr().out


def test_a_trainer_of_ones_own_reads_the_columns_of_the_config(task: Path, tmp_path: Path) -> None:
    class Named(BaseDataSource):
        def get_train_dataset(self) -> Any:
            return [{"question": "1>", "answer": "11"}] * 10

    config = sft_config(task, tmp_path, trainer={"total_steps": 1})
    columns = {"prompt_key": "question", "response_key": "answer"}
    config = config.model_copy(update={"data": config.data.model_copy(update=columns)})
    trainer = OwnTrainer(config, load_model(config.model.path), load_tokenizer(config.model.path))
    trainer.fit(Named())
    assert trainer.seen == [10]


@pytest.mark.parametrize(
    ("section", "change", "told"),
    [
        ("data", {"max_token_len_per_gpu": 100}, r"data\.max_token_len_per_gpu = 100: a trainer of your own pads"),
        ("trainer", {"export": "adapter"}, r"trainer\.export = 'adapter': a trainer of your own leaves a model"),
    ],
)
def test_what_a_trainer_of_ones_own_does_otherwise_is_refused(
    task: Path, tmp_path: Path, section: str, change: dict[str, Any], told: str
) -> None:
    config = sft_config(task, tmp_path)
    config = config.model_copy(update={section: getattr(config, section).model_copy(update=change)})
    trainer = OwnTrainer(config, load_model(config.model.path), load_tokenizer(config.model.path))
    with pytest.raises(ConfigError, match=told):
        trainer.fit(Rows())


def test_rows_that_are_no_examples_are_named(task: Path, tmp_path: Path) -> None:
    class Empty(BaseDataSource):
        def get_train_dataset(self) -> Any:
            return [{"prompt": "1>", "response": "1"}, {"prompt": "2>"}]

    config = sft_config(task, tmp_path)
    trainer = OwnTrainer(config, load_model(config.model.path), load_tokenizer(config.model.path))
    with pytest.raises(DataError, match="row 2"):
        trainer.fit(Empty())
