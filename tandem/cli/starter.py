"""``tandem init``: configs to start from. A test loads each of them."""

from __future__ import annotations

TRAIN = """\
# A training run. `tandem plan FILE` says what it means, `tandem train FILE` runs it.
# Every key, its default and its meaning: docs/config.md. Any key can be given on the command line:
#   tandem train FILE actor_rollout_ref.rollout.n=16 --lr 1e-5

execution:
  mode: colocate                # colocate | hybrid | fully_async

actor_rollout_ref:
  model:
    path: Qwen/Qwen3-0.6B       # a Hugging Face folder or a hub id
    dtype: float32              # float32 | bfloat16
    # lora_rank: 16             # train adapters only
  actor:
    # ppo_mini_batch_size: 64   # prompts per optimizer step; default: all of a step
    optim:
      lr: 1e-6
  rollout:
    name: hf                    # the engine
    n: 8                        # samples per prompt
    temperature: 1.0

algorithm:
  adv_estimator: grpo           # grpo | rloo | reinforce_plus_plus | ...
  policy_loss: {type: ppo_clip, clip_ratio: 0.2}
  kl: {in: "off"}               # off | loss | reward; then also: type: k3, coef: 0.001

reward_manager:
  type: exact                   # exact | keyword | gsm8k | math | ..., or your own with file: rewards.py
  # file: rewards.py

data:
  train_files: [train.jsonl]    # jsonl, parquet, csv ...
  # val_files: [val.jsonl]      # held-out prompts
  prompt_key: prompt
  answer_key: answer
  train_batch_size: 64          # prompts per step
  max_prompt_length: 512        # tokens
  max_response_length: 512

# evaluation: {interval: 10, at_start: true}

trainer:
  total_steps: 100
  output_dir: runs/first
  save_interval: 50
  logger: [console]             # console | tensorboard | wandb | mlflow ...; metrics.jsonl is always written
"""

SFT = """\
# Supervised fine-tuning. `tandem plan FILE` says what it means, `tandem sft FILE` runs it.
# Every key, its default and its meaning: docs/config.md.

model:
  path: Qwen/Qwen3-0.6B         # a Hugging Face folder or a hub id
  # lora_rank: 16               # train adapters only

data:
  train_files: [train.jsonl]    # jsonl, parquet, csv ...
  # val_files: [val.jsonl]
  prompt_key: prompt            # or messages_key: messages, for conversations
  response_key: response
  max_length: 1024              # tokens of an example
  train_batch_size: 32          # examples per optimizer step

optim:
  lr: 1e-5
  # schedule: cosine
  # warmup_steps: 10

trainer:
  total_epochs: 1
  output_dir: runs/sft
"""


STARTERS = {"train": TRAIN, "sft": SFT}
"""The commented configs by what ``tandem init`` calls them."""
