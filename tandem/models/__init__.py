"""Models shared by training and rollout: loading, attention over layouts, the log-prob head, tokenizers."""
