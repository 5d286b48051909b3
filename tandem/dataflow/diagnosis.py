"""The state of the data plane, and who keeps whom waiting, from the ledger. Pure."""

from __future__ import annotations

from tandem.dataflow.ledger import Ledger
from tandem.dataflow.progress import PlaneStatus


def plane_status(ledger: Ledger, now: float) -> PlaneStatus:
    """Return everything that the ledger knows, overdue leases given back."""
    ledger.expire(now)
    partitions = {number: ledger.status(number, now) for number in ledger.live_partitions()}
    return PlaneStatus(ledger.held, ledger.capacity, partitions, ledger.accounts())


def who_blocks(ledger: Ledger, partition: int | None, task: str | None, now: float) -> str:
    """Return what a take of ``task``, or a seal (None), is waiting for; ``partition`` None means any of them."""
    numbers = [partition] if partition is not None else ledger.live_partitions()
    return "; ".join(ledger.status(n, now).blocker(task) for n in numbers) or "producers: nothing was put"


def what_fills(ledger: Ledger, now: float) -> str:
    """Return why a put finds no room."""
    lines = [f"full: {ledger.held} of {ledger.capacity} groups held"]
    for number in ledger.live_partitions()[:1]:
        status = ledger.status(number, now)
        readers = ", ".join(f"task {task!r} has consumed {p.acked}" for task, p in status.tasks.items())
        lines.append(
            f"partition {number} has {status.filled} of {status.tickets} groups filled and was not dropped"
            + (f"; {readers}" if readers else "; no task reads it")
        )
    return "; ".join(lines)
