"""The config: one typed, frozen tree in which each default stands once. Imports no torch."""
