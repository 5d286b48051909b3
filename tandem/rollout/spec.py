"""What an engine is made from, here or in the process that hosts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from tandem.models.adapter_spec import AdapterSpec
from tandem.models.token_ids import TokenIds
from tandem.rollout.protocol import KeepKV, LogprobsOf


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """A registered ``engine`` on the model in ``model`` (folder or hub id), computing on ``device``.

    ``plugins`` are imported first, so that engines of the user's are found. ``version`` is that of the weights in the
    folder. ``python`` is the interpreter of its process; None: the one that runs this. ``threads`` of the process;
    None: PyTorch's own choice. With an ``adapter`` the engine computes it beside the model's weights, and is sent
    adapters alone. ``context``: most tokens of a prompt and its answer; None: as many as the model can. ``tokens`` are
    the ids that it may sample, and its log-probs are of that distribution; None: all that the model embeds. Everything
    but ``plugins``, ``python`` and ``threads`` is a setting that a factory may ask for.
    """

    model: str
    engine: str = "hf"
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False
    plugins: tuple[str, ...] = ()
    python: str | None = None
    threads: int | None = None
    version: int = 0
    exact: bool = False
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    keep_kv: KeepKV = "old"
    logprobs_of: LogprobsOf = "sampled"
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    enable_chunked_prefill: bool = True
    kv_cache_gib: float | None = None
    context: int | None = None
    adapter: AdapterSpec | None = None
    tokens: TokenIds | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message to the engine's process."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EngineSpec:
        """Return the spec that ``to_json`` was called on."""
        adapter = fields["adapter"]
        tokens = fields["tokens"] and TokenIds.from_json(fields["tokens"])
        known = {"plugins": tuple(fields["plugins"]), "adapter": adapter and AdapterSpec.from_json(adapter)}
        known |= {"tokens": tokens}
        return cls(**{**fields, **known})

    def settings(self, *, shares_weights: bool) -> dict[str, Any]:
        """Return what a factory may ask for, by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name in SETTINGS}
        return {**own, "shares_weights": shares_weights}


_NOT_FOR_A_FACTORY = {"model", "engine", "plugins", "python", "threads"}

SETTINGS = frozenset(field.name for field in fields(EngineSpec)) - _NOT_FOR_A_FACTORY | {"shares_weights"}
"""The keyword parameters that a factory may have."""
