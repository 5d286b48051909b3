"""Rollout engines: prompts in as tokens, samples out as tokens, log-probs and the version of each token."""
