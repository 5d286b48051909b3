"""Where and when: execution modes as a tagged union, so that what a mode lacks can't be written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from pydantic_core import PydanticCustomError

from tandem.config.node import Count, Node, Seconds

Devices = Annotated[tuple[PositiveInt, NonNegativeInt], Field(strict=False)]  # YAML has lists, not tuples
Role = Literal["actor", "critic", "rollout", "advantages", "reference", "ref", "actor_fwd", "teacher"]
Resource = dict[Role, Devices]
"""Role -> (nodes, devices per node). ``ref`` is the short name of ``reference``."""


class DataPlaneConfig(Node):
    """The store that samples pass through."""

    num_data_storage_units: Count = 1
    """Storage actors of the Ray store; the in-process store has one."""
    capacity_groups: PositiveInt | None = None
    """Most groups held before producers wait; default: enough for all partitions that staleness admits."""


LEFT_OUT = {
    "ipc": (
        "handles of CUDA IPC are not there: an engine's process sees its own GPU alone, and can't open another's",
        "Write shared_memory, or collective for a broadcast between devices",
    ),
    "checkpoint_engine": (
        "the package checkpoint-engine is not used: it ends the process group that the train ranks train in",
        "Write collective: a broadcast in buckets, each rank a part, and engines that start late are served too",
    ),
}
"""Transports of other programs: why they are not there, and what to write instead."""


def _refuse_left_out(value: Any) -> Any:
    if isinstance(value, str) and (found := LEFT_OUT.get(value.replace("-", "_"))) is not None:
        raise PydanticCustomError("left_out", "{reason}", {"reason": found[0], "remedy": found[1]})
    return value


class WeightSyncConfig(Node):
    """How weights reach the rollout engines."""

    transport: Annotated[Literal["auto", "shared_memory", "collective"], BeforeValidator(_refuse_left_out)] = "auto"
    """How weights travel: through memory that the processes of a machine share, or by a broadcast in a group of train
    ranks and engines. Default: by a broadcast where a role has devices on several nodes."""
    overlap: bool = False
    """Transfer in the background of the next step instead of blocking (hybrid)."""
    bucket_mb: Annotated[int, Field(gt=0, le=2**16)] = 256
    """Size of a transfer bucket in MiB."""
    deadline_s: Seconds = 300.0
    """Longest wait for an engine to acknowledge a version, once it has finished what comes first, in seconds."""
    health_s: Seconds = 60.0
    """Longest wait for an engine that has started to answer before a push, in seconds."""
    probe: PositiveInt = 10
    """Every how many versions an engine's log-probs after a few prompts are compared with the trainer's, before it is
    taken to have the weights: at the first push, and at each version that this divides. An engine whose fingerprint
    can't show what it generates with is asked at every push."""
    lora: Literal["merged", "adapter"] | None = None
    """What a push of a LoRA run carries: all weights with the adapters merged, or the adapters alone, which the engine
    then computes as the trainer does. Default: adapter, where the engine takes them."""


class _Execution(Node):
    resource: Resource = {}
    """Devices per role, as {role: [nodes, devices per node]}; default: one device each. ``advantages`` takes none."""
    data_plane: DataPlaneConfig = DataPlaneConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    max_engine_restarts: Annotated[int, Field(ge=0)] = 1
    """How often each rollout engine is started again after its process died; one death more ends the run."""
    stall_warning_s: Seconds = 60.0
    """A wait longer than this is reported with its cause, in seconds."""
    deadline_s: Seconds = 1800.0
    """A wait longer than this ends the run with an error that names who blocks, in seconds."""


class ColocateExecution(_Execution):
    """Actor and rollout take turns on the same devices; synchronous."""

    mode: Literal["colocate"] = "colocate"
    balance_data: bool = False
    """Balance tokens over the data-parallel ranks."""


class HybridExecution(_Execution):
    """Actor and rollout on separate devices; sub-batches stream; ref, old_actor and teacher are tags of the actor."""

    mode: Literal["hybrid"] = "hybrid"
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Largest lag of a trained sample, in versions."""
    num_iters_per_train_update: PositiveInt = 1
    """Sub-batches per partition."""
    balance_data: bool = False
    """Balance tokens over the data-parallel ranks."""
    train_pipelining: Literal["off", "accumulate", "step"] = "off"
    """Whether training starts before the partition is sealed."""


class FullyAsyncExecution(_Execution):
    """Each role has its own devices and its own loop."""

    mode: Literal["fully_async"] = "fully_async"
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Largest lag of a trained sample, in versions."""
    num_iters_per_train_update: PositiveInt = 1
    """Sub-batches per partition."""


def _with_mode(value: Any) -> Any:
    """Give a mapping that doesn't name its mode the default one."""
    return {"mode": ColocateExecution().mode} | value if isinstance(value, dict) else value


Execution = Annotated[
    Annotated[ColocateExecution | HybridExecution | FullyAsyncExecution, Field(discriminator="mode")],
    BeforeValidator(_with_mode),
]


class RuntimeConfig(Node):
    """Where and on what the roles run."""

    name: Literal["auto", "local", "ray"] = "auto"
    """``local`` needs no Ray; ``auto`` takes it where one train rank and one rollout engine suffice."""
    threads: bool = False
    """Keep all roles in one process (for a debugger)."""
    device: str = "auto"
    """Where models compute: ``cpu``, ``cuda``, or a device that a plugin brings; ``auto`` takes CUDA where it is there,
    else the CPU. CUDA has never been tried."""
    torch_threads: Count | None = None
    """Threads per process; default: PyTorch's own choice."""
