"""What a process is told about the engine that it hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tandem.models.adapter_spec import AdapterSpec
from tandem.rollout.protocol import KeepKV


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """A registered ``engine`` on a copy of its own of the model in ``model`` (folder or hub id).

    ``plugins`` are imported first, so that engines of the user's are found. ``version`` is that of the weights in the
    folder. ``threads`` of the process; None: PyTorch's own choice. With an ``adapter`` the engine computes it beside
    the model's weights, and is sent adapters alone.
    """

    model: str
    engine: str = "hf"
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False
    plugins: tuple[str, ...] = ()
    version: int = 0
    exact: bool = False
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    keep_kv: KeepKV = "old"
    threads: int | None = None
    adapter: AdapterSpec | None = None

    def to_json(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EngineSpec:
        """What ``to_json`` made."""
        adapter = fields["adapter"]
        known = {"plugins": tuple(fields["plugins"]), "adapter": adapter and AdapterSpec.from_json(adapter)}
        return cls(**{**fields, **known})
