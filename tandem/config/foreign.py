"""Flags of the launch scripts of Relax and slime that are no keys here: what is done anyway, or what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Foreign:
    """A flag with what to write ``instead``; values in ``same`` say what is done here anyway and are accepted.

    ``takes``: nothing (a switch), one word, or all words up to the next flag.
    """

    instead: str
    same: tuple[str, ...] = ()
    takes: Literal["switch", "value", "values"] = "value"


_ONE_KIND = (
    "Leave it out, or write 1: devices share a model by tensor_model_parallel_size, or its rows by "
    "ulysses_sequence_parallel_size"
)
_MEGATRON = "Leave it out: strategy megatron takes no such setting"
_TRACKER = "Leave it out: write trainer.logger=[console, tensorboard]; every run has metrics.jsonl and report.html"
_WANDB = "Write trainer.logger=[console, wandb]; WANDB_API_KEY and the other variables of W&B are read by it"
_ENGINE = "Leave it out: engines are set by actor_rollout_ref.rollout.* (gpu_memory_utilization, max_num_seqs)"
_WATCHED = "Leave it out: engines are watched anyway (execution.max_engine_restarts)"
_OWN_CODE = "Leave it out: name code of your own by reward_manager.file, data.source.file or plugins"
_SHAPE = "Leave it out: the model's shape is in the config.json of its folder (--hf-checkpoint)"
_ALONE = "Leave it out: tandem sft trains on examples without a rollout"
_SWITCH: Literal["switch"] = "switch"
_VALUES: Literal["values"] = "values"

FOREIGN = {
    "moe_aux_loss_coeff": Foreign("Write actor_rollout_ref.actor.router_aux_loss_coef"),
    # devices
    "actor_num_nodes": Foreign("Write execution.resource={actor: [NODES, DEVICES], rollout: [NODES, DEVICES]}"),
    "actor_num_gpus_per_node": Foreign("Write execution.resource={actor: [NODES, DEVICES], rollout: [NODES, DEVICES]}"),
    "critic_num_nodes": Foreign("Write execution.resource={critic: [NODES, DEVICES], ...}"),
    "critic_num_gpus_per_node": Foreign("Write execution.resource={critic: [NODES, DEVICES], ...}"),
    "rollout_num_gpus": Foreign("Write execution.resource={rollout: [NODES, DEVICES], ...}"),
    "num_gpus_per_node": Foreign("Write execution.resource={rollout: [NODES, DEVICES], ...}"),
    "offload": Foreign("Leave it out, or write --offload-train true --offload-rollout true", takes=_SWITCH),
    "no_offload_train": Foreign("Write actor_rollout_ref.actor.offload=false", takes=_SWITCH),
    "no_offload_rollout": Foreign("Write actor_rollout_ref.rollout.offload=false", takes=_SWITCH),
    "use_health_check": Foreign(_WATCHED, takes=_SWITCH),
    "use_fault_tolerance": Foreign(_WATCHED, takes=_SWITCH),
    # checkpoints
    "ref_load": Foreign(
        "Leave it out: the reference is the model that training starts from; another model is a teacher "
        "(actor_rollout_ref.teacher.path with algorithm.distillation)"
    ),
    "load": Foreign("Write --resume to go on from trainer.output_dir, or trainer.resume=FOLDER of a checkpoint"),
    "critic_load": Foreign("Write critic.model.path=FOLDER; a resumed run brings its critic along"),
    "critic_save": Foreign("Leave it out: the critic is in the run's checkpoints"),
    "megatron_to_hf_mode": Foreign("Leave it out: checkpoints are Hugging Face folders", same=("bridge",)),
    "warm_hf_checkpoint_page_cache": Foreign("Leave it out", takes=_SWITCH),
    "async_save": Foreign("Leave it out: a save is whole before the next step", takes=_SWITCH),
    "no_save_optim": Foreign("Leave it out: a checkpoint is there to be resumed", takes=_SWITCH),
    "save_hf": Foreign("Leave it out: each checkpoint, and trainer.output_dir/final, hold the model", takes="value"),
    # data and rollouts
    "rollout_seed": Foreign("Write trainer.seed: everything random derives from it"),
    "rollout_max_context_len": Foreign("Write data.max_prompt_length and data.max_response_length"),
    "rollout_stop": Foreign("Write actor_rollout_ref.rollout.stop_token_ids=[ID, ...]", takes=_VALUES),
    "rollout_stop_token_ids": Foreign("Write actor_rollout_ref.rollout.stop_token_ids=[ID, ...]", takes=_VALUES),
    "rollout_skip_special_tokens": Foreign("Leave it out: special tokens are shown", takes=_SWITCH),
    "metadata_key": Foreign("Write data.extra_keys=[COLUMN, ...]"),
    "multimodal_keys": Foreign("Write data.image_key: the column of the images"),
    "over_sampling_batch_size": Foreign("Leave it out: what algorithm.filter_groups leaves out is drawn anew"),
    "dynamic_sampling_filter_path": Foreign("Write algorithm.filter_groups.enable=true"),
    "partial_rollout": Foreign(
        "Write actor_rollout_ref.rollout.on_weight_update=abort (partial: resume) or keep", takes=_SWITCH
    ),
    "num_steps_per_rollout": Foreign("Write actor_rollout_ref.actor.ppo_mini_batch_size=(prompts of a step / steps)"),
    "eval_prompt_data": Foreign("Write data.val_files=[FILE, ...]", takes=_VALUES),
    "eval_max_response_len": Foreign("Leave it out: data.max_response_length bounds held-out answers too"),
    "eval_input_key": Foreign("Leave it out: data.prompt_key names the column of held-out rows too"),
    "eval_label_key": Foreign("Leave it out: data.answer_key names the column of held-out rows too"),
    "skip_eval_before_train": Foreign("Write evaluation.at_start=false (the default)", same=("",), takes=_SWITCH),
    "log_passrate": Foreign("Write evaluation.k=[1, ...]", takes=_SWITCH),
    "reward_key": Foreign("Leave it out: a scorer gives a number, or a dict with score", same=("score",)),
    "rm_url": Foreign("Write reward_manager={type: judge, ...}"),
    "custom_rm_path": Foreign("Write reward_manager={type: NAME, file: FILE.py}, or type: package.module.name"),
    "custom_generate_function_path": Foreign(_OWN_CODE),
    "rollout_function_path": Foreign(_OWN_CODE),
    "data_source_path": Foreign("Write data.source={file: FILE.py, type: CLASS}"),
    # algorithm
    "loss_type": Foreign("Write algorithm.policy_loss.type=NAME; tandem sft fine-tunes", same=("policy_loss",)),
    "gamma": Foreign("Write algorithm.adv_estimator={type: gae, gamma: ...}", same=("1", "1.0")),
    "lambd": Foreign("Write algorithm.adv_estimator={type: gae, lam: ...}", same=("1", "1.0")),
    "normalize_advantages": Foreign(
        "Write an estimator that whitens: gae, reinforce_plus_plus, reinforce_plus_plus_baseline", takes=_SWITCH
    ),
    "disable_grpo_std_normalization": Foreign(
        "Write algorithm.adv_estimator={type: grpo, norm_adv_by_std: false}", takes=_SWITCH
    ),
    "disable_rewards_normalization": Foreign(
        "Write algorithm.adv_estimator={type: grpo, norm_adv_by_std: false}", takes=_SWITCH
    ),
    "use_rollout_logprobs": Foreign("Write algorithm.old_logprobs=rollout", takes=_SWITCH),
    "get_mismatch_metrics": Foreign("Leave it out: mismatch/* is measured anyway", same=("",), takes=_SWITCH),
    "use_opd": Foreign("Write algorithm.distillation={type: reverse_kl} and a teacher's path", takes=_SWITCH),
    "opd_kl_coef": Foreign("Write algorithm.distillation.coef"),
    "opd_teacher_load": Foreign("Write actor_rollout_ref.teacher.path"),
    "calculate_per_token_loss": Foreign("Write algorithm.loss_agg_mode=token-mean", same=("",), takes=_SWITCH),
    # optimizer and batches
    "optimizer": Foreign("Leave it out: it is AdamW", same=("adam", "adamw")),
    "min_lr": Foreign("Write actor_rollout_ref.actor.optim.min_lr_ratio: a part of the peak", same=("0", "0.0")),
    "lr_warmup_fraction": Foreign("Write actor_rollout_ref.actor.optim.warmup_steps, in updates"),
    "use_dynamic_batch_size": Foreign("Leave it out: micro-batches are token budgets", same=("",), takes=_SWITCH),
    "log_probs_max_tokens_per_gpu": Foreign("Leave it out: ppo_max_token_len_per_gpu bounds all forwards"),
    "update_weight_buffer_size": Foreign("Write execution.weight_sync.bucket_mb, in MiB"),
    "lora_target_modules": Foreign("Write actor_rollout_ref.model.lora_target_modules=[q_proj, ...]", takes=_VALUES),
    "lora_dropout": Foreign("Leave it out: there is no dropout", same=("0", "0.0")),
    "recompute_granularity": Foreign("Write --gradient-checkpointing: each layer is recomputed"),
    "recompute_method": Foreign("Write --gradient-checkpointing: each layer is recomputed"),
    "recompute_num_layers": Foreign("Write --gradient-checkpointing: each layer is recomputed"),
    "attention_dropout": Foreign("Leave it out: there is no dropout", same=("0", "0.0")),
    "hidden_dropout": Foreign("Leave it out: there is no dropout", same=("0", "0.0")),
    "pipeline_model_parallel_size": Foreign(_ONE_KIND, same=("1",)),
    "context_parallel_size": Foreign(_ONE_KIND, same=("1",)),
    "expert_model_parallel_size": Foreign(_ONE_KIND, same=("1",)),
    "expert_tensor_parallel_size": Foreign(_ONE_KIND, same=("1",)),
    "sequence_parallel": Foreign(_ONE_KIND, takes=_SWITCH),
    "attention_backend": Foreign(_MEGATRON),
    "attn_implementation": Foreign("Leave it out: attention is chosen for the device"),
    "accumulate_allreduce_grads_in_fp32": Foreign("Leave it out: gradients are float32", same=("",), takes=_SWITCH),
    "attention_softmax_in_fp32": Foreign(_MEGATRON, takes=_SWITCH),
    "no_rope_fusion": Foreign(_MEGATRON, takes=_SWITCH),
    "qkv_format": Foreign(_MEGATRON),
    "use_distributed_optimizer": Foreign("Leave it out: fsdp2 shards it, megatron does not", takes=_SWITCH),
    "overlap_grad_reduce": Foreign(_MEGATRON, takes=_SWITCH),
    "overlap_param_gather": Foreign(_MEGATRON, takes=_SWITCH),
    "optimizer_cpu_offload": Foreign(_MEGATRON, takes=_SWITCH),
    "use_precision_aware_optimizer": Foreign(_MEGATRON, takes=_SWITCH),
    "overlap_cpu_optimizer_d2h_h2d": Foreign(_MEGATRON, takes=_SWITCH),
    # trackers and engines
    "use_wandb": Foreign(_WANDB, takes=_SWITCH),
    "wandb_project": Foreign("Write trainer.project"),
    "wandb_group": Foreign("Leave it out: set WANDB_RUN_GROUP"),
    "wandb_key": Foreign("Leave it out: set WANDB_API_KEY"),
    "use_clearml": Foreign(_TRACKER, takes=_SWITCH),
    "use_metrics_service": Foreign(_TRACKER, takes=_SWITCH),
    "tb_project_name": Foreign("Write trainer.output_dir: TensorBoard's files are inside"),
    "tb_experiment_name": Foreign("Write trainer.output_dir: TensorBoard's files are inside"),
    "timeline_dump_dir": Foreign("Write trainer.trace=true"),
    "sglang_cuda_graph_bs": Foreign(_ENGINE, takes=_VALUES),
    # further ones of the scripts
    "tis_level": Foreign("Write algorithm.rollout_correction.weights=sequence instead of --use-tis", same=("token",)),
    "update_weights_interval": Foreign("Leave it out: weights travel after every step", same=("1",)),
    "ref_actor_config": Foreign("Leave it out: reference and actor_fwd compute as the actor does"),
    "keep_old_actor": Foreign("Leave it out: the policy of the step's start is kept where it is needed", takes=_SWITCH),
    "opd_type": Foreign("Write actor_rollout_ref.teacher.path: the teacher runs beside the actor or as its tag"),
    "opd_teacher_timeout_s": Foreign("Leave it out: execution.deadline_s bounds every wait"),
    "opd_log_prob_top_k": Foreign("Write algorithm.distillation={type: forward_kl_topk, top_k: ...}"),
    "use_lora": Foreign("Write actor_rollout_ref.model.lora_rank=16", takes=_SWITCH),
    "lora_target_preset": Foreign("Write actor_rollout_ref.model.lora_target_modules=all-linear, or [q_proj, ...]"),
    "lora_load": Foreign("Write actor_rollout_ref.model.adapter_path=FOLDER"),
    "save_lora": Foreign("Write trainer.export=adapter"),
    "lora_weight_decay": Foreign("Write actor_rollout_ref.actor.optim.weight_decay"),
    "loss_mask_type": Foreign("Leave it out: what is learned of a conversation follows from its chat template"),
    "disable_compute_advantages_and_returns": Foreign(_ALONE, takes=_SWITCH),
    "debug_train_only": Foreign(_ALONE, takes=_SWITCH),
    "debug_rollout_only": Foreign("Write evaluation.at_start=true, or use tandem eval", takes=_SWITCH),
    "save_debug_rollout_data": Foreign("Write trainer.rollouts_per_step: samples are in rollouts.jsonl"),
    "fsdp_full_params": Foreign(
        "Leave it out: checkpoints hold shards and, for export, the whole model", takes=_SWITCH
    ),
    "decoder_last_pipeline_num_layers": Foreign(_MEGATRON),
    "enable_mtp_training": Foreign("Leave it out: further-token heads are not trained", takes=_SWITCH),
    # the shape of a model
    **{
        name: Foreign(_SHAPE)
        for name in (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
            *("normalization", "norm_epsilon", "rotary_base", "rotary_percent", "vocab_size"),
            *("max_position_embeddings", "position_embedding_type", "num_experts"),
        )
    },
    "spec": Foreign(_SHAPE, takes=_VALUES),
    **{
        name: Foreign(_SHAPE, takes=_SWITCH)
        for name in (
            *("swiglu", "group_query_attention", "disable_bias_linear", "add_qkv_bias", "qk_layernorm"),
            *("use_rotary_position_embeddings", "untie_embeddings_and_output_weights", "apply_layernorm_1p"),
            *("attention_output_gate", "use_gated_attention"),
        )
    },
}
"""Flag (dashes as underscores) -> what is to be written."""

FAMILIES = {
    "sglang_": Foreign(_ENGINE, takes=_VALUES),
    "vllm_": Foreign(_ENGINE, takes=_VALUES),
    "wandb_": Foreign(_WANDB, takes=_VALUES),
    "moe_": Foreign(_SHAPE, takes=_VALUES),
    "mtp_": Foreign(_SHAPE, takes=_VALUES),
}
"""How flags begin of which there are many, that are handed on to other programs -> what is to be written."""


def foreign_flag(name: str) -> Foreign | None:
    """Return what is known of the flag ``name`` (dashes as underscores) of other programs; None of one that
    none has.
    """
    family = next((flag for begin, flag in FAMILIES.items() if name.startswith(begin)), None)
    return FOREIGN.get(name, family)
