"""Named copies of weights, and their way to the rollout engines."""
