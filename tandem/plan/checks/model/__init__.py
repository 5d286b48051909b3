"""Contradictions in a model's folder, its adapters, template and senses, and how it is split over devices."""
