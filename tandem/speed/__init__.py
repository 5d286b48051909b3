"""The best possible step, the measured parts of a step, and advice."""
