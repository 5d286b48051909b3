"""What a plan says: roles, devices, stages with their columns, arithmetic, memory; and that it costs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigError
from tandem.config.load import config_from_tree
from tandem.config.schema import Config
from tandem.plan.parts.batch import plan_batch
from tandem.plan.parts.placement import device_groups, placements
from tandem.plan.parts.stages import SOURCE_COLUMNS
from tandem.plan.plan import Plan, compile_plan
from tandem.plan.reward import ScoringPlan
from tandem.stages.stage import PlannedStage

Plans = Callable[..., Plan]
ROOT = Path(__file__).parents[2]


def stage(plan: Plan, name: str) -> PlannedStage:
    (found,) = [stage for stage in plan.stages if stage.name == name]
    return found


def names(plan: Plan) -> list[str]:
    return [stage.name for stage in plan.stages]


# --- stages


def test_a_plan_says_where_rewards_are_made(plan_of: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # else a model of a hub must be in the cache
    assert plan_of().scoring == ScoringPlan(("exact",), 1, ())
    parts = "[{type: reward_model, path: some/m, device: 'cuda:3'}, {type: exact}]"
    plan = plan_of(f"reward_manager={{type: weighted_sum, workers: 2, parts: {parts}}}")
    assert plan.scoring == ScoringPlan(("weighted_sum", "reward_model", "exact"), 2, ("cuda:3",))
    assert plan.problems == ()
    threads = plan_of("reward_manager={type: reward_model, path: some/m}", "runtime.threads=true").scoring
    assert threads == ScoringPlan(("reward_model",), 0, ("cpu",))


def test_the_plainest_run_computes_nothing_that_nobody_reads(plan_of: Plans) -> None:
    plan = plan_of()
    assert plan.problems == ()
    assert names(plan) == ["rollout", "reward", "advantages", "train", "publish"]
    assert plan.tags == ("actor",)
    assert plan.old_logprobs == "implied"
    assert "old_logprobs" not in stage(plan, "train").needs
    assert "ground_truth" in stage(plan, "reward").needs


def test_a_kl_in_the_loss_needs_a_reference_and_no_old_logprobs(plan_of: Plans) -> None:
    plan = plan_of("algorithm.kl.in=loss")
    assert names(plan) == ["rollout", "reward", "ref", "advantages", "train", "publish"]
    assert stage(plan, "ref").tag == "ref"
    assert "ref_logprobs" in stage(plan, "train").needs
    assert plan.tags == ("actor", "ref")


def test_a_kl_in_the_reward_needs_old_logprobs_before_the_advantages(plan_of: Plans) -> None:
    plan = plan_of("algorithm.kl.in=reward")
    assert names(plan) == ["rollout", "reward", "ref", "old", "advantages", "train", "publish"]
    assert {"old_logprobs", "ref_logprobs"} <= set(stage(plan, "advantages").needs)
    assert "ref_logprobs" not in stage(plan, "train").needs


def test_a_coefficient_of_zero_is_off(plan_of: Plans) -> None:
    plan = plan_of("algorithm.kl={in: loss, coef: 0}")
    assert "ref" not in names(plan)
    assert any("KL is off" in note for note in plan.notes)


def test_importance_weights_are_computed_from_old_and_rollout(plan_of: Plans) -> None:
    plan = plan_of("--use-tis")
    assert {"old_logprobs", "rollout_logprobs"} <= set(stage(plan, "correction").needs)
    assert "tis_weights" in stage(plan, "train").needs
    assert names(plan).index("old") < names(plan).index("correction") < names(plan).index("train")


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ([], "implied"),
        (["actor_rollout_ref.actor.ppo_epochs=2"], "recompute"),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], "recompute"),
        (["--hybrid"], "implied"),
        (["--hybrid", "execution.num_iters_per_train_update=4", "execution.train_pipelining=step"], "recompute"),
        (["--fully-async"], "recompute"),
        (["algorithm.old_logprobs=recompute"], "recompute"),
        (["algorithm.old_logprobs=rollout"], "rollout"),
    ],
)
def test_the_old_logprobs_are_implied_only_where_that_is_exact(plan_of: Plans, words: list[str], source: str) -> None:
    plan = plan_of(*words)
    assert plan.problems == ()
    assert plan.old_logprobs == source
    assert ("old_logprobs" in stage(plan, "train").needs) == (source != "implied")


def test_gae_needs_values_of_a_critic(plan_of: Plans) -> None:
    plan = plan_of("algorithm.adv_estimator=gae", "critic.enable=true")
    assert "values" in stage(plan, "advantages").needs
    assert names(plan).index("values") < names(plan).index("advantages") < names(plan).index("train_critic")
    assert plan.roles == ("actor", "critic", "rollout")


def test_in_fully_async_each_forward_is_a_role_of_its_own(plan_of: Plans) -> None:
    plan = plan_of("--fully-async", "algorithm.kl.in=loss")
    assert plan.roles == ("actor", "rollout", "advantages", "reference", "actor_fwd")
    assert (stage(plan, "ref").role, stage(plan, "old").role) == ("reference", "actor_fwd")
    assert plan.tags == ("actor",)


def test_pipelined_steps_keep_the_old_actor_as_a_tag(plan_of: Plans) -> None:
    words = ["--hybrid", "execution.num_iters_per_train_update=4", "execution.train_pipelining=step"]
    plan = plan_of(*words)
    assert "old_actor" in plan.tags
    assert stage(plan, "old").tag == "old_actor"
    assert plan.batch.mini_batch_prompts == 2


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
@pytest.mark.parametrize("kl", ["off", "loss", "reward"])
@pytest.mark.parametrize("tis", ["true", "false"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_every_column_is_given_before_it_is_needed(plan_of: Plans, mode: str, kl: str, tis: str, epochs: int) -> None:
    words = [f"execution.mode={mode}", f"algorithm.kl.in={kl}", f"algorithm.use_tis={tis}"]
    plan = plan_of(*words, f"actor_rollout_ref.actor.ppo_epochs={epochs}")
    assert plan.problems == ()
    given_so_far = set(SOURCE_COLUMNS)
    for planned in plan.stages:
        assert set(planned.needs) <= given_so_far, planned.name
        assert not set(planned.gives) & given_so_far, planned.name
        given_so_far |= set(planned.gives)


# --- devices


@pytest.mark.parametrize(
    ("words", "groups"),
    [
        (["execution.resource={actor: [1, 4], rollout: [1, 2]}"], {"shared": 4}),
        (["execution.resource={actor: [2, 4]}"], {"shared": 8}),
        ([], {"shared": 1}),
        (["--hybrid", "execution.resource={actor: [1, 4], rollout: [2, 2]}"], {"actor": 4, "rollout": 4}),
        (["--hybrid", "--critic.enable", "execution.resource={actor: [1, 4]}"], {"actor": 4, "rollout": 1}),
        (
            ["--hybrid", "--critic.enable", "execution.resource={critic: [1, 2]}"],
            {"actor": 1, "critic": 2, "rollout": 1},
        ),
        (["--fully-async"], {"actor": 1, "rollout": 1, "actor_fwd": 1}),
        (
            ["--fully-async", "--use-kl-loss", "execution.resource={ref: [1, 2]}"],
            {"actor": 1, "rollout": 1, "reference": 2, "actor_fwd": 1},
        ),
    ],
)
def test_separate_groups_need_the_sum_and_shared_ones_the_largest(
    plan_of: Plans, words: list[str], groups: dict[str, int]
) -> None:
    plan = plan_of(*words)
    assert plan.device_groups == groups
    assert plan.devices == sum(groups.values())


def test_one_device_a_role_is_local_and_more_is_ray(plan_of: Plans) -> None:
    assert plan_of("--hybrid").runtime == "local"
    assert plan_of("--hybrid", "execution.resource={actor: [1, 2]}").runtime == "ray"
    assert plan_of("runtime.name=ray").runtime == "ray"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ([], []),
        (["--hybrid"], []),
        (["--fully-async"], []),
        (["actor_rollout_ref.rollout.name=vllm"], ["actor_rollout_ref.rollout.name"]),
        (["actor_rollout_ref.rollout.name=sglang"], ["actor_rollout_ref.rollout.name"]),
        (["execution.resource={actor: [1, 2]}"], []),
        (["execution.resource={actor: [1, 2]}", "actor_rollout_ref.actor.tensor_model_parallel_size=2"], []),
        (["--critic.enable", "algorithm.adv_estimator=gae"], []),
    ],
)
def test_what_can_be_planned_but_not_run_yet_is_said_in_one_line_each(
    plan_of: Plans, words: list[str], keys: list[str]
) -> None:
    plan = plan_of(*words)
    assert plan.problems == ()
    assert [later.key for later in plan.later] == keys
    if keys:
        with pytest.raises(ConfigError) as caught:
            plan.require_runnable()
        assert [problem.key for problem in caught.value.problems] == keys
    else:
        plan.require_runnable()


def test_the_engine_is_one_line_of_config(plan_of: Plans) -> None:
    words = ["--hybrid", "execution.resource={actor: [1, 4], rollout: [1, 4]}"]
    words += ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    assert plan_of(*words, "actor_rollout_ref.rollout.name=vllm").problems == ()
    for engine in ("sglang", "hf"):
        name = f"actor_rollout_ref.rollout.name={engine}"
        (problem,) = plan_of(*words, name).problems
        assert problem.key.endswith("tensor_model_parallel_size") and "(vllm has)" in problem.reason
        plan = plan_of(*words, name, "actor_rollout_ref.rollout.strict=false")
        assert plan.problems == () and any("not used" in note for note in plan.notes)


# --- arithmetic


def test_batch_words(plan_of: Plans) -> None:
    plan = plan_of(
        "--hybrid",
        "execution.num_iters_per_train_update=4",
        "actor_rollout_ref.actor.ppo_epochs=3",
        "--global-batch-size=16",
    )
    batch = plan.batch
    assert (batch.prompts, batch.samples) == (8, 32)
    assert (batch.sub_batches, batch.sub_batch_prompts) == (4, 2)
    assert (batch.mini_batches, batch.mini_batch_prompts, batch.mini_batch_samples) == (2, 4, 16)
    assert (batch.optimizer_steps, batch.steps, batch.optimizer_steps_in_all) == (6, 20, 120)


def test_micro_batches_are_bounded_by_the_token_budget(plan_of: Plans) -> None:
    assert plan_of("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512").batch.micro_batches == 16
    assert plan_of("actor_rollout_ref.actor.ppo_micro_batch_size=1").batch.micro_batches == 32
    words = ["execution.resource={actor: [1, 2]}", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512"]
    assert plan_of(*words).batch.micro_batches == 8


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ("{}", 5),
        ("{total_epochs: 3}", 15),
        ("{total_steps: 7, total_epochs: 3}", 7),
        ("{total_steps: 70, total_epochs: 3}", 15),
    ],
)
def test_steps_are_the_least_of_steps_and_epochs(plan_of: Plans, trainer: str, steps: int) -> None:
    assert plan_of(f"trainer={trainer}").batch.steps == steps


def test_epochs_are_joined_end_to_end(plan_of: Plans) -> None:
    assert plan_of("trainer={total_epochs: 2}", "data.train_batch_size=32").batch.steps == 2 * 40 // 32


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_arithmetic_adds_up(mini: int, minis: int, n: int, epochs: int, ranks: int) -> None:
    tree = {
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "actor": {"ppo_mini_batch_size": mini, "ppo_epochs": epochs},
            "rollout": {"n": n},
        },
        "data": {"train_batch_size": mini * minis},
        "trainer": {"total_steps": 10},
    }
    batch = plan_batch(config_from_tree(tree, Config), ranks, None)
    assert batch.mini_batches * batch.mini_batch_samples == batch.samples == batch.prompts * n
    assert batch.optimizer_steps == epochs * batch.mini_batches
    assert batch.optimizer_steps_in_all == 10 * batch.optimizer_steps
    assert batch.micro_batches * ranks >= 1


@given(st.dictionaries(st.sampled_from(["actor", "rollout"]), st.tuples(st.integers(1, 3), st.integers(1, 8))))
def test_devices_shared_never_exceed_devices_apart(resource: dict[str, tuple[int, int]]) -> None:
    def devices(mode: str) -> int:
        execution = {"mode": mode, "resource": {role: list(size) for role, size in resource.items()}}
        tree = {"execution": execution, "actor_rollout_ref": {"model": {"path": "m"}}}
        return sum(device_groups(placements(config_from_tree(tree, Config))).values())

    assert devices("colocate") <= devices("hybrid")
    assert devices("colocate") == max((a * b for a, b in resource.values()), default=1)


# --- the plan itself


def test_a_plan_is_frozen_deterministic_and_json(plan_of: Plans) -> None:
    first, second = plan_of("algorithm.kl.in=loss"), plan_of("algorithm.kl.in=loss")
    assert first == second
    assert first.to_json() == second.to_json()
    content = json.loads(first.to_json())
    assert content["kind"] == "train"
    assert [entry["name"] for entry in content["stages"]] == names(first)
    with pytest.raises(FrozenInstanceError):
        first.mode = "hybrid"  # type: ignore[misc]


def test_a_plan_with_problems_is_json_too(plan_of: Plans) -> None:
    content = json.loads(plan_of("actor_rollout_ref.rollout.temperature=0").to_json())
    (problem,) = content["problems"]
    assert set(problem) == {"key", "value", "reason", "remedy"}


def test_planning_imports_no_torch(place: Path) -> None:
    """With torch, transformers and ray made impossible to import, everything still works."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ray', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "from tandem.config.load import load_words\n"
        "from tandem.plan.plan import compile_plan; from tandem.plan.sft import compile_sft_plan\n"
        "for config in map(load_words, map(str.split, sys.argv[1:])):\n"
        "    plan = compile_plan(config) if hasattr(config, 'execution') else compile_sft_plan(config)\n"
        "    assert plan.problems == (), plan.problems\n"
        "assert not [name for name in sys.modules if name.startswith('torch.')]\n"
    )
    sft = {"model": {"path": "model"}, "data": {"train_files": ["train.jsonl"], "response_key": "answer"}}
    (place / "sft.yaml").write_text(json.dumps(sft))
    words = [
        "run.yaml algorithm.kl.in=reward --use-tis trainer.logger=[console,tensorboard]",
        "run.yaml execution.mode=hybrid actor_rollout_ref.model.lora_rank=4",
        "run.yaml execution.mode=fully_async critic.enable=true algorithm.adv_estimator=gae",
        "run.yaml algorithm.distillation.type=reverse_kl actor_rollout_ref.teacher.path=model",
        "sft.yaml",
    ]
    command, environment = [sys.executable, "-c", code, *words], {"PYTHONPATH": str(ROOT), "PATH": ""}
    run = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_compiling_from_the_designs_example(place: Path) -> None:
    """The example of the design document, with the files it names in place, has no problem in either engine."""
    (place / "train.parquet").write_bytes(_parquet())
    (place / "rewards_of_mine.py").write_text(
        "class KeywordRewardManager:\n    def __init__(self, keyword='x'):\n        pass\n\n"
        "    def __call__(self, data):\n        return [0.0] * len(data)\n"
    )
    tree = {
        "execution": {
            "mode": "hybrid",
            "resource": {"actor": [1, 4], "rollout": [1, 4]},
            "max_staleness": 2,
            "num_iters_per_train_update": 8,
            "balance_data": True,
        },
        "actor_rollout_ref": {
            "hybrid_engine": True,
            "model": {"path": str(place / "model")},
            "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": 256, "optim": {"lr": 1.0e-6}},
            "rollout": {"name": "vllm", "tensor_model_parallel_size": 2, "n": 8, "temperature": 1.0},
            "ref": {},
        },
        "critic": {"enable": False},
        "algorithm": {
            "adv_estimator": "grpo",
            "policy_loss": {"type": "ppo_clip", "clip_ratio_high": 0.28},
            "kl": {"in": "loss", "type": "k3", "coef": 0.001},
            "use_tis": True,
        },
        "reward_manager": {"type": "keyword_reward", "keyword": "正确"},
        "data": {"train_files": ["train.parquet"], "max_prompt_length": 256, "max_response_length": 512},
        "trainer": {"total_steps": 200, "save_interval": 20, "logger": ["console", "tensorboard"]},
        "plugins": ["rewards_of_mine"],
    }
    plan = compile_plan(config_from_tree(tree, Config))
    assert plan.problems == ()
    assert plan.devices == 8


def _parquet() -> bytes:
    import io

    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 300, "answer": ["b"] * 300}), sink)
    return sink.getvalue()


def test_a_group_above_the_bounds_of_a_micro_batch_is_told_where_bits_must_be_equal(plan_of: Plans) -> None:
    actor = "actor_rollout_ref.actor"
    words = (f"{actor}.ppo_max_token_len_per_gpu=1000", f"{actor}.ppo_micro_batch_size=2", "trainer.exact=true")
    notes = [note for note in plan_of(*words).notes if "trainer.exact" in note]
    assert len(notes) == 2
    assert "ppo_max_token_len_per_gpu = 1000 does not bound it" in notes[0]
    assert "ppo_micro_batch_size = 2 does not bound it" in notes[1]
    assert not any("trainer.exact" in note for note in plan_of(*words[:2]).notes)
