"""What a generated config may say: each option is a few words that belong together, right ones and wrong ones."""

from __future__ import annotations

from tandem.algorithms import ADVANTAGES, DISTILLATIONS, KL_TYPES, POLICY_LOSSES, PREFERENCE_LOSSES

Option = tuple[tuple[str, ...], ...]
"""The ways to take it; ``{here}`` is the folder of the world."""

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
KEYWORDS = {
    "use_kl_loss": ("--use-kl-loss", "--kl-loss-coef", "0.01"),
    "use_kl_in_reward": ("--use-kl-in-reward", "--kl-coef", "0.01"),
    "clip": ("--eps-clip", "0.1", "--eps-clip-high", "0.3"),
}


def ways(key: str, *values: object) -> Option:
    """One key with one of several values, as YAML."""
    return tuple((f"{key}={value}",) for value in values)


def optimizer(at: str) -> list[Option]:
    """The section of AdamW at ``at``."""
    return [
        ways(f"{at}.lr", "1e-3", "1e-9", "0.3"),
        ways(f"{at}.betas", "[0.0, 0.9]", "[0.9]", "[0.9, 1.0]"),
        ways(f"{at}.eps", "1e-3"),
        ways(f"{at}.weight_decay", "0.1"),
        ways(f"{at}.grad_clip", "0.01", "1e9"),
        (
            (f"{at}.schedule=cosine", f"{at}.min_lr_ratio=0.1"),
            (f"{at}.schedule=cosine", f"{at}.num_cycles=1.5"),
            (f"{at}.schedule=linear", f"{at}.warmup_steps=1"),
            (f"{at}.warmup_steps=1",),
            (f"{at}.warmup_steps=9",),
            (f"{at}.min_lr_ratio=0.5",),
        ),
    ]


MODELS = [
    ways(f"{MODEL}.dtype", "bfloat16"),
    ways(f"{MODEL}.gradient_checkpointing", "true"),
    ways(f"{MODEL}.tokenizer_path", "{here}/other", "{here}/nowhere"),
    (
        (f"{MODEL}.lora_rank=2",),
        (f"{MODEL}.lora_rank=1", f"{MODEL}.lora_target_modules=[q_proj, down_proj]", "trainer.export=adapter"),
        (f"{MODEL}.lora_rank=2", f"{MODEL}.lora_target_modules=[nope]"),
        (f"{MODEL}.lora_rank=2", f"{MODEL}.dtype=bfloat16", f"{MODEL}.lora_base_dtype=bfloat16"),
        (f"{MODEL}.adapter_path={{here}}/adapted/final",),
        (f"{MODEL}.adapter_path={{here}}/adapted/final", f"{MODEL}.lora_alpha=4"),
        (f"{MODEL}.lora_alpha=4",),
        ("trainer.export=adapter",),
    ),
]

MODES: Option = (
    (),
    ("execution.mode=colocate", "execution.balance_data=true"),
    ("--hybrid",),
    ("execution.mode=hybrid", "execution.max_staleness=0"),
    ("execution.mode=hybrid", "execution.max_staleness=2", "execution.num_iters_per_train_update=2"),
    ("execution.mode=hybrid", "execution.num_iters_per_train_update=2", "execution.train_pipelining=accumulate"),
    ("execution.mode=hybrid", "execution.num_iters_per_train_update=2", "execution.train_pipelining=step"),
    ("execution.mode=hybrid", "execution.weight_sync.overlap=true", "execution.balance_data=true"),
    ("execution.mode=fully_async",),
    ("execution.mode=fully_async", "execution.max_staleness=0"),
    ("execution.mode=fully_async", "execution.max_staleness=3", "execution.num_iters_per_train_update=4"),
    ("--fully-async", "execution.weight_sync.overlap=true"),
    ("--fully-async", "--balance-data"),
)

EXECUTION = [
    ways("execution.weight_sync.bucket_mb", "1"),
    ways("execution.weight_sync.transport", "shared_memory", "collective"),
    ways("execution.weight_sync.lora", "merged", "adapter"),
    ways("execution.data_plane.capacity_groups", "4", "1", "99"),
    ways("execution.data_plane.num_data_storage_units", "2"),
    ways("execution.max_engine_restarts", "0"),
    ways("execution.resource", "{{actor: [1, 1], rollout: [1, 1]}}", "{{actor: [1, 2]}}", "{{advantages: [1, 0]}}"),
    ways("execution.num_iters_per_train_update", "1", "3", "4"),
    ways("runtime.torch_threads", "1", "0"),
    ways("runtime.device", "cpu"),
    ways("runtime.name", "local"),
]

GENERATION = [
    ways(f"{ROLLOUT}.n", "1", "2", "3", "4"),
    ways(f"{ROLLOUT}.n", "1", "2", "3", "4"),
    ways(f"{ROLLOUT}.temperature", "0.5", "1.7", "0.2", "0"),
    ((f"{ROLLOUT}.top_p=0.9",), (f"{ROLLOUT}.top_k=5", f"{ROLLOUT}.logprobs_of=full"), (f"{ROLLOUT}.top_k=1",)),
    ways(f"{ROLLOUT}.stop_token_ids", "[3]", "[1, 2, 3, 4]", "[999]", "[-1]"),
    ways(f"{ROLLOUT}.ignore_eos", "true"),
    ways(f"{ROLLOUT}.max_num_seqs", "4", "8", "1"),
    ways(f"{ROLLOUT}.max_num_batched_tokens", "8", "2"),
    (
        (f"{ROLLOUT}.on_weight_update=abort", f"{ROLLOUT}.partial=discard"),
        (f"{ROLLOUT}.on_weight_update=abort",),
        (f"{ROLLOUT}.on_weight_update=keep", f"{ROLLOUT}.keep_kv=recompute"),
        (f"{ROLLOUT}.on_weight_update=keep",),
        (f"{ROLLOUT}.partial=discard",),
    ),
    ways(f"{ROLLOUT}.do_sample", "false"),
    ways(f"{ROLLOUT}.name", "vllm", "hff"),
]

TRAINING = [
    ways(f"{ACTOR}.ppo_mini_batch_size", "1", "2", "3"),
    ways(f"{ACTOR}.global_batch_size", "4", "8", "5"),
    ways(f"{ACTOR}.ppo_epochs", "2", "3"),
    ways(f"{ACTOR}.ppo_micro_batch_size", "1", "2", "3"),
    ways(f"{ACTOR}.ppo_max_token_len_per_gpu", "12", "16", "64", "4"),
    ways(f"{ACTOR}.tensor_model_parallel_size", "2"),
    ways(f"{ACTOR}.ulysses_sequence_parallel_size", "2"),
    ways("actor_rollout_ref.ref.update_interval", "1", "2"),
    *optimizer(f"{ACTOR}.optim"),
]

_SHAPED = [
    ("algorithm.adv_estimator={{type: grpo, norm_adv_by_std: false}}",),
    ("algorithm.adv_estimator={{type: gdpo, weights: [1.0, 2.0]}}", "reward_manager={{type: weighted_sum, parts: "
     "[{{type: varied, file: {here}/code.py}}, {{type: match_fraction}}]}}"),
    ("algorithm.adv_estimator={{type: gae, lam: 0.9, gamma: 0.99}}", "critic.enable=true"),
    ("algorithm.adv_estimator={{type: reinforce_plus_plus, gamma: 0.9}}", f"{ROLLOUT}.n=1"),
    ("algorithm.adv_estimator={{type: grpo, epsilonn: 1}}",),
    ("algorithm.adv_estimator=optimal_token_baseline", "algorithm.old_logprobs=recompute"),
    ("--advantage-estimator", "ppo"),
]  # fmt: skip
_LOSSES = [
    ("algorithm.policy_loss={{type: ppo_clip, clip_ratio_high: 0.28, clip_ratio_c: 2.0}}",),
    ("algorithm.policy_loss={{type: clip_cov, clip_cov_ratio: 0.2, clip_cov_lb: 0.0}}",),
    ("algorithm.policy_loss={{type: kl_cov, kl_cov_ratio: 0.5}}", "algorithm.old_logprobs=recompute"),
    ("algorithm.policy_loss={{type: dro, dro_beta: 0.1}}",),
    ("algorithm.policy_loss={{type: gspo, clip_ratio: 3.0e-4}}", "algorithm.loss_agg_mode=seq-mean-token-mean"),
    ("algorithm.policy_loss={{type: sapo, tau_pos: 0.0}}",),
]

ALGORITHM: list[Option] = [
    (*ways("algorithm.adv_estimator", *ADVANTAGES.names()), *_SHAPED),
    (*ways("algorithm.adv_estimator", *ADVANTAGES.names()), *_SHAPED),
    (*ways("algorithm.policy_loss.type", *POLICY_LOSSES.names()), *_LOSSES),
    (*ways("algorithm.policy_loss.type", *POLICY_LOSSES.names()), *_LOSSES),
    (*ways("algorithm.loss_agg_mode", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
     ("algorithm.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.loss_scale_factor=7")),
    (*(("algorithm.kl.in=loss", f"algorithm.kl.type={name}") for name in KL_TYPES.names()),
     *(("algorithm.kl.in=reward", f"algorithm.kl.type={name}") for name in KL_TYPES.names()),
     ("algorithm.kl={{in: reward, controller: adaptive, target: 0.01, horizon: 100}}",),
     ("algorithm.kl={{in: loss, coef: 0.0}}",), ("algorithm.kl.coef=0.1",),
     KEYWORDS["use_kl_loss"], KEYWORDS["use_kl_in_reward"]),
    (("critic.enable=true", "algorithm.adv_estimator=gae"),
     ("critic.enable=true", "algorithm.adv_estimator=gae", "critic.warmup_steps=1"),
     ("critic.enable=true", "algorithm.adv_estimator=gae", "critic.model.path={here}/other"),
     ("critic.enable=true", "algorithm.adv_estimator=gae", "critic.model={{path: {here}/other, lora_rank: 2}}"),
     ("critic.enable=true", "algorithm.adv_estimator=gae", "critic.ppo_epochs=2", "critic.cliprange_value=null"),
     ("critic.enable=true", "algorithm.adv_estimator=gae", "critic.loss_agg_mode=seq-mean-token-mean",
      "critic.ppo_max_token_len_per_gpu=12"), ("critic.enable=true",), ("critic.warmup_steps=1",)),
    *optimizer("critic.optim"),
    (*(("actor_rollout_ref.teacher.path={here}/other", f"algorithm.distillation={{{{type: {name}}}}}")
       for name in DISTILLATIONS.names()),
     *(("actor_rollout_ref.teacher.path={here}/model", f"algorithm.distillation={{{{type: {name}, only: true}}}}")
       for name in DISTILLATIONS.names()),
     ("actor_rollout_ref.teacher.by_source={{train: {here}/other}}", "algorithm.distillation={{type: reverse_kl}}"),
     ("actor_rollout_ref.teacher.path={here}/other", "algorithm.distillation={{type: jsd_topk, top_k: 3, beta: 0.2}}"),
     ("algorithm.distillation={{type: reverse_kl}}",)),
    ways("algorithm.entropy_coef", "0.01", "-0.01"),
    ways(f"{ACTOR}.router_aux_loss_coef", "0.01", "-0.01"),
    ways(f"{ACTOR}.router_replay", "true"),
    (("algorithm.use_tis=true",), ("algorithm.use_tis=true", "algorithm.tis_cap=1.1"),
     (f"{CORRECTION}={{{{weights: token, cap: 1.5}}}}",),
     (f"{CORRECTION}={{{{weights: sequence, floor: 0.5, normalize: true}}}}",),
     (f"{CORRECTION}={{{{reject: [{{{{by: seq_mean_k1, high: 1.5}}}}, {{{{by: token_k3, high: 2.0}}}}]}}}}",),
     (f"{CORRECTION}={{{{reject: [{{{{by: token_k1, quantile: 0.7}}}}], veto: 1.0e-4}}}}",),
     (f"{CORRECTION}={{{{reject: [{{{{by: seq_max_k2}}}}]}}}}",), (f"{CORRECTION}.cap=3",)),
    ways("algorithm.old_logprobs", "recompute", "rollout"),
    (("algorithm.filter_groups.enable=true",), ("algorithm.filter_groups={{enable: true, max_draws: 20}}",),
     ("algorithm.filter_groups.max_draws=9",)),
]  # fmt: skip

REWARDS: list[Option] = [
    (("reward_manager={{type: in_parts, file: {here}/code.py}}",),
     ("reward_manager={{type: sometimes, file: {here}/code.py}}",),
     ("reward_manager={{type: sometimes, file: {here}/code.py, on_error: refill}}",),
     ("reward_manager={{type: weighted_sum, parts: [{{type: varied, file: {here}/code.py}}, "
      "{{type: length_penalty, max_length: 4, buffer: 2, weight: 0.5}}]}}",),
     ("reward_manager={{type: by_source, routes: [{{source: t*, type: varied, file: {here}/code.py}}]}}",
      "data.data_source_key=topic"),
     ("reward_manager={{type: varied, file: {here}/nowhere.py}}",), ("reward_manager={{type: exakt}}",)),
    ways("reward_manager.workers", "2"),
    ways("reward_manager.timeout_s", "5", "0"),
]  # fmt: skip

DATA: list[Option] = [
    ways("data.train_batch_size", "1", "2", "3", "8"),
    ways("data.train_batch_size", "1", "2", "3", "8"),
    (*ways("data.max_response_length", "1", "2", "8", "40"),
     ("data.max_response_length=8", "algorithm.overlong=mask", f"{ROLLOUT}.stop_token_ids=[1, 2, 3]"),
     ("algorithm.overlong=mask", f"{ROLLOUT}.ignore_eos=true")),
    # One option: which prompts are too long depends on what is made of them, and all of them would be an error of rows.
    (("data.max_prompt_length=2", "data.on_overlong_prompt=left"),
     ("data.max_prompt_length=2", "data.on_overlong_prompt=drop"),
     ("data.max_prompt_length=40",), ("data.max_prompt_length=2", "data.on_overlong_prompt=right"),
     ("data.template='{{{{prompt}}}}='",), ("data.template='{{{{nope}}}}'",),
     ("data.template='{{{{answer}}}}+'", "data.chat=true"),
     ("data.chat=true",), ("data.chat=true", "data.system_prompt='1'", "data.max_prompt_length=9"),
     ("data.system_prompt='1'",),
     ("data.train_files={here}/asked.jsonl",), ("data.train_files={here}/asked.parquet",)),
    ways("data.train_files", "{here}/train.parquet", "[{here}/train.jsonl, {here}/val.jsonl]", "{here}/nowhere.jsonl"),
    (("data.train_files=[]", "data.source={{file: {here}/code.py, type: Digits}}"),
     ("data.train_files=[]", "data.source={{file: {here}/code.py, type: Digits, rows: 8}}"),
     ("data.source={{file: {here}/code.py, type: Digits}}",),
     ("data.train_files=[]", "data.source={{file: {here}/code.py, type: Digitz}}")),
    ways("data.shuffle", "false"),
    ways("data.use_streaming_dataset", "true"),
    ways("data.answer_key", "null", "topic"),
    (("data.uid_key=id",), ("data.extra_keys=[topic]",), ("data.data_source_key=topic",)),
    ways("data.on_bad_row", "drop"),
    (("data.val_files={here}/val.jsonl",), ("data.val_files={here}/val.jsonl", "evaluation.interval=1"),
     ("data.val_files={here}/val.parquet", "evaluation.interval=2", "evaluation.at_start=true"),
     ("data.val_files={here}/val.jsonl", "evaluation={{interval: 1, n: 2, temperature: 0.7, k: [1, 2]}}"),
     ("data.val_files={here}/val.jsonl", "evaluation={{interval: 1, n: 2}}"),
     ("data.val_files={here}/val.jsonl", "evaluation={{at_start: true, max_prompts: 1}}",
      "data.drop_val_prompts=false"),
     ("data.val_files={here}/val.jsonl", "evaluation={{interval: 1, temperature: 0.9, top_p: 0.5}}"),
     ("evaluation.interval=1",), ("evaluation.n=3",)),
]  # fmt: skip

TRAINER: list[Option] = [
    ways("trainer.seed", "1", "12345678901", "-1"),
    ways("trainer.exact", "true"),
    ways("trainer.save_interval", "1", "2"),
    (("trainer.save_interval=1", "trainer.keep_checkpoints=1"), ("trainer.keep_checkpoints=1",)),
    (
        ("data.val_files={here}/val.jsonl", "evaluation.interval=1", "trainer.keep_best=eval/reward"),
        ("trainer.keep_best=eval/reward",),
        ("trainer.project=sums",),
        ("trainer.run_name=first",),
    ),
    ways("trainer.rollouts_per_step", "0", "99"),
    ways("trainer.samples.every", "0", "2"),
    ways("trainer.samples.max_mb", "1"),
    ways("trainer.samples.tokens", "true"),
    ways("trainer.trace", "true"),
    ways("trainer.total_epochs", "1", "2"),
    ways("trainer.logger", "[console]", "[console, tensorboard]", "[nope]"),
    ways("trainer.max_idle_steps", "1"),
    ways("trainer.save_on_interrupt", "false"),
    ways("trainer.resume", "auto", "latest", "{here}/nowhere"),
]

TRAIN = [*MODELS, *EXECUTION, *GENERATION, *TRAINING, *ALGORITHM, *REWARDS, *DATA, *TRAINER]

PAIRED = "data.train_files={here}/pairs.jsonl"
PREFERENCES: list[Option] = [
    *MODELS,
    *optimizer(f"{ACTOR}.optim"),
    *TRAINER,
    (*((PAIRED, f"algorithm.policy_loss.type={name}") for name in PREFERENCE_LOSSES.names()),
     (PAIRED, "algorithm.policy_loss={{type: dpo, beta: 0.5, label_smoothing: 0.1}}"),
     (PAIRED, "algorithm.policy_loss={{type: simpo, gamma: 0.0}}"),
     ("data.train_files={here}/labelled.jsonl", "algorithm.policy_loss.type=kto", "data.label_key=good"),
     ("data.train_files={here}/labelled.parquet", "algorithm.policy_loss.type=dpo", "data.label_key=good")),
    ways(f"{ACTOR}.ppo_mini_batch_size", "1", "2", "3"),
    ways(f"{ACTOR}.ppo_epochs", "2"),
    ways(f"{ACTOR}.ppo_micro_batch_size", "1", "2"),
    ways(f"{ACTOR}.ppo_max_token_len_per_gpu", "24", "12"),
    ways("actor_rollout_ref.ref.update_interval", "1"),
    ways("data.train_batch_size", "1", "2", "3"),
    ways("data.chat", "true"),
    (*ways("data.max_response_length", "3", "30"),
     ("data.max_response_length=2", "data.on_overlong_response=drop"),
     ("data.max_response_length=2", "data.on_overlong_response=right")),
    (("data.val_files={here}/held_pairs.jsonl", "evaluation.interval=1"),
     ("data.val_files={here}/held_pairs.parquet", "evaluation={{at_start: true, max_prompts: 2}}"),
     ("evaluation.at_start=true",)),
    ways("algorithm.entropy_coef", "0.1"),
    ways("execution.mode", "hybrid"),
    ways("data.chosen_key", "rejected", "nope"),
]  # fmt: skip

SFT: list[Option] = [
    *optimizer("optim"),
    *TRAINER,
    ways("model.dtype", "bfloat16"),
    ways("model.gradient_checkpointing", "true"),
    (("model.lora_rank=2",), ("model.lora_rank=2", "trainer.export=adapter"),
     ("model.adapter_path={here}/adapted/final",), ("model.lora_rank=2", "model.lora_target_modules=[]")),
    (("model.path=''", "model.new={{alphabet: '{new}', hidden_size: 16, num_layers: 1, num_heads: 2}}"),
     ("model.new={{alphabet: 'ab'}}",),
     ("model.path=''", "model.new={{alphabet: '{new}', hidden_size: 18, num_heads: 4}}")),
    (("data.train_files={here}/talks.jsonl", "data.messages_key=messages"),
     ("data.train_files={here}/talks.parquet", "data.messages_key=messages", "data.add_eos=false"),
     ("data.train_files=[]", "data.source={{file: {here}/code.py, type: Digits}}"),
     ("data.train_files=[]", "data.mix=[{{files: [{here}/examples.jsonl], weight: 2.0}}, "
      "{{files: [{here}/talks.jsonl], messages_key: messages}}]"),
     ("data.mix=[{{files: [{here}/examples.jsonl]}}]",)),
    ways("data.chat", "true"),
    ways("data.add_eos", "false"),
    (*ways("data.max_length", "9", "32", "64"),
     ("data.max_length=7", "data.on_overlong=drop"), ("data.max_length=7", "data.on_overlong=right")),
    ways("data.train_batch_size", "1", "3", "8", "99"),
    ways("data.max_token_len_per_gpu", "16", "8"),
    ways("data.shuffle", "false"),
    (("data.val_files={here}/held_examples.jsonl", "evaluation.interval=1"),
     ("data.val_files={here}/held_examples.parquet", "evaluation={{interval: 2, max_new_tokens: 1}}"),
     ("data.val_files={here}/held_examples.jsonl", "evaluation={{interval: 1, stop_at_accuracy: 0.01}}"),
     ("evaluation.interval=1",), ("evaluation.stop_at_accuracy=0.5",)),
    ways("runtime.torch_threads", "1"),
]  # fmt: skip
