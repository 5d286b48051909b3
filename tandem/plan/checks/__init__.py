"""Contradictions in a config, by section."""
