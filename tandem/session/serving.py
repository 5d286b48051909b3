"""Roles that serve the actor in fully async, each in a thread of its own, beside generation and the actor's loop."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.base.errors import DeadlineError
from tandem.columns.proto import DataProto
from tandem.config.schema import Config
from tandem.dataflow.store import DataPlane
from tandem.dataflow.tickets import Lease, Request
from tandem.observe.run_log import RunLog
from tandem.observe.status.status import Status, Wait
from tandem.roles.advantages import AdvantageReport, AdvantageStage
from tandem.roles.loss import without_samples
from tandem.roles.serving import ForwardModel, ServingRole
from tandem.session.keep.moved_reference import is_part, write_reference
from tandem.session.progress import Progress, StepPart
from tandem.session.stage_table import require_listed
from tandem.stages.facts import REFERENCE
from tandem.stages.stage import Stage

_TICK_S = 0.25
_JOIN_S = 2.0  # for a loop that was asked to end; it is a daemon, and may wait for weights that never come

Serve = Callable[[ServingRole, "ServingRoles"], None]


class ServingRoles(StepPart):
    """``roles`` read columns of a partition from the plane and give further ones; ``models`` have weights of their own.

    ``clock`` gives the seconds that count as work. What a role has to report is kept by partition, since it may be
    ahead of the one that is trained.
    """

    def __init__(
        self,
        roles: Sequence[ServingRole],
        models: Sequence[ForwardModel],
        advantages: AdvantageStage,
        plane: DataPlane,
        config: Config,
        progress: Progress,
        log: RunLog,
        clock: Callable[[], float],
    ) -> None:
        self.roles, self.models = tuple(roles), tuple(models)
        self._advantages, self._plane, self._config, self._progress = advantages, plane, config, progress
        self._log, self._clock = log, clock
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._reports: dict[int, AdvantageReport] = {}
        self._doing: dict[str, str] = {}  # by role
        self._seconds: defaultdict[tuple[int, str], float] = defaultdict(float)  # a stage is one thread's

    @property
    def gives(self) -> list[str]:
        """Columns that the roles add."""
        return [name for role in self.roles for name in role.gives]

    @contextmanager
    def serving(self, serve: Serve, *stages: Stage) -> Iterator[None]:
        """Serve around the actor's loop: each role's ``serve`` runs in a thread of its own. ``stages`` are what they
        do.
        """
        require_listed([stage for role in self.roles for stage in role.stages], stages, "the serving roles")

        def run(role: ServingRole) -> None:
            try:
                serve(role, self)
            except BaseException as error:  # raised to the actor's loop by check()
                self._error = self._error or error

        threads = [threading.Thread(target=run, args=(role,), name=role.name, daemon=True) for role in self.roles]
        try:
            for thread in threads:
                thread.start()
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join(_JOIN_S)

    # --- what a role's loop calls ------------------------------------------------------------------------------------

    def partitions(self) -> Iterator[int]:
        """Yield the partitions to work through."""
        yield from range(self._progress.step, self._progress.last)

    def lend(self, role: ServingRole, partition: int) -> Iterator[tuple[Lease, DataProto]]:
        """Yield the groups of ``partition`` as they get the columns that ``role`` reads; ends with the partition or the
        run.
        """
        names = list(dict.fromkeys([*role.columns, "reward_valid", "response_mask"]))
        request = Request(role.name, names, role.groups, partition, order=role.order, consumer=role.name)
        while not self._stopping.is_set():
            self._doing[role.name] = f"waits for {', '.join(names)} of partition {partition}"
            try:
                lease = self._plane.take(request, timeout=_TICK_S)
            except DeadlineError:
                continue  # the actor's loop watches how long this takes, and says who is to blame
            if lease is None:
                return
            self._doing[role.name] = f"works on {len(lease)} groups of partition {partition}"
            batch = self._plane.get(lease.tickets, names)
            yield lease, without_samples(batch, ~batch.dense("reward_valid"))

    @contextmanager
    def scoring(self, partition: int, stage: str) -> Iterator[None]:
        """Time a stage: its time is the partition's, also where it works ahead of the actor."""
        begun, counted = time.perf_counter(), self._clock()
        yield
        self._seconds[partition, stage] += self._clock() - counted
        self._log.span(stage, begun, time.perf_counter(), threading.current_thread().name)

    def give(self, role: ServingRole, lease: Lease, batch: DataProto) -> None:
        """Put the columns that ``role`` gives into the plane, and acknowledge the groups."""
        columns = batch.select(*role.gives, "group_ids", "sample_index")
        if "advantages" in role.gives:
            self._reports[lease.tickets[0].partition] = self._advantages.report()
        self._plane.put(lease.tickets, columns, timeout=self._config.execution.deadline_s)
        self._plane.acknowledge(lease)

    # --- what the actor's loop sees ----------------------------------------------------------------------------------

    def advantage_report(self, partition: int) -> AdvantageReport:
        """Return what the advantages have to say of ``partition``."""
        return self._reports.get(partition) or self._advantages.report()

    def check(self) -> None:
        """Raise what ended the loop of a serving role."""
        if self._error is not None:
            raise self._error

    def causes(self, partition: int) -> str:
        """Return which roles wait for which weights version, in words."""
        waiting = [
            f"{model.name} waits for weights version {model.awaited} or newer, it has {model.version}"
            for model in self.models
            if model.awaited is not None
        ]
        return "; ".join(waiting)

    def report_status(self, status: Status) -> None:
        """Add what each role is doing, and which weights it waits for."""
        status.roles |= {role.name: self._doing.get(role.name, "is beginning") for role in self.roles}
        status.waits += [
            Wait(model.name, f"weights version {awaited} or newer; it has {model.version}")
            for model in self.models
            if (awaited := model.awaited) is not None
        ]

    def end_step(self, step: int) -> None:
        self._reports.pop(step - 1, None)

    def times(self, step: int) -> dict[str, float]:
        """Return the stages of the roles, for the partition of the step."""
        done = [key for key in list(self._seconds) if key[0] == step]
        return {f"time/{stage}": self._seconds.pop((partition, stage)) for partition, stage in done}

    def save(self, root: Path, step: int) -> dict[str, Path]:
        """Save the weights of a reference that moves."""
        moved = [model for model in self.models if model.name == REFERENCE and is_part(self._config, step)]
        return {model.name: write_reference(model, self._config, step, root) for model in moved}
