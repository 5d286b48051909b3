"""The local runtime: the actor in this process, a rollout engine in a second one, rewards in others. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.config.schema import Config
from tandem.dataflow.ledger import Ledger
from tandem.dataflow.store import LocalStore
from tandem.models.loading import load_causal_lm
from tandem.roles.actor_rollout_ref import ActorRolloutRef
from tandem.roles.fleet import Fleet
from tandem.roles.serving import LocalScorer
from tandem.rollout.process import HostedEngine, ProcessEngine
from tandem.rollout.protocol import RolloutEngine
from tandem.rollout.registry import find_engine
from tandem.rollout.spec import EngineSpec
from tandem.topology.composite import build_composite, build_forward_engine
from tandem.topology.plan import Plan
from tandem.topology.runtime import NO_VERSION
from tandem.topology.shared import ENGINE
from tandem.weights.sync import SharedSnapshots, Snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LocalRuntime:
    """A ``Runtime`` for one train rank and one rollout engine. In colocate the engine shares the actor's parameters."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config, self._plan = config, plan
        self.fleet = Fleet({} if plan.mode == "colocate" else {ENGINE: self._start(ENGINE)})

    def composite(self, tokenizer: PreTrainedTokenizerBase, total_updates: int) -> ActorRolloutRef:
        """See ``Runtime``."""
        composite = build_composite(self._config, self._plan, tokenizer, total_updates)
        if self.fleet.engines:
            composite.engine = self.fleet
        return composite

    def restart(self, name: str) -> RolloutEngine:
        """See ``Runtime``."""
        return self._start(name)

    def plane(self, ledger: Ledger) -> LocalStore:
        """See ``Runtime``."""
        return LocalStore(ledger, lease_seconds=self._config.execution.deadline_s)

    def snapshots(self, composite: ActorRolloutRef) -> Callable[[], Snapshot]:
        """See ``Runtime``."""
        bucket_bytes = self._config.execution.weight_sync.bucket_mb << 20
        return SharedSnapshots(composite.actor.export, bucket_bytes=bucket_bytes)

    def scorer(self, role: str) -> LocalScorer:
        """See ``Runtime``."""
        engine = build_forward_engine(self._config)
        return LocalScorer(engine.model, engine)

    def close(self) -> None:
        """See ``Runtime``."""
        for engine in self.fleet.engines.values():
            if isinstance(engine, HostedEngine):
                engine.close()

    def _start(self, name: str) -> RolloutEngine:
        """A rollout engine. ``runtime.threads`` keeps it in this process, for a debugger."""
        config = self._config
        rollout, model, execution = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, config.execution
        if config.runtime.threads:
            own = load_causal_lm(model.path, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
            return find_engine(rollout.name).target(
                own,
                version=NO_VERSION,
                exact=config.trainer.exact,
                max_num_seqs=rollout.max_num_seqs,
                max_num_batched_tokens=rollout.max_num_batched_tokens,
                keep_kv=rollout.keep_kv,
            )
        bucket_bytes = execution.weight_sync.bucket_mb << 20
        return ProcessEngine(name, engine_spec(config), deadline_s=execution.deadline_s, bucket_bytes=bucket_bytes)


def engine_spec(config: Config) -> EngineSpec:
    """What the process of a rollout engine is told; it waits for its first weights."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    return EngineSpec(
        model=model.path,
        engine=rollout.name,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        plugins=tuple(config.plugins),
        threads=config.runtime.torch_threads,
        version=NO_VERSION,
        exact=config.trainer.exact,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        keep_kv=rollout.keep_kv,
    )
