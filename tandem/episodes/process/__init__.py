"""The processes in which episodes run, so that foreign code can be ended."""
