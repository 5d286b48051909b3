"""Scoring in processes that can be killed."""
