"""Every key is read, or it is refused or noted: the table against what runs really read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from tandem.base.errors import ConfigError, Problem
from tandem.config.load import load_words
from tandem.config.schema import Config, SftConfig
from tandem.config.suggest import MODES
from tandem.config.tree import keys_of, paths_of
from tandem.control.entry import run_train
from tandem.plan.parts.entries import look_up
from tandem.plan.plan import Plan, compile_plan
from tandem.plan.reads.train import READS, Setting
from tandem.plan.sft import SftPlan, check_own_trainer
from tandem.runtime.build.composite import build_actor_rollout_ref
from tests.e2e.conftest import task
from tests.e2e.seven import write_rows
from tests.plan.reading import watched

__all__ = ["task"]

Plans = Callable[..., Plan]
Problems = Callable[..., list[Problem]]
SftPlans = Callable[..., SftPlan]

EPISODES = Path(__file__).parents[1] / "episodes"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
OPTIM = "actor_rollout_ref.actor.optim"
CORRECTION = "algorithm.rollout_correction"
LOSS = "algorithm.policy_loss"

BY_THE_PLAN = {
    "actor_rollout_ref.actor.strategy": "another one is refused",
    "actor_rollout_ref.actor.tensor_model_parallel_size": "on one device another one is refused",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "on one device another one is refused",
    "actor_rollout_ref.hybrid_engine": "a contradiction with the mode is refused",
    f"{ROLLOUT}.do_sample": "false is refused",
    "runtime.name": "it becomes plan.runtime",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "it becomes plan.batch.mini_batch_prompts",
    "actor_rollout_ref.actor.global_batch_size": "it becomes plan.batch.mini_batch_prompts",
    "algorithm.old_logprobs": "it becomes plan.old_logprobs",
    "execution.max_staleness": "it becomes plan.flow.staleness",
    "execution.num_iters_per_train_update": "it becomes plan.flow.sub_batches",
    "execution.train_pipelining": "it becomes plan.flow.pipelining",
    "execution.balance_data": "it becomes plan.flow.balance",
    "execution.weight_sync.lora": "it becomes plan.pushed",
    "execution.weight_sync.transport": "it becomes plan.transport",
    f"{ROLLOUT}.on_weight_update": "it becomes plan.flow.on_weight_update",
    "critic.enable": "it becomes plan.critic",
    "critic.ppo_epochs": "it becomes plan.critic.epochs",
    "critic.ppo_max_token_len_per_gpu": "it becomes plan.critic.max_tokens",
    "critic.warmup_steps": "it becomes plan.batch.untrained_steps",
    "execution.resource": "it becomes plan.placements",
    "plugins": "they are imported",
    "critic.model.adapter_path": "it is refused",
    f"{ROLLOUT}.strict": "it says what is refused",
    f"{ROLLOUT}.dispatch": "it becomes plan.longest_first",
    "critic.model.freeze": "it is refused",
    "data.image_key": "it is refused where the model sees no images",
    "data.image_max_pixels": "it is refused where the model sees no images",
    "data.image_max_bytes": "it is refused where the model sees no images",
}
"""Keys that do their work before anything starts."""

SWITCHES = {f"{CORRECTION}.{name}" for name in ("weights", "reject", "veto")} | {"algorithm.kl.in"}
"""Where they are off, the plan has no stage that would look at them."""

ELSEWHERE = {
    "actor_rollout_ref.ref.fsdp_config",
    "execution.data_plane.num_data_storage_units",
    *(
        f"{ROLLOUT}.{name}"
        for name in ("enable_chunked_prefill", "gpu_memory_utilization", "tensor_model_parallel_size")
    ),
}
"""Read on Ray, or by other engines."""

AT_AN_INTERRUPT = {"trainer.save_on_interrupt"}
"""Read where a signal ends the run; none does here."""

PAIRS = "data.train_files=PAIRS data.max_response_length=6"
RUNS = {
    "colocate": "",
    "hybrid": "--hybrid",
    "fully async": "--fully-async --use-kl-loss",
    "cosine, filtered": f"{OPTIM}.schedule=cosine algorithm.overlong=mask algorithm.filter_groups.enable=true",
    "chat": f"data.chat=true data.system_prompt=0 data.max_prompt_length=4 {MODEL}.path=CHAT",
    "norm": "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
    "adaptive": "--use-kl-in-reward algorithm.kl.controller=adaptive actor_rollout_ref.ref.update_interval=2",
    "corrected": f"{CORRECTION}.weights=token",
    "tis": "--use-tis",
    "critic": "critic.enable=true algorithm.adv_estimator=gae critic.optim.schedule=cosine critic.model.path=MODEL "
    "critic.model.lora_rank=4",
    "taught": "algorithm.distillation.type=reverse_kl actor_rollout_ref.teacher.path=MODEL",
    "evaluated": "data.val_files=VAL data.drop_val_prompts=false evaluation.interval=1 evaluation.temperature=1.0",
    "saved": "trainer.save_interval=1",
    "parquet": "data.train_files=PARQUET",
    "processes": "runtime.threads=false",
    "engine in a process": "--hybrid runtime.threads=false",
    "keep": f"--hybrid {ROLLOUT}.on_weight_update=keep",
    "abort": f"--hybrid {ROLLOUT}.on_weight_update=abort",
    "swapped": f"--hybrid {ROLLOUT}.swap.step=1 {ROLLOUT}.swap.name=hf",
    "lora": f"{MODEL}.lora_rank=4 --hybrid",
    "episodes": f"{ROLLOUT}.episode.type=tokens {ROLLOUT}.episode.file=PLAYS {ROLLOUT}.episode.tools=[TOOLS,python] "
    f"{ROLLOUT}.episode.sandbox.isolation=limits {ROLLOUT}.episode.tool_format=hermes {MODEL}.path=CHAT",
    "preferences": f"{LOSS}.type=dpo {PAIRS}",
    "labelled": f"{LOSS}.type=kto data.label_key=good {PAIRS}",
}
"""Words beside the task: together every line of the table holds in one of them, but for what is read elsewhere."""


@pytest.fixture(scope="module")
def changed(task: Path) -> Callable[[str], Config]:
    """The task with some words changed; names of files in capitals stand for files."""
    chat = Path(shutil.copytree(task.parent / "model", task.parent / "chat"))
    (chat / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}{# tools #}"
    )
    answers = {"rejected": "00", "response": "11"}
    pairs = [{"prompt": f"{d}>", "chosen": str(d), "good": d > 4, **answers} for d in range(10)]
    held_out = [{"prompt": f"{d}>", "answer": str(d) * 4} for d in (3, 8)]
    rows = [{"prompt": f"{d}>", "answer": str(d) * 4} for d in range(10)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), task.parent / "train.parquet")
    files = {
        "CHAT": chat,
        "PAIRS": write_rows(task.parent / "pairs.jsonl", pairs),
        "PARQUET": task.parent / "train.parquet",
        "VAL": write_rows(task.parent / "held_out.jsonl", held_out),
        "MODEL": task.parent / "model",
        "PLAYS": EPISODES / "plays.py",
        "TOOLS": EPISODES / "slow_tools.py",
    }

    def made(words: str) -> Config:
        for name, path in files.items():
            words = words.replace(name, str(path))
        return load_words([str(task), "trainer.total_steps=2", "data.train_batch_size=4", *words.split()], Config)

    return made


def said_to_be_read(config: Config, plan: Plan) -> set[str]:
    """What the table says is read, of the keys that the config can have."""
    setting = Setting(config, look_up(config), plan.runtime, plan.pushed == "nothing")
    lacking = {key for mode in MODES.values() for key in keys_of(mode)} - keys_of(type(config.execution)).keys()
    leaves = {path for path, field in paths_of(Config).items() if not field.nodes}
    leaves -= {f"execution.{key}" for key in lacking}
    return {key for key in leaves if all(line.where(setting) for line in READS if line.names(key))}


def test_every_line_names_keys_of_the_schema() -> None:
    known = paths_of(Config)
    assert [key for line in READS for key in line.keys if key not in known] == []


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS.keys())
def test_what_the_plan_says_is_read_is_read(changed: Callable[[str], Config], tmp_path: Path, words: str) -> None:
    config = changed(f"{words} trainer.output_dir={tmp_path}")
    plan = compile_plan(config)
    with watched(config) as read:
        run_train(config, plan)
    expected = said_to_be_read(config, plan) - BY_THE_PLAN.keys() - SWITCHES - AT_AN_INTERRUPT
    # Of a section that is null, or only a name, the section itself is read.
    assert {key for key in expected - read if not any(key.startswith(f"{section}.") for section in read)} == set()


def test_every_key_is_read_by_some_run(changed: Callable[[str], Config]) -> None:
    read = {*BY_THE_PLAN, *ELSEWHERE}
    for words in RUNS.values():
        config = changed(words)
        read |= said_to_be_read(config, compile_plan(config))
    assert {path for path, field in paths_of(Config).items() if not field.nodes} - read == set()


# words | key | part of the reason
UNREAD = [
    ("data.tools_key=tools data.template={prompt}", "data.tools_key", "plain text"),
    (f"{OPTIM}.min_lr_ratio=0.1", f"{OPTIM}.min_lr_ratio", "constant"),
    (f"{MODEL}.lora_alpha=16", f"{MODEL}.lora_alpha", "no adapters"),
    ("algorithm.kl.type=k1", "algorithm.kl.type", "off"),
    ("--use-kl-loss algorithm.kl.target=0.2", "algorithm.kl.target", "fixed"),
    ("algorithm.tis_cap=3.0", "algorithm.tis_cap", "use_tis"),
    (f"{CORRECTION}.cap=3.0", f"{CORRECTION}.cap", "there are none"),
    (f"--use-tis {CORRECTION}.cap=3.0", f"{CORRECTION}.cap", "a cap of its own"),
    ("algorithm.filter_groups.max_draws=3", "algorithm.filter_groups.max_draws", "nothing is drawn again"),
    ("data.chosen_key=best", "data.chosen_key", "learns from rewards"),
    ("data.label_key=good", "data.label_key", "learns from rewards"),
    ("data.on_overlong_response=drop", "data.on_overlong_response", "generated answers end"),
    ("data.template={prompt} data.prompt_key=answer", "data.prompt_key", "data.template"),
]


@pytest.mark.parametrize(("words", "key", "reason"), UNREAD, ids=[row[0] for row in UNREAD])
def test_a_key_that_nothing_reads_is_refused(problems_of: Problems, words: str, key: str, reason: str) -> None:
    found = problems_of(*words.split())
    assert [problem.key for problem in found] == [key], [str(problem) for problem in found]
    assert reason in found[0].reason and found[0].remedy


NOTED = [
    (
        f"{ROLLOUT}.strict=false {ROLLOUT}.gpu_memory_utilization=0.5 {ROLLOUT}.enable_chunked_prefill=false",
        f"{ROLLOUT}.gpu_memory_utilization, {ROLLOUT}.enable_chunked_prefill",
        "hf",
    ),
    ("evaluation.n=4 evaluation.temperature=1.0", "evaluation.n, evaluation.temperature", "tandem eval"),
    ("execution.stall_warning_s=9", "execution.stall_warning_s", "colocate"),
    ("--hybrid --balance-data", "execution.balance_data", "one train rank"),
    ("--hybrid --num-data-storage-units 2", "execution.data_plane.num_data_storage_units", "Ray"),
    ("trainer.keep_checkpoints=5", "trainer.keep_checkpoints", "no checkpoint"),
    ("critic.warmup_steps=3", "critic.warmup_steps", "critic.enable is false"),
    ("runtime.threads=true reward_manager.workers=4", "reward_manager.workers", "threads"),
]


@pytest.mark.parametrize(("words", "keys", "reason"), NOTED, ids=[row[0] for row in NOTED])
def test_what_one_line_switches_on_and_off_may_stay_and_is_told(
    plan_of: Plans, words: str, keys: str, reason: str
) -> None:
    plan = plan_of(*words.split())
    assert plan.problems == ()
    (note,) = [note for note in plan.notes if "not used" in note]
    assert note.startswith(f"{keys} ") and reason in note


def test_a_falling_schedule_of_a_loop_of_ones_own_has_an_end(place: Path) -> None:
    (place / "own.py").write_text("class Own: ...")
    words = (f"{OPTIM}.schedule=cosine", "trainer={total_epochs: 2}", "data.source={file: own.py, type: Own}")
    config = load_words([str(place / "run.yaml"), "data.train_files=[]", *words], Config)
    assert compile_plan(config).problems == ()
    with pytest.raises(ConfigError) as caught:
        build_actor_rollout_ref(config.actor_rollout_ref)
    (found,) = caught.value.problems
    assert found.key == f"{OPTIM}.schedule" and "where it ends is unknown" in found.reason


# words | key | part of the reason
UNREAD_IN_SFT = [
    ("optim.min_lr_ratio=0.1", "optim.min_lr_ratio", "constant"),
    ("model.lora_alpha=8", "model.lora_alpha", "no adapters"),
    ("trainer.exact=true", "trainer.exact", "no rollouts"),
    ("data.tools_key=topic", "data.tools_key", "plain text"),
    ("data.chat=true data.add_eos=false", "data.add_eos", "chat template"),
    ("model={new: {alphabet: abc, max_position_embeddings: 64}, dtype: bfloat16}", "model.dtype", "float32"),
]


@pytest.mark.parametrize(("words", "key", "reason"), UNREAD_IN_SFT, ids=[row[1] for row in UNREAD_IN_SFT])
def test_a_key_that_fine_tuning_does_not_read_is_refused(
    sft_plan_of: SftPlans, words: str, key: str, reason: str
) -> None:
    found = sft_plan_of(*([words] if "{" in words else words.split())).problems
    assert [problem.key for problem in found] == [key], [str(problem) for problem in found]
    assert reason in found[0].reason


def test_fine_tuning_tells_what_may_stay(sft_plan_of: SftPlans) -> None:
    plan = sft_plan_of("data.val_files=[other.jsonl]", "evaluation.max_new_tokens=4", "runtime.threads=true")
    told = " ".join(plan.notes)
    assert all(key in told for key in ("data.val_files", "evaluation.max_new_tokens", "runtime.threads"))


def test_a_trainer_of_ones_own_refuses_what_it_ignores(place: Path) -> None:
    words = ["model.path=m", "data.train_files=train.jsonl", "trainer.save_interval=2", "runtime.device=cpu"]
    with pytest.raises(ConfigError) as caught:
        check_own_trainer(load_words(words, SftConfig))
    assert [problem.key for problem in caught.value.problems] == ["trainer.save_interval", "runtime.device"]


def test_a_key_that_says_what_is_there_anyway_is_no_contradiction(plan_of: Plans) -> None:
    """So the config that a run writes, in which every key stands, plans as the run did."""
    usual = ["algorithm.tis_cap=2.0", "algorithm.kl.type=k3", f"{OPTIM}.min_lr_ratio=0", "trainer.keep_checkpoints=2"]
    plan = plan_of(*usual)
    assert plan.problems == () and not any("not used" in note for note in plan.notes)
