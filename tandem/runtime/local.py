"""The local runtime: the actor in this process, a rollout engine in a second one, rewards in others. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.config.schema import Config
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.store import LocalStore
from tandem.plan.parts.engine import after_swap
from tandem.plan.plan import Plan
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.rollout.engine_pool import EnginePool
from tandem.roles.serving import LocalScorer
from tandem.rollout.host import build_engine
from tandem.rollout.process import HostedEngine, ProcessEngine
from tandem.rollout.protocol import RolloutEngine
from tandem.runtime.build.composite import build_composite
from tandem.runtime.build.critic import local_critic
from tandem.runtime.build.engine_specs import build_forward_engine, engine_spec, replica, role_devices
from tandem.runtime.build.snapshots import local_snapshots
from tandem.weights.sync import Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENGINE = "rollout-0"
"""The one engine, in the gate and in messages."""


class LocalRuntime:
    """A ``Runtime`` for one train rank and one rollout engine. In colocate an engine that can shares the actor's
    parameters."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self._devices = role_devices(config, plan.placements)
        self.pool = EnginePool({} if plan.pushed == "nothing" else {ENGINE: self._start(ENGINE)})

    def composite(self, tokenizer: PreTrainedTokenizerBase, steps: int) -> ActorRolloutRef:
        """Build actor and critic in this process, over the engines that have started or with one that shares the
        actor's model.
        """
        config, plan = self._config, self._plan
        critic, devices = None, self._devices
        if plan.critic is not None:
            critic = local_critic(config, plan, tokenizer, steps, devices["critic"])
        updates = plan.batch.optimizer_steps_of(steps)
        engine = self.pool if self.pool.engines else None
        return build_composite(config, plan, tokenizer, updates, critic, self.scorer, engine, devices["actor"])

    def restart(self, name: str) -> RolloutEngine:
        """Start the engine ``name`` again."""
        return self._start(name)

    def swap(self) -> None:
        """Start the other engine from here on."""
        self._config = after_swap(self._config)

    def plane(self, ledger: Ledger) -> LocalStore:
        """Open a store in this process over ``ledger``."""
        return LocalStore(ledger, lease_seconds=self._config.execution.deadline_s)

    def snapshots(self, composite: ActorRolloutRef) -> Callable[[], Snapshot]:
        """Return what copies the weights to push, while training goes on."""
        return local_snapshots(self._config, self._plan, composite.actor)

    def scorer(self, role: str, *, moves: bool, path: str | None = None) -> LocalScorer:
        """Load a model of its own in this process for ``role``, with weights that move or from ``path``."""
        model = replica(self._config, self._plan.pushed, moves=moves, path=path)
        return LocalScorer(model, build_forward_engine(self._config, model, self._devices[role]))

    def close(self) -> None:
        """End the processes of all engines."""
        for engine in self.pool.engines.values():
            if isinstance(engine, HostedEngine):
                engine.close()

    def _start(self, name: str) -> RolloutEngine:
        """Start the rollout engine ``name``. ``runtime.threads`` keeps it in this process, for a debugger."""
        device, execution = str(self._devices["rollout"]), self._config.execution
        spec = engine_spec(self._config, self._plan.pushed, device=device)
        if self._config.runtime.threads:
            return build_engine(spec)
        bucket_bytes = execution.weight_sync.bucket_mb << 20
        start_s = self._config.actor_rollout_ref.rollout.start_s
        return ProcessEngine(name, spec, start_s=start_s, deadline_s=execution.deadline_s, bucket_bytes=bucket_bytes)
