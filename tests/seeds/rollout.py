# type: ignore
# ruff: noqa
rollout_outputs = actor_rollout_ref.rollout(
    prompts=prompts,
    temperature=config.actor_rollout_ref.rollout.temperature,
    top_p=config.actor_rollout_ref.rollout.top_p,
)
