"""What was submitted, and what of it is still to be scored."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem.base.errors import ContractError
from tandem.reward.outcome import Sample, Scores, Verdict, failed
from tandem.reward.registry import CallStyle
from tandem.reward.samples import samples_of
from tandem.reward.scoring import describe_error

if TYPE_CHECKING:
    from tandem.columns.proto import DataProto

Group: TypeAlias = "Sequence[Sample] | DataProto"


class Handle:
    """A submitted group. ``label`` names it in messages."""

    def __init__(self, label: str, size: int) -> None:
        self.label = label
        self._verdicts: list[Verdict | None] = [None] * size
        self._known: dict[int, Verdict] = {}
        self._missing = size
        self._done = threading.Event()
        if size == 0:
            self._done.set()

    def __len__(self) -> int:
        return len(self._verdicts)

    @property
    def done(self) -> bool:
        """Whether every sample has its verdict."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for the last verdict; False if it didn't come in time."""
        return self._done.wait(seconds)

    def put(self, start: int, verdicts: Sequence[Verdict]) -> None:
        """Give the samples from ``start`` on their verdicts, once."""
        self._verdicts[start : start + len(verdicts)] = verdicts
        self._missing -= len(verdicts)
        if self._missing == 0:
            self._done.set()

    def know(self, verdicts: Sequence[Verdict | None]) -> None:
        """Keep these verdicts, where there are some, whatever scoring says of their samples."""
        self._known = {i: verdict for i, verdict in enumerate(verdicts) if verdict is not None}

    def missing(self) -> list[str]:
        """Return the names of the samples without a verdict."""
        return [f"{self.label}[{i}]" for i, verdict in enumerate(self._verdicts) if verdict is None]

    def scores(self) -> Scores:
        """Return the verdicts as columns; all must be there."""
        verdicts = [self._known.get(i, verdict) for i, verdict in enumerate(self._verdicts)]
        return Scores.of([verdict for verdict in verdicts if verdict is not None], self.label)


@dataclass(frozen=True, eq=False)
class Job:
    """What a process scores in one go: one sample, or for a batch scorer the whole group.

    ``alone``: an earlier message with this job was cut short and any of its jobs may have been the cause.
    """

    handle: Handle
    start: int
    count: int
    payload: bytes
    alone: bool = False

    @property
    def name(self) -> str:
        """The name of the job in messages: its group's, and which sample where it is one."""
        return self.handle.label if self.count > 1 else f"{self.handle.label}[{self.start}]"

    def put(self, verdicts: Sequence[Verdict]) -> None:
        """Hand the verdicts, or one for all, to the group."""
        self.handle.put(self.start, [verdicts[0]] * self.count if len(verdicts) != self.count else verdicts)

    def isolated(self) -> Job:
        """Return the same work, to be sent in a message of its own."""
        return replace(self, alone=True)


def make_jobs(group: Group, call: CallStyle, handle: Handle) -> list[Job]:
    """Cut a group into jobs of what the scorer asks for. What can't be sent to a process fails here and now."""
    if not call.is_batch:
        samples = list(group) if isinstance(group, Sequence) else samples_of(group)
        found = [_job(handle, i, 1, functools.partial(trimmed, sample, call)) for i, sample in enumerate(samples)]
        return [job for job in found if job is not None]
    if isinstance(group, Sequence):
        raise ContractError("this reward scores batches: submit a DataProto, not samples")
    rows = [trimmed(sample, call) for sample in (samples_of(group) if call.fields else [Sample("")] * len(group))]
    job = _job(handle, 0, len(rows), lambda: (group.to_bytes(), rows)) if rows else None
    return [] if job is None else [job]


def _job(handle: Handle, start: int, count: int, content: Callable[[], object]) -> Job | None:
    try:
        return Job(handle, start, count, pickle.dumps(content()))
    except Exception as error:
        handle.put(start, [failed(f"can't be sent to a scoring process: {describe_error(error)}")] * count)
        return None


def trimmed(sample: Sample, call: CallStyle) -> tuple[Any, ...]:
    """Return the sample with only the fields that the scorer asks for: a long prompt costs nothing where nobody reads
    it.
    """
    return tuple(value if name in call.fields else None for name, value in zip(Sample._fields, sample, strict=True))
