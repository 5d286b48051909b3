"""Which engine reads what only some engines have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from tandem.config.schema import Config
from tandem.plan.parts.engine import after_swap, engine_asks_for, engine_capabilities, engines_with
from tandem.plan.reads.form import Reads, S
from tandem.rollout.capabilities import EngineCapabilities

ROLLOUT = "actor_rollout_ref.rollout"
OF_SOME_ENGINES = (
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enable_chunked_prefill",
    "kv_cache_gib",
    "tensor_model_parallel_size",
)
"""Settings of the rollout that are an engine's own."""

DECLARED: dict[str, Callable[[EngineCapabilities], bool]] = {
    "enable_chunked_prefill": attrgetter("chunked_prefill"),
    "tensor_model_parallel_size": attrgetter("tensor_parallel"),
}
"""Those that are read of an engine which declares that it can, whatever its factory takes: placement is by them."""


def engine_reads(config_of: Callable[[S], Config]) -> Iterator[Reads[S]]:
    """Yield the reads of what only some engines have: elsewhere it is refused, or noted where the config isn't
    strict.
    """
    for setting in OF_SOME_ENGINES:
        yield from _reads(setting, config_of)


def _reads(setting: str, config_of: Callable[[S], Config]) -> Iterator[Reads[S]]:
    keys = (f"{ROLLOUT}.{setting}",)

    def asked(s: S) -> bool:
        config = config_of(s)
        declared = DECLARED.get(setting)
        if declared is not None and any(declared(engine_capabilities(one)) for one in (config, after_swap(config))):
            return True
        return engine_asks_for(config, setting)

    def reason(s: S) -> str:
        having = engines_with(setting)
        others = f" ({' and '.join(having)} {'has' if len(having) == 1 else 'have'})" if having else ""
        return f"the engine {config_of(s).actor_rollout_ref.rollout.name} has nothing of the kind{others}"

    remedy = f"Leave it out, or write {ROLLOUT}.strict: false and it is listed as not used"
    yield Reads(keys, lambda s: asked(s) or not config_of(s).actor_rollout_ref.rollout.strict, reason, remedy)
    yield Reads(keys, asked, reason, noted=True)
