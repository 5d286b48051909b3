"""The Ray runtime: devices of every role reserved at once, then roles as actors on them.

    runtime = RayRuntime.start(plan.placements)
    ranks = runtime.ranks("actor", setup)          # RankHandles for a TrainGroup
    engines = runtime.engines("rollout", spec)     # RolloutEngines
    plane = runtime.store(ledger, lease_seconds, units)
    snapshots = RemoteSnapshots(group, bucket_bytes)  # for a WeightSync
    runtime.close()

The loop itself runs in the process that calls this: on Ray's head node, or wherever ``ray job submit`` puts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from tandem.base.errors import ContractError
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.ray.store import RayStore
from tandem.models.fingerprint import joined
from tandem.plan.parts.placement import Placement
from tandem.roles.train_group import TrainGroup
from tandem.rollout.spec import EngineSpec
from tandem.runtime.ray.cluster import Slot, connect, disconnect, release, reserve
from tandem.runtime.ray.devices import Share
from tandem.runtime.ray.engine import RayEngine
from tandem.runtime.ray.ranks import RankSetup, RayRank, RayTrainRank, gather_weights, start_ranks
from tandem.train.protocol import Exported
from tandem.weights.sync import Snapshot


@dataclass
class RayRuntime:
    """The devices of a run, by role, and what runs on them. Ends everything it started with ``close``."""

    placements: Sequence[Placement]
    slots: dict[str, list[Slot]]
    """By device group."""
    owns_cluster: bool
    started: list[RayEngine | RayStore] = field(default_factory=list)
    _makers: dict[str, Callable[[EngineSpec], RayEngine]] = field(default_factory=dict)
    _spec: EngineSpec | None = None

    @classmethod
    def start(cls, placements: Sequence[Placement], device: str = "auto") -> RayRuntime:
        """Join or start a cluster and reserve every role's devices: separate groups the sum, a shared one the maximum.

        ``device``: what they are to be (``runtime.device``).
        Raises ``ConfigError`` where the cluster is too small, ``DeadlineError`` where others hold its devices,
        ``TandemError`` without Ray or where no cluster answers, all of them within seconds.
        """
        owns = connect()
        try:
            return cls(placements, reserve(shares(placements), device=device), owns)
        except BaseException:
            if owns:
                disconnect()
            raise

    def ranks(self, role: str, setup: RankSetup, *, several: int = 1, called: str | None = None) -> list[RayRank]:
        """Start a train rank on each device of the role, which ``several`` such groups share. They end with the
        runtime.

        ``called`` is what messages call this group; default: as the role.
        """
        part = self._part(role) / several
        return start_ranks(self._slots(role), setup, part=part, role=role if called is None else called)

    def engines(
        self,
        role: str,
        spec: EngineSpec,
        *,
        deadline_s: float,
        bucket_bytes: int,
        start_s: float = 600.0,
        devices_each: int = 1,
    ) -> list[RayEngine]:
        """Start an engine on every ``devices_each`` devices of the role, named ``ROLE-0``, ``ROLE-1``, …; wait for
        none.
        """
        slots = self._slots(role)
        if len(slots) % devices_each:
            raise ContractError(f"{role}: {len(slots)} devices don't divide into engines of {devices_each}")
        part, names = self._part(role), [f"{role}-{i}" for i in range(len(slots) // devices_each)]
        for name, slot in zip(names, slots[::devices_each], strict=True):
            self._makers[name] = partial(
                RayEngine,
                name,
                slot=slot,
                part=part,
                start_s=start_s,
                deadline_s=deadline_s,
                bucket_bytes=bucket_bytes,
            )
        self._spec = spec
        return [self.restart(name) for name in names]

    def restart(self, name: str) -> RayEngine:
        """Start the engine ``name`` on its device, in place of one that has died."""
        assert self._spec is not None  # whoever has a name has started an engine
        engine = self._makers[name](self._spec)
        self.started.append(engine)
        return engine

    def change_engines(self, spec: EngineSpec) -> None:
        """Start engines by ``spec`` from here on, each where the one of its name was."""
        self._spec = spec

    def store(self, ledger: Ledger, lease_seconds: float, units: int) -> RayStore:
        """Start the data plane of the run, a controller and ``units`` storage units. It ends with the runtime."""
        store = RayStore.start(ledger, lease_seconds, units)
        self.started.append(store)
        return store

    def close(self) -> None:
        """End all actors, give the devices back, and end the cluster if it was started here."""
        for started in reversed(self.started):
            started.close()
        self.started.clear()
        release(self.slots)
        if self.owns_cluster:
            disconnect()

    def _slots(self, role: str) -> list[Slot]:
        placement = self._placement(role)
        return self.slots[placement.group][: placement.devices]

    def _part(self, role: str) -> float:
        """Return what part of each device a role has: all that take turns on it have the same."""
        group = self._placement(role).group
        return 1.0 / sum(other.group == group for other in self.placements)

    def _placement(self, role: str) -> Placement:
        for placement in self.placements:
            if placement.role == role:
                return placement
        raise ContractError(f"role {role!r} has no devices: deployed are {[p.role for p in self.placements]}")


def shares(placements: Sequence[Placement]) -> list[Share]:
    """Divide the devices: each group has those of its largest role, for all of its roles."""
    groups: dict[str, list[Placement]] = {}
    for placement in placements:
        groups.setdefault(placement.group, []).append(placement)
    largest = {group: max(roles, key=lambda p: p.devices) for group, roles in groups.items()}
    return [
        Share(group, tuple(p.role for p in groups[group]), role.nodes, role.devices_per_node)
        for group, role in largest.items()
    ]


class RemoteSnapshots:
    """Snapshots of the weights of a group of ``RayRank``s, for ``WeightSync``: gathered bucket by bucket by the ranks
    into Ray's shared memory, so that they pass neither through this process nor once per engine.

    Floats are kept as ``dtype``, or without one as they are exported. ``part`` is what is gathered: of
    adapters alone the fingerprint is joined with that of the base weights, which the engines have. A snapshot is freed
    when nothing refers to it.
    """

    def __init__(
        self,
        group: TrainGroup[RayTrainRank],
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        part: Exported = "merged",
    ) -> None:
        self._group, self._bucket_bytes, self._dtype, self._part = group, bucket_bytes, dtype, part
        self._base = cache(partial(group.call, RayTrainRank.base_fingerprint))

    def __call__(self) -> Snapshot:
        """Gather the weights as they are now."""
        beside = (self._base(),) if self._part == "adapter" else ()
        weights = gather_weights(self._group, self._bucket_bytes, self._dtype, self._part)
        return Snapshot(weights, lambda: joined(weights.fingerprint, *beside))
