"""Which engine reads what only some engines have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tandem.config.schema import Config
from tandem.plan.engine import engine_asks_for, engines_with
from tandem.plan.reads.form import Reads, S

ROLLOUT = "actor_rollout_ref.rollout"
OF_SOME_ENGINES = (
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enable_chunked_prefill",
    "tensor_model_parallel_size",
)
"""Settings of the rollout that are an engine's own."""


def engine_reads(config_of: Callable[[S], Config]) -> Iterator[Reads[S]]:
    """Yield the reads of what only some engines have: elsewhere it is refused, or noted where the config isn't
    strict.
    """
    for setting in OF_SOME_ENGINES:
        yield from _reads(setting, config_of)


def _reads(setting: str, config_of: Callable[[S], Config]) -> Iterator[Reads[S]]:
    keys = (f"{ROLLOUT}.{setting}",)

    def asked(s: S) -> bool:
        return engine_asks_for(config_of(s), setting)

    def reason(s: S) -> str:
        having = engines_with(setting)
        others = f" ({' and '.join(having)} {'has' if len(having) == 1 else 'have'})" if having else ""
        return f"the engine {config_of(s).actor_rollout_ref.rollout.name} has nothing of the kind{others}"

    remedy = f"Leave it out, or write {ROLLOUT}.strict: false and it is listed as not used"
    yield Reads(keys, lambda s: asked(s) or not config_of(s).actor_rollout_ref.rollout.strict, reason, remedy)
    yield Reads(keys, asked, reason, noted=True)
