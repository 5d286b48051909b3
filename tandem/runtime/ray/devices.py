"""Are there devices enough? Counted before anything starts. Pure: what Ray knows of the cluster is an argument.

A device is a GPU where the cluster has any and models are to compute on one, else a device slot of a cluster that
Tandem started itself, else a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.base.errors import ConfigError, Problem

GPU, SLOT, CPU = "GPU", "tandem_slot", "CPU"
SLOTS_PER_CORE = 4
"""Without GPUs a role spends much of its time waiting for others, so a core serves several. Counts only where Tandem
starts the cluster; to choose another number, start one (``ray start --head --num-cpus=N``) and set RAY_ADDRESS."""

_WORDS = {GPU: "GPU", SLOT: "CPU slot", CPU: "CPU"}


@dataclass(frozen=True)
class Inventory:
    """What a cluster has: ``kind`` (a resource of Ray's), ``nodes`` (address -> devices), ``free`` on all together."""

    kind: str
    nodes: Mapping[str, int]
    free: int

    @classmethod
    def of(
        cls, nodes: Mapping[str, Mapping[str, float]], available: Mapping[str, float], device: str = "auto"
    ) -> Inventory:
        """Return the inventory from the resources of each live node and what is left of them.

        ``device`` is what models compute on (``runtime.device``): where that is the CPU, GPUs are left to others.
        """
        kinds = (GPU, SLOT) if device in ("auto", "cuda") else (SLOT,)
        kind = next((k for k in kinds if any(resources.get(k, 0) >= 1 for resources in nodes.values())), CPU)
        return cls(kind, {name: int(r.get(kind, 0)) for name, r in nodes.items()}, int(available.get(kind, 0)))

    @property
    def total(self) -> int:
        """Devices of all nodes, free or not."""
        return sum(self.nodes.values())

    @property
    def word(self) -> str:
        """A device, in a message."""
        return _WORDS[self.kind]

    def __str__(self) -> str:
        nodes = ", ".join(f"{count} on {node}" for node, count in self.nodes.items())
        taken = f", {self.total - self.free} of them taken by others" if self.free < self.total else ""
        slots = f" ({SLOTS_PER_CORE} per core)" if self.kind == SLOT else ""
        return f"{_counted(self.total, self.word)}{slots}: {nodes or 'no node'}{taken}"


@dataclass(frozen=True)
class Share:
    """Devices of a device group: ``nodes`` times ``per_node``, those of a node together, for ``roles`` in turns."""

    group: str
    roles: tuple[str, ...]
    nodes: int
    per_node: int

    def __str__(self) -> str:
        return f"{'+'.join(self.roles)} {self.nodes} x {self.per_node}"


def require_devices(shares: Sequence[Share], there: Inventory) -> None:
    """Raise ``ConfigError`` where the cluster could never hold all shares at once: separate groups need the sum."""
    needed = sum(share.nodes * share.per_node for share in shares)
    asked = ", ".join(map(str, shares))
    largest = max(there.nodes.values(), default=0)
    if needed > there.total:
        short = needed - there.total
        reason = f"{asked} need {_counted(needed, there.word)}, the cluster has {there}: {short} missing"
    elif any(share.per_node > largest for share in shares):
        wide = max(shares, key=lambda share: share.per_node)
        reason = f"{wide} needs {_counted(wide.per_node, there.word)} on one node, the cluster has {there}"
    else:
        return
    value = {role: [share.nodes, share.per_node] for share in shares for role in share.roles}
    remedy = f"Ask for at most {there.total} in all, or add nodes"
    if there.kind == SLOT:
        remedy += "; or start a cluster of your own with ray start --head --num-cpus=N and set RAY_ADDRESS=auto"
    raise ConfigError([Problem("execution.resource", value, reason, remedy)])


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
