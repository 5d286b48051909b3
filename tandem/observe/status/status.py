"""What a running run says of itself at one moment, and that in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self, TypeVar

from tandem.base.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class Doing:
    """Something that goes on for ``seconds``."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Wait:
    """Whom or what ``who`` waits for; ``seconds`` where it is known for how long."""

    who: str
    cause: str
    seconds: float | None = None


@dataclass(frozen=True)
class PartitionLine:
    """The groups of the training step ``partition``, in counts.

    ``given``: tickets that an engine fills; ``generated``: whole groups that lack something yet, such as rewards.
    ``tasks``: by consumer, groups consumed, held and ready. ``longest``: the tickets that are open for longest, in
    words. ``dropped``: by reason.
    """

    partition: int
    tickets: int
    filled: int
    given: int
    generated: int
    sealed: bool
    tasks: Mapping[str, Sequence[int]]
    dropped: Mapping[str, int]
    longest: Sequence[str] = ()


@dataclass(frozen=True)
class EngineLine:
    """A rollout engine: what it is doing, the weights version that it has (None: none yet), its tickets as
    ``[partition, place, attempt]``."""

    name: str
    state: str
    version: int | None
    tickets: Sequence[Sequence[int]] = ()


@dataclass
class Status:
    """A run at one moment: the next ``step`` of ``last``, and who does and awaits what."""

    FORMAT: ClassVar[str] = "tandem-status/1"

    step: int
    last: int
    doing: list[Doing] = field(default_factory=list)
    partitions: list[PartitionLine] = field(default_factory=list)
    engines: list[EngineLine] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    """What each role with a loop of its own is doing."""
    waits: list[Wait] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {"format": self.FORMAT, **asdict(self)}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Self:
        """Return what ``to_json`` gave. Raises ``DataError`` for anything else, as another version may answer."""
        if found.get("format") != cls.FORMAT:
            raise DataError(
                f"the run answers in another form ({found.get('format')!r}) than {cls.FORMAT}: ask it "
                "with the version of tandem that it runs with"
            )
        return cls(
            step=found["step"],
            last=found["last"],
            doing=_each(Doing, found["doing"]),
            partitions=_each(PartitionLine, found["partitions"]),
            engines=_each(EngineLine, found["engines"]),
            roles=dict(found["roles"]),
            waits=_each(Wait, found["waits"]),
        )

    @property
    def now(self) -> str:
        """In one line: the steps that are done, what is being done, and who waits."""
        doing = f", now {self.doing[-1].what}" if self.doing else ""
        waits = f"; {', '.join(wait.who for wait in self.waits)} waiting" if self.waits else ""
        return f"{self.step} of {self.last} steps done{doing}{waits}"

    def lines(self) -> Iterator[str]:
        """Yield the whole status in words."""
        doing = ", ".join(f"{part.what} ({part.seconds:.1f} s)" for part in self.doing)
        yield f"{self.step} of {self.last} steps done" + (f"; now: {doing}" if doing else "")
        for partition in self.partitions:
            yield from _of_partition(partition)
        for engine in self.engines:
            version = "no weights yet" if engine.version is None else f"weights version {engine.version}"
            yield f"engine {engine.name}: {engine.state}, {version}, {_tickets(engine.tickets)}"
        yield from (f"role {name}: {state}" for name, state in self.roles.items())
        for wait in self.waits:
            since = "" if wait.seconds is None else f" for {wait.seconds:.1f} s"
            yield f"{wait.who} waits{since}: {wait.cause}"
        if not self.waits:
            yield "nobody waits"


def _of_partition(line: PartitionLine) -> Iterator[str]:
    sealed = ", sealed" if line.sealed else ""
    yield (
        f"partition {line.partition}: {line.filled} of {line.tickets} groups filled{sealed}; "
        f"{line.given - line.generated} being generated, {line.generated} waiting for the rest of their columns"
    )
    for task, (consumed, held, ready) in line.tasks.items():
        yield f"  {task}: {consumed} consumed, {held} in hand, {ready} ready"
    if line.dropped:
        yield "  dropped: " + ", ".join(f"{count} x {reason}" for reason, count in line.dropped.items())
    yield from (f"  {ticket}" for ticket in line.longest)


def _tickets(tickets: Sequence[Sequence[int]]) -> str:
    if not tickets:
        return "no ticket in hand"
    of = sorted({partition for partition, _, _ in tickets})
    counts = ", ".join(f"{sum(t[0] == number for t in tickets)} of partition {number}" for number in of)
    return f"tickets in hand: {counts}"


def _each(kind: type[T], rows: Sequence[Mapping[str, Any]]) -> list[T]:
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # all kinds here are dataclasses
    return [kind(**{name: value for name, value in row.items() if name in names}) for row in rows]
