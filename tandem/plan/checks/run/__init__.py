"""Contradictions in the run itself: its devices, folder, schedule, and the checkpoint that it goes on from."""
