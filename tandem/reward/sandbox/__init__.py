"""Programs of unknown origin: run where they can reach nothing."""
