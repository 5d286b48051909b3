"""A training loop of one's own over Tandem's parts: ``python examples/own_loop/loop.py CONFIG [KEY=VALUE]...``

``run_ppo`` is written as programs for verl are; only the import, and the line that prints, are Tandem's.
"""

import sys

from tandem import (
    build_actor_rollout_ref,
    build_critic,
    build_dataloader,
    build_reward_manager,
    compute_grpo_loss,
    load_config,
)


def run_ppo(config):
    # Step 1: 构建Hybrid复合对象
    actor_rollout_ref = build_actor_rollout_ref(config.actor_rollout_ref)

    # Step 2: 构建其他组件
    reward_manager = build_reward_manager(config.reward_manager)
    critic = build_critic(config.critic) if config.critic.enable else None

    # Step 3: 启动Hybrid训练循环
    for epoch in range(config.trainer.total_epochs):
        for batch in dataloader:
            # Hybrid调度器自动编排以下步骤：
            rollout_outputs = actor_rollout_ref.rollout(batch.prompts)
            rewards = reward_manager(rollout_outputs)
            loss = compute_grpo_loss(
                rollout_outputs=rollout_outputs,
                rewards=rewards,
                actor_rollout_ref=actor_rollout_ref,
                critic=critic
            )
            actor_rollout_ref.actor.step(loss)  # 自动触发actor参数更新
            print(f"reward {rewards.mean():.3f}")


if __name__ == "__main__":
    config = load_config(sys.argv[1], sys.argv[2:])
    dataloader = build_dataloader(config)
    run_ppo(config)
