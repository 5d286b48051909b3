"""Contradictions in what samples come from: rows, environments, tools, scorers."""
