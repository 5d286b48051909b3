"""What the name of a metric says of it."""


def less_is_better(metric: str) -> bool:
    """Return whether a lower value of ``metric`` is the better one: of losses it is."""
    return metric.rpartition("/")[2] == "loss"
