"""The bottom layer: errors, registries, seeds, lazy imports. Imports nothing of Tandem."""
