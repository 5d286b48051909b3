"""The command-line flags that are other names of fields, beside ``--dotted.key`` for every field."""

from __future__ import annotations

MODE_FLAGS = ("hybrid", "fully_async", "colocate")
"""Flags that choose ``execution.mode``. ``--hybrid`` stands for the other two together and wins over them."""

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"

TRAIN_FLAGS = {
    # execution
    "resource": "execution.resource",
    "max_staleness": "execution.max_staleness",
    "num_iters_per_train_update": "execution.num_iters_per_train_update",
    "balance_data": "execution.balance_data",
    "train_pipelining": "execution.train_pipelining",
    "num_data_storage_units": "execution.data_plane.num_data_storage_units",
    # model
    "model": "actor_rollout_ref.model.path",
    "hf_checkpoint": "actor_rollout_ref.model.path",
    "lora_rank": "actor_rollout_ref.model.lora_rank",
    "lora_alpha": "actor_rollout_ref.model.lora_alpha",
    "gradient_checkpointing": "actor_rollout_ref.model.gradient_checkpointing",
    # actor
    "lr": f"{_ACTOR}.optim.lr",
    "adam_beta1": f"{_ACTOR}.optim.adam_beta1",
    "adam_beta2": f"{_ACTOR}.optim.adam_beta2",
    "adam_eps": f"{_ACTOR}.optim.eps",
    "train_backend": f"{_ACTOR}.strategy",
    "weight_decay": f"{_ACTOR}.optim.weight_decay",
    "clip_grad": f"{_ACTOR}.optim.grad_clip",
    "lr_decay_style": f"{_ACTOR}.optim.schedule",
    "lr_warmup_iters": f"{_ACTOR}.optim.warmup_steps",
    "global_batch_size": f"{_ACTOR}.global_batch_size",
    "mini_batch_size": f"{_ACTOR}.ppo_mini_batch_size",
    "offload_train": f"{_ACTOR}.offload",
    "micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size",
    "max_tokens_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    "tensor_model_parallel_size": f"{_ACTOR}.tensor_model_parallel_size",
    # rollout
    "rollout": f"{_ROLLOUT}.name",
    "n_samples_per_prompt": f"{_ROLLOUT}.n",
    "offload_rollout": f"{_ROLLOUT}.offload",
    "rollout_temperature": f"{_ROLLOUT}.temperature",
    "rollout_top_p": f"{_ROLLOUT}.top_p",
    "rollout_top_k": f"{_ROLLOUT}.top_k",
    "rollout_num_gpus_per_engine": f"{_ROLLOUT}.tensor_model_parallel_size",
    "sglang_mem_fraction_static": f"{_ROLLOUT}.gpu_memory_utilization",
    # critic
    "critic_lr": "critic.optim.lr",
    "critic_lr_warmup_iters": "critic.optim.warmup_steps",
    "num_critic_only_steps": "critic.warmup_steps",
    "value_clip": "critic.cliprange_value",
    # reference
    "ref_update_interval": "actor_rollout_ref.ref.update_interval",
    # algorithm
    "advantage_estimator": "algorithm.adv_estimator",
    "use_kl_loss": "algorithm.use_kl_loss",
    "use_kl_in_reward": "algorithm.use_kl_in_reward",
    "kl_coef": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_loss_coef",
    "kl_type": "algorithm.kl.type",
    "kl_loss_type": "algorithm.kl.type",
    "entropy_coef": "algorithm.entropy_coef",
    "use_tis": "algorithm.use_tis",
    "use_rollout_routing_replay": "actor_rollout_ref.actor.router_replay",
    "eps_clip": "algorithm.policy_loss.clip_ratio",
    "eps_clip_high": "algorithm.policy_loss.clip_ratio_high",
    "eps_clip_c": "algorithm.policy_loss.clip_ratio_c",
    "tis_clip": "algorithm.tis_cap",
    # reward
    "rm_type": "reward_manager.type",
    "reward": "reward_manager.type",
    # data
    "train_files": "data.train_files",
    "prompt_data": "data.train_files",
    "val_files": "data.val_files",
    "input_key": "data.prompt_key",
    "label_key": "data.answer_key",
    "apply_chat_template": "data.chat",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "system_prompt": "data.system_prompt",
    "rollout_batch_size": "data.train_batch_size",
    "rollout_max_prompt_len": "data.max_prompt_length",
    "rollout_max_response_len": "data.max_response_length",
    "rollout_shuffle": "data.shuffle",
    "use_streaming_dataset": "data.use_streaming_dataset",
    # evaluation
    "eval_interval": "evaluation.interval",
    "n_samples_per_eval_prompt": "evaluation.n",
    "eval_temperature": "evaluation.temperature",
    "eval_top_p": "evaluation.top_p",
    # trainer
    "num_rollout": "trainer.total_steps",
    "total_steps": "trainer.total_steps",
    "num_epoch": "trainer.total_epochs",
    "seed": "trainer.seed",
    "exact": "trainer.exact",
    "save": "trainer.output_dir",
    "output_dir": "trainer.output_dir",
    "save_interval": "trainer.save_interval",
    "max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "resume": "trainer.resume",
    "logger": "trainer.logger",
    "use_tensorboard": "trainer.use_tensorboard",
    "plugins": "plugins",
}
"""Flag (dashes as underscores) -> dotted path in a training run."""

SFT_FLAGS = {
    "model": "model.path",
    "lora_rank": "model.lora_rank",
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "clip_grad": "optim.grad_clip",
    "train_files": "data.train_files",
    "val_files": "data.val_files",
    "batch_size": "data.train_batch_size",
    "max_length": "data.max_length",
    "max_tokens_per_gpu": "data.max_token_len_per_gpu",
    "eval_interval": "evaluation.interval",
    "total_steps": "trainer.total_steps",
    "num_epoch": "trainer.total_epochs",
    "seed": "trainer.seed",
    "output_dir": "trainer.output_dir",
    "save": "trainer.output_dir",
    "save_interval": "trainer.save_interval",
    "resume": "trainer.resume",
    "logger": "trainer.logger",
}
"""Flag (dashes as underscores) -> dotted path in an SFT run."""
