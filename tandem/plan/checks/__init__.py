"""Contradictions in a config, by what they are in: samples, model, what is learned, the run."""
