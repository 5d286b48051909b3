"""Every contradiction is refused with key, value, reason and remedy, and alone: nothing else is reported with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.base.errors import Problem

Problems = Callable[..., list[Problem]]

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
LOSS = "algorithm.policy_loss"
HYBRID = "execution.mode=hybrid"

# words | key | part of the reason | part of the remedy
REFUSALS = [
    # unknown names
    (f"{ROLLOUT}.name=vlm", f"{ROLLOUT}.name", "unknown rollout engine", "'vllm'"),
    (f"{ACTOR}.strategy=fsdp3", f"{ACTOR}.strategy", "unknown training engine", "'fsdp2'"),
    ("algorithm.adv_estimator=grp", "algorithm.adv_estimator", "unknown advantage estimator", "'grpo'"),
    ("algorithm.adv_estimator={type: zzz}", "algorithm.adv_estimator.type", "unknown advantage estimator", "rloo"),
    (f"{LOSS}.type=ppo_clp", f"{LOSS}.type", "unknown policy loss", "'ppo_clip'"),
    ("algorithm.kl.type=k9", "algorithm.kl.type", "unknown KL type", "k3"),
    ("reward_manager.type=exactly", "reward_manager.type", "no reward 'exactly'", "scorer"),
    ("trainer.logger=[consle]", "trainer.logger[0]", "unknown logger", "'console'"),
    ("execution.mode=colocated", "execution.mode", "unknown mode", "'colocate'"),
    # parameters of typed nodes
    (f"{LOSS}.clip_ratio_hihg=0.3", f"{LOSS}.clip_ratio_hihg", "no parameter", "'clip_ratio_high'"),
    (f"{LOSS}.clip_ratio='0.3'", f"{LOSS}.clip_ratio", "a text where a number", "0.3 without quotes"),
    (f"{LOSS}.clip_ratio=true", f"{LOSS}.clip_ratio", "true or false where a number", "0.2"),
    (f"{LOSS}={{tipe: ppo_clip}}", f"{LOSS}.tipe", "no parameter", "'type'"),
    (f"{LOSS}.clip_ratio=-0.1", f"{LOSS}.clip_ratio", "negative", "0.2"),
    (f"{LOSS}.clip_ratio_c=1.0", f"{LOSS}.clip_ratio_c", "above 1", "3.0"),
    (f"{LOSS}.clip_ratio_c=0", f"{LOSS}.clip_ratio_c", "above 1", "null"),
    ("algorithm.adv_estimator.norm_adv_by_st=1", "algorithm.adv_estimator.norm_adv_by_st", "no parameter", "norm_adv"),
    (
        "algorithm.adv_estimator.norm_adv_by_std=1",
        "algorithm.adv_estimator.norm_adv_by_std",
        "an integer where",
        "True",
    ),
    ("reward_manager.type=keyword", "reward_manager.keyword", "needs this parameter", "reward_manager.keyword"),
    ("reward_manager.stp=x", "reward_manager.stp", "no such parameter", ""),
    ("reward_manager.stop=3", "reward_manager.stop", "an integer where a text", '"3"'),
    ("reward_manager={type: gsm8k, method: strickt}", "reward_manager.method", "not one of the choices", "'strict'"),
    (
        "reward_manager={type: weighted_sum, parts: [{type: exact}, {type: keyward}]}",
        "reward_manager.parts[1].type",
        "no reward",
        "",
    ),
    (
        "reward_manager={type: weighted_sum, parts: [{type: exact, stp: x}]}",
        "reward_manager.parts[0].stp",
        "no such parameter",
        "",
    ),
    (
        "reward_manager={type: weighted_sum, parts: [{type: exact, stop: 3}]}",
        "reward_manager.parts[0].stop",
        "an integer where a text",
        '"3"',
    ),
    ("reward_manager={type: weighted_sum, parts: []}", "reward_manager.parts", "at least one part", "parts"),
    # files and folders
    ("data.train_files=[absent.jsonl]", "data.train_files[0]", "no such file", "existing"),
    ("data.train_files=[empty.jsonl]", "data.train_files[0]", "empty", "data file"),
    ("data.train_files=[model]", "data.train_files[0]", "a folder", "data file"),
    ("data.train_files=[broken.parquet]", "data.train_files[0]", "parquet", "data file"),
    ("data.train_files=[broken.jsonl]", "data.train_files[0]", "invalid JSON", "Mend"),
    ("data.train_files=[table.csv]", "data.train_files[0]", "unknown format", "data file"),
    ("data.train_files=[]", "data.train_files", "no training data", "data.reasoning_gym"),
    ("data.val_files=[absent.jsonl]", "data.val_files[0]", "no such file", "existing"),
    ("data.val_files=[./train.jsonl]", "data.val_files[0]", "trained on", "Split"),
    ("data.prompt_key=promt", "data.prompt_key", "did you mean 'prompt'", "column"),
    ("data.answer_key=anser", "data.answer_key", "did you mean 'answer'", "null"),
    ("data.answer_key=null", "data.answer_key", "compares with a ground truth", "column"),
    ("data.extra_keys=[topic.nam]", "data.extra_keys[0]", "no column", "column"),
    ("data.uid_key=id", "data.uid_key", "no column", "column"),
    ("data.template=Sum", "data.template", "no column", "{column}"),
    ("data.template='{prompt'", "data.template", "expected '}'", "{column}"),
    ("data.template='{prompt.x}'", "data.template", "no plain column", "{column}"),
    ("data.template='{promt}'", "data.template", "did you mean 'prompt'", "column"),
    ("data.system_prompt=Hello", "data.system_prompt", "chat", "data.chat: true"),
    (f"{MODEL}.path=./absent", f"{MODEL}.path", "no such folder", "existing folder"),
    (f"{MODEL}.path=/absent/a/model", f"{MODEL}.path", "no such folder", "existing folder"),
    (f"{MODEL}.path=models/smollm2-135m", f"{MODEL}.path", "no such folder", "tandem models fetch smollm2-135m"),
    (f"{MODEL}.path=empty_folder/first", f"{MODEL}.path", "no such folder", "In empty_folder: no folder"),
    (f"{MODEL}.path=train.jsonl", f"{MODEL}.path", "a file", "folder"),
    (f"{MODEL}.path=some/uncached-model", f"{MODEL}.path", "HF_HUB_OFFLINE", "unset"),
    (f"{MODEL}.path=empty_folder", f"{MODEL}.path", "config.json", "save_pretrained"),
    (f"{MODEL}.path=broken_model", f"{MODEL}.path", "config.json can't be read", "Mend"),
    (f"{MODEL}.tokenizer_path=./absent", f"{MODEL}.tokenizer_path", "no such folder", "existing"),
    ("reward_manager={type: mine, file: absent.py}", "reward_manager.file", "no file", ""),
    ("reward_manager={type: mine, file: broken.py}", "reward_manager.type", "SyntaxError", ""),
    ("reward_manager={type: shout, file: scorers.py}", "reward_manager.type", "defines no", ""),
    ("reward_manager={type: loud, file: scorers.py, bonos: 1}", "reward_manager.bonos", "no such parameter", ""),
    (
        "reward_manager={type: loud, file: scorers.py, bonus: much}",
        "reward_manager.bonus",
        "a text where a number",
        "1.0",
    ),
    ("reward_manager={type: polite, file: scorers.py, wrd: x}", "reward_manager.wrd", "no such parameter", ""),
    ("plugins=[absent_lab.rewards]", "plugins[0]", "no module 'absent_lab'", "importable"),
    ("plugins=[broken_plugin]", "plugins[0]", "ZeroDivisionError", "Correct the module"),
    ("plugins=[needy_plugin]", "plugins[0]", "No module named 'not_there'", "Install not_there"),
    ("trainer.resume=out/step-7", "trainer.resume", "no such checkpoint", "auto"),
    ("trainer.resume=empty_folder", "trainer.resume", "empty", "checkpoint"),
    ("trainer.output_dir=train.jsonl", "trainer.output_dir", "is a file", "folder"),
    ("trainer.output_dir=train.jsonl/out", "trainer.output_dir", "is a file", "folder"),
    # groups, critic, KL
    (f"{ROLLOUT}.n=1", f"{ROLLOUT}.n", "every advantage is 0", "2 or more"),
    ("algorithm.adv_estimator=gae", "algorithm.adv_estimator", "'values'", "critic.enable: true"),
    ("critic.enable=true", "critic.enable", "nothing reads its values", "gae"),
    ("algorithm.kl={in: reward, controller: adaptive, horizon: 0}", "algorithm.kl.horizon", "samples", "10000"),
    ("algorithm.kl={in: reward, controller: adaptive, horizon: -5}", "algorithm.kl.horizon", "samples", "10000"),
    ("algorithm.kl={in: loss, controller: adaptive}", "algorithm.kl.controller", "KL in the reward", "fixed"),
    ("--use-kl-loss --use-kl-in-reward", "algorithm.kl.in", "both", "Choose one"),
    ("actor_rollout_ref.ref.update_interval=5", "actor_rollout_ref.ref.update_interval", "no reference", "kl.in"),
    ("algorithm.loss_scale_factor=7", "algorithm.loss_scale_factor", "seq-mean-token-sum-norm", "Remove"),
    # sampling and log-probs
    (f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature", "0 or less", "above 0"),
    (f"{ROLLOUT}.temperature=-1.0", f"{ROLLOUT}.temperature", "0 or less", "above 0"),
    (f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.do_sample", "greedy", "true"),
    (f"{ROLLOUT}.top_k=0", f"{ROLLOUT}.top_k", "no token", "-1"),
    (f"algorithm.use_tis=true {ROLLOUT}.top_p=0.9", "algorithm.use_tis", "truncated distribution", "logprobs_of: full"),
    (f"algorithm.use_tis=true {ROLLOUT}.top_k=20", "algorithm.use_tis", "top_k 20", "top_k: -1"),
    (
        f"algorithm.old_logprobs=rollout {ROLLOUT}.top_p=0.9",
        "algorithm.old_logprobs",
        "truncated distribution",
        "logprobs_of: full",
    ),
    ("algorithm.use_tis=true algorithm.old_logprobs=rollout", "algorithm.use_tis", "weight 1", "recompute"),
    (
        "algorithm.use_tis=true plugins=[lab] algorithm.policy_loss.type=plain",
        "algorithm.use_tis",
        "no tis_weights",
        "ppo",
    ),
    (
        f"algorithm.use_tis=true plugins=[lab] {ROLLOUT}.name=mute",
        "algorithm.use_tis",
        "no rollout log-probs",
        "engine",
    ),
    ("plugins=[lab] algorithm.adv_estimator=odd", "algorithm.adv_estimator", "'mood'", "'*'"),
    # batches
    (
        "data.train_batch_size=9 actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{ACTOR}.ppo_mini_batch_size",
        "cut",
        "9",
    ),
    (f"{ACTOR}.ppo_mini_batch_size=16", f"{ACTOR}.ppo_mini_batch_size", "more than the 8", "at most 8"),
    (f"{ACTOR}.global_batch_size=13", f"{ACTOR}.global_batch_size", "stay together", "multiple of 4"),
    (f"{ACTOR}.global_batch_size=12", f"{ACTOR}.global_batch_size", "cut", "divisor of 32"),
    (f"{ACTOR}.global_batch_size=64", f"{ACTOR}.global_batch_size", "more than the 8", "at most 32"),
    (f"{ACTOR}.global_batch_size=16 {ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.global_batch_size", "32 samples", "32"),
    (f"{ACTOR}.ppo_micro_batch_size=5", f"{ACTOR}.ppo_micro_batch_size", "32 samples", "divisor of 32"),
    (f"{HYBRID} execution.num_iters_per_train_update=3", "execution.num_iters_per_train_update", "sub-batches", "of 8"),
    (f"{ACTOR}.ppo_max_token_len_per_gpu=255", f"{ACTOR}.ppo_max_token_len_per_gpu", "256 tokens", "at least 256"),
    (f"{ROLLOUT}.max_num_batched_tokens=127", f"{ROLLOUT}.max_num_batched_tokens", "128 tokens", "at least 128"),
    (f"{ROLLOUT}.max_num_seqs=3", f"{ROLLOUT}.max_num_seqs", "in flight together", "at least 4"),
    ("data.max_response_length=1000", "data.max_response_length", "context is 1024", "at most 896"),
    ("data.max_prompt_length=2000", "data.max_response_length", "context is 1024", "Lower data.max_prompt_length"),
    # devices
    (
        f"{HYBRID} execution.resource={{actor: [1, 3]}} {ACTOR}.tensor_model_parallel_size=2",
        f"{ACTOR}.tensor_model_parallel_size",
        "3 devices of actor",
        "divisor",
    ),
    (
        f"{HYBRID} execution.resource={{rollout: [1, 3]}} {ROLLOUT}.tensor_model_parallel_size=2 {ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size",
        "3 devices of rollout",
        "divisor",
    ),
    (f"{ACTOR}.tensor_model_parallel_size=2", f"{ACTOR}.tensor_model_parallel_size", "1 devices of actor", "resource"),
    ("runtime.name=local execution.resource={actor: [1, 2]}", "runtime.name", "one device a role", "ray"),
    (f"{HYBRID} execution.resource={{ref: [1, 2]}}", "execution.resource.ref", "a tag here", "Remove"),
    ("execution.resource={reference: [1, 1]}", "execution.resource.reference", "a tag here", "Remove"),
    (f"{HYBRID} execution.resource={{actor_fwd: [1, 2]}}", "execution.resource.actor_fwd", "no role", "actor, rollout"),
    ("execution.resource={critic: [1, 1]}", "execution.resource.critic", "no critic", "critic.enable"),
    (
        "execution.mode=fully_async execution.resource={reference: [1, 1]}",
        "execution.resource.reference",
        "no KL",
        "Remove",
    ),
    ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.hybrid_engine", "in colocate", "true"),
    (f"{HYBRID} actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.hybrid_engine", "in hybrid", "true"),
    (
        "execution.mode=fully_async actor_rollout_ref.hybrid_engine=true",
        "actor_rollout_ref.hybrid_engine",
        "role of its",
        "false",
    ),
    # what a mode lacks
    ("execution.max_staleness=1", "execution.max_staleness", "no meaning in colocate", "hybrid"),
    (
        "--fully-async --balance-data",
        "execution.balance_data",
        "--balance-data is not supported in pure fully-async mode",
        "--hybrid",
    ),
    ("--fully-async --colocate", "--fully-async --colocate", "different modes", "--hybrid"),
    (f"{ROLLOUT}.on_weight_update=abort", f"{ROLLOUT}.on_weight_update", "in colocate", "hybrid"),
    ("execution.weight_sync.overlap=true", "execution.weight_sync.overlap", "no transfer", "false"),
    (f"{HYBRID} {ROLLOUT}.partial=discard", f"{ROLLOUT}.partial", "nothing is aborted", "abort"),
    (f"{HYBRID} {ROLLOUT}.keep_kv=recompute", f"{ROLLOUT}.keep_kv", "no generation goes on", "keep"),
    (
        f"{HYBRID} execution.train_pipelining=accumulate algorithm.adv_estimator=reinforce_plus_plus",
        "execution.train_pipelining",
        "whole partition",
        "off",
    ),
    (
        f"{HYBRID} execution.train_pipelining=accumulate {ACTOR}.ppo_epochs=2",
        "execution.train_pipelining",
        "one pass",
        "1",
    ),
    (
        f"{HYBRID} execution.train_pipelining=accumulate {ACTOR}.ppo_mini_batch_size=4",
        "execution.train_pipelining",
        "whole partition",
        "step",
    ),
    (
        f"--hybrid --train-pipelining step --num-iters-per-train-update 4 {ACTOR}.ppo_mini_batch_size=4",
        "execution.train_pipelining",
        "sub-batches",
        "ppo_mini_batch_size",
    ),
    # run
    ("evaluation.interval=5", "evaluation.interval", "no held-out prompts", "data.val_files"),
    ("evaluation.at_start=true", "evaluation.at_start", "no held-out prompts", "data.val_files"),
    ("evaluation.k=[4]", "evaluation.k[0]", "pass@4", "at most 1"),
    ("evaluation.n=4", "evaluation.n", "equal", "temperature"),
    (f"{ACTOR}.optim.warmup_steps=20", f"{ACTOR}.optim.warmup_steps", "20 optimizer steps", "less than 20"),
    (
        "trainer={total_epochs: 1, output_dir: out} data.train_batch_size=64",
        "data.train_batch_size",
        "nothing would",
        "40",
    ),
    (f"trainer.exact=true {MODEL}.dtype=bfloat16", "trainer.exact", "float32", "dtype: float32"),
    (f"{MODEL}.lora_rank=4 {MODEL}.lora_target_modules=[]", f"{MODEL}.lora_target_modules", "nothing", "all-linear"),
    ("data.train_files=[] data.reasoning_gym={datset: x}", "data.reasoning_gym.dataset", "not named", "'datset'"),
    (
        "data.train_files=[] data.reasoning_gym={dataset: x, size: '5'}",
        "data.reasoning_gym.size",
        "whole number",
        ">= 1",
    ),
    ("data.reasoning_gym={dataset: chain_sum}", "data.reasoning_gym", "data.train_files already", "one of the two"),
    ("data.train_files=[] data.source={file: absent.py, type: S}", "data.source.file", "can't be read", "existing"),
    ("data.train_files=[] data.source={file: scorers.py, type: S}", "data.source.type", "no such class", "Polite"),
]


@pytest.fixture
def furnished(place: Path) -> Path:
    """``place`` with the broken things that the refusals name."""
    (place / "empty.jsonl").touch()
    (place / "broken.parquet").write_bytes(b"PAR1 not really PAR1")
    (place / "broken.jsonl").write_text("{oops\n")
    good = '{"prompt": "1+1=", "answer": "2"}\n'
    (place / "half_broken.jsonl").write_text("{oops\n" + '{"prompt": "1+1="}\n' + good * 8)
    (place / "table.csv").write_text("a,b\n1,2\n")
    (place / "empty_folder").mkdir()
    (place / "broken_model").mkdir()
    (place / "broken_model" / "config.json").write_text("{oops")
    (place / "broken.py").write_text("def mine(response:\n")
    (place / "scorers.py").write_text(
        "def loud(response, *, bonus: float = 1.0):\n    return bonus\n\n\n"
        "class PoliteManager:\n    def __init__(self, word='please'):\n        self.word = word\n\n"
        "    def __call__(self, data):\n        return [0.0] * len(data)\n"
    )
    (place / "broken_plugin.py").write_text("1 / 0\n")
    (place / "needy_plugin.py").write_text("import not_there\n")
    (place / "lab.py").write_text(LAB)
    return place


LAB = """
from tandem.algorithms import ADVANTAGES, POLICY_LOSSES
from tandem.rollout.registry import register_engine


if "odd" not in ADVANTAGES:  # tests import it in several folders
    @ADVANTAGES.register("odd")
    def odd(token_rewards, response_mask, mood):
        return token_rewards, token_rewards

    @POLICY_LOSSES.register("plain")
    def plain(logprobs, advantages, response_mask):
        return None

    @register_engine("mute", logprobs=False)
    def mute(model):
        return None
"""


def test_the_run_itself_has_no_problem(problems_of: Problems) -> None:
    assert problems_of() == []


@pytest.mark.parametrize(("words", "key", "reason", "remedy"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refused(furnished: Path, problems_of: Problems, words: str, key: str, reason: str, remedy: str) -> None:
    found = problems_of(*_split(words))
    assert [problem.key for problem in found] == [key]
    (problem,) = found
    assert reason in problem.reason
    assert remedy in problem.remedy
    assert problem.remedy
    json.dumps(problem.key)
    assert str(problem).count("\n") == 0


def _split(words: str) -> list[str]:
    """Words at blanks that are not inside a mapping or a list."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(words):
        depth += (letter in "{[") - (letter in "}]")
        if letter == " " and depth == 0:
            parts.append(words[start:index])
            start = index + 1
    return [*parts, words[start:]]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo"])
def test_b03_estimators_with_a_group_baseline_are_refused_with_one_sample(
    problems_of: Problems, estimator: str
) -> None:
    (problem,) = problems_of(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=1")
    assert (problem.key, problem.value) == (f"{ROLLOUT}.n", 1)
    assert estimator in problem.reason
    assert problems_of(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=2") == []
    assert problems_of("algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1") == []


def test_b56_filtering_groups_of_one_is_refused(problems_of: Problems) -> None:
    words = ["algorithm.filter_groups.enable=true", "algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1"]
    (problem,) = problems_of(*words)
    assert problem.key == "algorithm.filter_groups.enable"
    assert "no step ever filled" in problem.reason
    assert problems_of("algorithm.filter_groups.enable=true") == []


def test_b31_options_that_would_bias_each_other_are_refused_together_and_allowed_apart(problems_of: Problems) -> None:
    truncated, tis, full = f"{ROLLOUT}.top_p=0.9", "--use-tis", f"{ROLLOUT}.logprobs_of=full"
    assert problems_of(truncated) == []
    assert problems_of(tis) == []
    assert [p.key for p in problems_of(truncated, tis)] == ["algorithm.use_tis"]
    assert problems_of(truncated, tis, full) == []


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("data.on_overlong_prompt=errror", "data.on_overlong_prompt"),
        ("data.on_overlong_prompt=middle", "data.on_overlong_prompt"),
        ("data.max_prompt_length=0", "data.max_prompt_length"),
        ("data.max_prompt_length='512'", "data.max_prompt_length"),
    ],
)
def test_b92_a_length_policy_that_means_nothing_is_refused(problems_of: Problems, word: str, key: str) -> None:
    assert [problem.key for problem in problems_of(word)] == [key]


def test_b92_each_length_policy_is_accepted(problems_of: Problems) -> None:
    for policy in ("error", "drop", "left", "right"):
        assert problems_of(f"data.on_overlong_prompt={policy}") == []


def test_b90_everything_wrong_is_found_at_once_before_any_model_is_loaded(
    furnished: Path, problems_of: Problems
) -> None:
    words = [
        *(f"{ACTOR}.ppo_mini_batch_size=3", "data.train_files=[absent.jsonl]", "reward_manager.type=exactly"),
        *(
            f"{ROLLOUT}.temperature=0",
            "algorithm.adv_estimator=gae",
            "trainer.logger=[consle]",
            f"{MODEL}.path=./absent",
        ),
    ]
    assert {problem.key for problem in problems_of(*words)} == {
        f"{ACTOR}.ppo_mini_batch_size",
        "data.train_files[0]",
        "reward_manager.type",
        f"{ROLLOUT}.temperature",
        "algorithm.adv_estimator",
        "trainer.logger[0]",
        f"{MODEL}.path",
    }


def test_a_logger_whose_package_is_missing_says_how_to_get_it(
    problems_of: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else found(name, *rest)
    )
    (problem,) = problems_of("trainer.logger=[console, tensorboard]")
    assert problem.key == "trainer.logger[1]"
    assert "pip install" in problem.remedy


def test_a_hub_id_is_taken_as_it_is_where_the_hub_may_be_asked(
    problems_of: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert problems_of(f"{MODEL}.path=owner/name") == []
    (problem,) = problems_of(f"{MODEL}.path=modle")
    assert problem.key == f"{MODEL}.path"


def test_a_cached_hub_model_is_read_offline(
    place: Path, problems_of: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = place / "hub" / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"n_positions": 200}))
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    (problem,) = problems_of(f"{MODEL}.path=owner/name")
    assert problem.key == "data.max_response_length"
    assert "context is 200" in problem.reason


@pytest.mark.parametrize(
    "words",
    [
        "algorithm.kl={in: loss, coef: 0.01}",
        "algorithm.kl={in: reward, controller: adaptive}",
        "algorithm.policy_loss={type: ppo_clip, clip_ratio_c: null, clip_ratio: 1}",
        "algorithm.adv_estimator={type: grpo, norm_adv_by_std: false}",
        "reward_manager={type: weighted_sum, parts: [{type: exact, weight: 1}, {type: gsm8k, method: flexible}]}",
        "reward_manager={type: polite, file: scorers.py, word: thanks}",
        "reward_manager={type: loud, file: scorers.py, bonus: 2}",
        "data.answer_key=null reward_manager={type: keyword, keyword: ok}",
        "data.extra_keys=[topic.name]",
        "data.template={prompt}is",
        "data.train_files=[half_broken.jsonl] data.on_bad_row=drop",
        "data.val_files=[val.jsonl] evaluation={interval: 5, n: 4, k: [1, 4], temperature: 1.0}",
        "data.train_files=[] data.reasoning_gym={dataset: chain_sum, size: 50}",
        "--use-tis actor_rollout_ref.actor.ppo_epochs=2",
        "execution.mode=fully_async algorithm.kl.in=loss execution.resource={ref: [1, 1]}",
        "algorithm.adv_estimator=gae critic.enable=true",
        "trainer.resume=auto",
    ],
)
def test_accepted(furnished: Path, problems_of: Problems, words: str) -> None:
    assert problems_of(*_split(words)) == []
