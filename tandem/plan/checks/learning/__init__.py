"""Contradictions in what is learned, and from whom: algorithm, corrections, critic, teacher, stages."""
