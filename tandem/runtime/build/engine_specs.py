"""Models in other hands than the actor's: what an engine or a serving role is built from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from tandem.base.device_kinds import CPU
from tandem.base.errors import ConfigError, Problem, TandemError
from tandem.config.execution import RuntimeConfig
from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.models.adapter_spec import AdapterSpec
from tandem.models.causal_lm import CausalLM
from tandem.models.device import device_count, found_device
from tandem.models.loading import load_causal_lm
from tandem.models.lora import merged_weights
from tandem.models.token_ids import TokenIds
from tandem.models.tokenizer import load_tokenizer
from tandem.models.weights import copy_weights
from tandem.plan.parts.placement import Placement, device_groups
from tandem.plan.plan import Pushed
from tandem.rollout.spec import EngineSpec
from tandem.train.engine import FsdpEngine

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NO_VERSION = -1
"""Of an engine that waits for its first weights."""


def run_device(runtime: RuntimeConfig) -> torch.device:
    """Return the first device on which this machine's roles compute. Raises ``ConfigError`` where there is none."""
    try:
        return found_device(runtime.device)
    except TandemError as error:
        raise ConfigError([Problem("runtime.device", runtime.device, str(error), "Write auto or cpu")]) from error


def role_devices(config: Config, placed: Sequence[Placement]) -> dict[str, torch.device]:
    """Return the device of each role in a run on this machine: one for each group of roles that take turns.

    Raises ``ConfigError`` where it has fewer devices than groups.
    """
    first, groups = run_device(config.runtime), list(device_groups(placed))
    if first.type == CPU:
        return {placement.role: first for placement in placed}
    there = device_count(first.type)
    if len(groups) > there:
        reason = f"{', '.join(groups)} have a device each, and this machine has {there} of {first.type}"
        remedy = "Write execution.mode: colocate, where all take turns on one, or runtime.device: cpu"
        raise ConfigError([Problem("execution.mode", config.execution.mode, reason, remedy)])
    index = {group: i for i, group in enumerate(groups)}
    return {p.role: torch.device(first.type, index[p.group]) for p in placed if p.group in index}


def engine_spec(config: Config, pushed: Pushed, tokens: TokenIds | None = None, device: str = "auto") -> EngineSpec:
    """Return what the process of a rollout engine is given; it waits for its first weights.

    Where adapters alone are ``pushed`` to it, it computes them beside the base. ``tokens`` are those of the model's
    tokenizer, which is loaded for them otherwise. ``device``: see ``found_device``.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    return EngineSpec(
        model=model.path,
        engine=rollout.name,
        device=device,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        plugins=tuple(config.plugins),
        python=rollout.python,
        threads=config.runtime.torch_threads,
        version=NO_VERSION,
        exact=config.trainer.exact,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        keep_kv=rollout.keep_kv,
        logprobs_of=rollout.logprobs_of,
        tensor_model_parallel_size=rollout.tensor_model_parallel_size,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        kv_cache_gib=rollout.kv_cache_gib,
        context=config.data.max_prompt_length + config.data.max_response_length,
        adapter=AdapterSpec.of(model, config.trainer.seed) if pushed == "adapter" else None,
        tokens=sampled_tokens(model) if tokens is None else tokens,
    )


def sampled_tokens(model: ModelConfig) -> TokenIds:
    """Return the ids that the model's tokenizer has."""
    return TokenIds.of(load_tokenizer(model.tokenizer, trust_remote_code=model.trust_remote_code))


def replica(config: Config, pushed: Pushed, *, moves: bool, path: str | None = None) -> CausalLM:
    """Build the model as it is before training, for a role that scores with weights of its own; ``moves``: is sent
    others, as ``pushed`` says.

    Fresh adapters change nothing, so it has some only where it is sent some, or where the run starts from others.
    ``path``: another model than the actor's, without adapters.
    """
    model = config.actor_rollout_ref.model
    trusted, tokens = model.trust_remote_code, sampled_tokens(model)
    load = partial(load_causal_lm, dtype=model.dtype, trust_remote_code=trusted, tokens=tokens)
    spec = AdapterSpec.of(model, config.trainer.seed) if path is None else None
    if spec is None or (spec.path is None and not (moves and pushed == "adapter")):
        return load(model.path if path is None else path)
    adapted = load(model.path, adapter=spec)
    if not moves or pushed == "adapter":
        return adapted
    merged = load(model.path)
    copy_weights(merged, merged_weights(adapted.model))
    return merged


def build_forward_engine(
    config: Config, model: CausalLM, device: torch.device, mesh: DeviceMesh | None = None
) -> FsdpEngine:
    """Return what runs the forwards of such a role on ``device``; with a ``mesh``, as one of its ranks."""
    section = config.actor_rollout_ref
    return FsdpEngine(
        model,
        optim=section.actor.optim,
        total_updates=1,
        max_tokens_per_micro_batch=section.actor.micro_batch_tokens,
        max_samples_per_micro_batch=section.actor.ppo_micro_batch_size,
        temperature=section.rollout.temperature,
        exact=config.trainer.exact,
        mesh=mesh,
        device=device,
    )
