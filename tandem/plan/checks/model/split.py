"""Whether a model, or its rows, can be split over devices: tensor and sequence parallelism of training."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.models.families import IMAGE_FAMILIES, PER_DOCUMENT, SPLIT
from tandem.plan.files.model import ModelFacts
from tandem.plan.parts.placement import Placement

ACTOR = "actor_rollout_ref.actor"
TENSOR, SEQUENCE = f"{ACTOR}.tensor_model_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"
_WHOLE = "Write 1: parameters are sharded over all devices of the actor anyway"


def check_traffic(config: Config, placed: tuple[Placement, ...]) -> Iterator[Problem]:
    """Yield what the config says of traffic between the actor's devices, where there is none, or it can't be so."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    devices = next((placement.devices for placement in placed if placement.role == "actor"), 1)
    written = (
        ("gather_dtype", actor.gather_dtype, "float32"),
        ("reduce_dtype", actor.reduce_dtype, "float32"),
        ("reduce_every", actor.reduce_every, "micro_batch"),
    )
    for name, value, default in written:
        if value == default:
            continue
        if devices == 1:
            reason = "the actor has one device, which nobody sends weights or gradients"
            yield Problem(f"{ACTOR}.{name}", value, reason, f"Write {default}, or more devices in execution.resource")
        elif actor.strategy == "megatron":
            reason = "strategy megatron says itself what its devices send each other"
            yield Problem(f"{ACTOR}.{name}", value, reason, f"Write {default}, or strategy: fsdp2")
        elif actor.tensor_model_parallel_size > 1:
            reason = f"a model that is split ({TENSOR} {actor.tensor_model_parallel_size}) meets in float32"
            yield Problem(f"{ACTOR}.{name}", value, reason, f"Write {default}, or {TENSOR}: 1")
        elif name == "gather_dtype" and model.dtype == "float32":
            reason = "the forward computes in float32 (actor_rollout_ref.model.dtype), from weights that are so"
            yield Problem(f"{ACTOR}.{name}", value, reason, "Write model.dtype: bfloat16 too, or gather_dtype: float32")


def check_split(config: Config, facts: ModelFacts | None) -> Iterator[Problem]:
    """Yield why the actor's model, or its rows, can't be split over as many devices as the config says."""
    actor = config.actor_rollout_ref.actor
    if actor.tensor_model_parallel_size > 1:
        yield from _check_tensor(config, actor.tensor_model_parallel_size, facts)
    if actor.ulysses_sequence_parallel_size > 1:
        yield from _check_sequence(config, actor.ulysses_sequence_parallel_size, facts)


def _check_tensor(config: Config, width: int, facts: ModelFacts | None) -> Iterator[Problem]:
    if config.actor_rollout_ref.model.trains_adapters:
        yield Problem(TENSOR, width, "a model with LoRA adapters can't be split over devices", _WHOLE)
    if facts is None:
        return
    for family in facts.families:
        if family not in SPLIT:
            known = ", ".join(sorted(SPLIT))
            reason = f"how a model of the family {family} is split over devices is not known ({known} are)"
            yield Problem(TENSOR, width, reason, _WHOLE)
            return
    counts = {**_heads(facts), "columns of the MLP": facts.inside, "rows of the embedding": facts.vocabulary}
    yield from _indivisible(TENSOR, width, counts)


def _check_sequence(config: Config, width: int, facts: ModelFacts | None) -> Iterator[Problem]:
    split = config.actor_rollout_ref.actor.tensor_model_parallel_size
    if split > 1:
        reason = f"a model that is split (tensor_model_parallel_size {split}) has whole rows"
        yield Problem(SEQUENCE, width, reason, "Write 1 for one of the two")
    if facts is None:
        return
    for family in facts.families:
        if family in IMAGE_FAMILIES:
            yield Problem(
                SEQUENCE, width, f"samples of the family {family} may show images, and those are whole", _WHOLE
            )
            return
        if family in PER_DOCUMENT:
            reason = f"models of the family {family} run a row per document, since {PER_DOCUMENT[family]}"
            yield Problem(SEQUENCE, width, reason, _WHOLE)
            return
    yield from _indivisible(SEQUENCE, width, _heads(facts))


def _heads(facts: ModelFacts) -> dict[str, int | None]:
    return {"attention heads": facts.heads, "heads of keys and values": facts.kv_heads}


def _indivisible(key: str, width: int, counts: dict[str, int | None]) -> Iterator[Problem]:
    for what, count in counts.items():
        if count is not None and count % width:
            reason = f"{count} {what} can't be split evenly over {width} devices"
            yield Problem(key, width, reason, f"Write a divisor of {count}")
