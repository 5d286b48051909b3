"""The tool of the example."""


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y
