"""Where the roles of a run live: the handles that are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tandem.dataflow.ledger import Ledger
from tandem.dataflow.store import DataPlane
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.rollout.engine_pool import EnginePool
from tandem.roles.serving import Scorer
from tandem.rollout.protocol import RolloutEngine
from tandem.weights.sync import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Runtime(Protocol):
    """``LocalRuntime`` keeps the actor in this process, ``RayRoles`` each rank and each engine in an actor of Ray's.

    Everything else asks it for the parts of a run, and knows nothing of processes::

        policy, plane = runtime.composite(tokenizer, steps), runtime.plane(Ledger(...))
        take = runtime.snapshots(policy)
        weights = take()  # a ``Snapshot``, at each push
    """

    pool: EnginePool
    """The rollout engines by name, where there are any beside the actor's own weights."""

    def composite(self, tokenizer: PreTrainedTokenizerBase, steps: int) -> ActorRolloutRef:
        """Build the actor, and the critic if there is one; ``steps`` of the run say where a falling learning rate
        ends.
        """

    def restart(self, name: str) -> RolloutEngine:
        """Start an engine again in place of one that has died. Returns while it starts."""

    def swap(self) -> None:
        """Have ``restart`` start the engine of ``rollout.swap`` from here on."""

    def plane(self, ledger: Ledger) -> DataPlane:
        """Open the data plane that keeps these accounts."""

    def snapshots(self, composite: ActorRolloutRef) -> Callable[[], Snapshot]:
        """Return the function that takes the actor's weights as they are, for everyone who generates or scores with
        them.
        """

    def scorer(self, role: str, *, moves: bool, path: str | None = None) -> Scorer:
        """Load the model of a role that only scores, as it is before training; ``moves``: other weights will come.

        ``path``: of another model than the actor's.
        """

    def close(self) -> None:
        """End everything that was started."""
