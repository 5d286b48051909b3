"""The tool that the model may call."""


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y
