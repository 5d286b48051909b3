"""Rewards: the registry of scorers, the built-in ones, and scoring in processes that can be killed."""
