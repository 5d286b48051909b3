"""The rollout role: workers that fill partitions, one for each engine."""
