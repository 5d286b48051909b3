"""Estimated memory per device.

For N parameters on R train ranks (parameters, gradients and moments are sharded over them), fp32 master weights:

- weights 4N / R, gradients 4T / R, Adam moments 8T / R, where T is N, or with LoRA the adapters' parameters: rank x
  (rows + columns) of each adapted matrix (7 square ones a layer where the files don't say);
- tags: 4T / R for each copy beside the weights in place, and once more for the actor while another one takes its place;
  a reference that is the base with the adapters off is no copy; a teacher of its own: 4 bytes a parameter / R;
- activations: b bytes x hidden x layers x tokens of a micro-batch x 16 (x 2 with gradient checkpointing: the inputs of
  the layers and one layer's inside), b = 2 in bfloat16 and 4 in float32 (Korthikanti et al., arXiv 2205.05198, without
  the attention matrix, which is not kept);
- log-probs: 256 tokens x vocabulary x 4 bytes x 3 (logits, their gradient, one copy), but for the critic;
- rollout: weights b N / tensor parallel (0 where the engine uses the actor's own) and the KV cache: 2 b x layers x
  kv heads x head size x tokens of the samples in flight, at their longest.

It leaves out the framework itself (about 0.5 GB a process) and fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.model import ModelConfig
from tandem.config.schema import Config
from tandem.plan.adapters import adapter_parameters
from tandem.plan.batch import longest_sequence
from tandem.plan.critic import critic_model, critic_token_budget
from tandem.plan.engine import engine_width
from tandem.plan.model import ModelFacts
from tandem.plan.placement import Placement
from tandem.plan.teacher import teacher_parameters
from tandem.stages.facts import TEACHER

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
LOGPROB_CHUNK = 256


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device of a group, by what they are for."""

    group: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())


def plan_memory(
    config: Config,
    facts: ModelFacts | None,
    placed: tuple[Placement, ...],
    copies: int,
    shares: bool,
    critic: ModelFacts | None = None,
) -> tuple[MemoryPlan, ...]:
    """One estimate a group; none where sizes are unknown.

    ``facts`` are of the actor's model, ``critic`` of the critic's. ``copies`` are the actor's tags beside the weights
    in place, ``shares``: the engine uses the actor's weights.
    """
    if facts is None or not (facts.parameters and facts.hidden and facts.layers and facts.vocabulary):
        return ()
    groups: dict[str, dict[str, int]] = {}
    for placement in (one for one in placed if one.devices):
        parts = groups.setdefault(placement.group, {})
        if placement.role == "actor":
            budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
            trained = _training(config.actor_rollout_ref.model, facts, placement, budget, copies)
            trained["log-probs"] = 3 * 4 * LOGPROB_CHUNK * facts.vocabulary
            parts.update({f"actor {name}": size for name, size in trained.items()})
        elif placement.role == "critic" and critic is not None and critic.parameters:
            trained = _training(critic_model(config), critic, placement, critic_token_budget(config), 0)
            parts.update({f"critic {name}": size for name, size in trained.items()})
        elif placement.role == "rollout":
            parts.update({f"rollout {name}": size for name, size in _rollout(config, facts, shares).items()})
        elif placement.role == TEACHER:
            parts["teacher weights"] = MASTER * teacher_parameters(config) // placement.devices
        elif placement.role in ("reference", "actor_fwd"):
            parts[f"{placement.role} weights"] = MASTER * facts.parameters // placement.devices
    return tuple(MemoryPlan(group, parts) for group, parts in groups.items() if parts)


def _training(model: ModelConfig, facts: ModelFacts, placement: Placement, tokens: int, copies: int) -> dict[str, int]:
    assert facts.parameters  # the caller looked
    ranks, hidden, layers = placement.devices, facts.hidden or 0, facts.layers or 0
    trained = adapter_parameters(model, facts) if model.trains_adapters else facts.parameters
    weights = facts.parameters + (trained if model.trains_adapters else 0)
    kept = 2 * layers + 16 if model.gradient_checkpointing else 16 * layers
    return {
        "weights": MASTER * weights // ranks,
        "gradients": MASTER * trained // ranks,
        "optimizer": 2 * MASTER * trained // ranks,
        **({"other tags": (copies + 1) * MASTER * trained // ranks} if copies else {}),
        "activations": BYTES[model.dtype] * hidden * kept * tokens,
    }


def _rollout(config: Config, facts: ModelFacts, shares: bool) -> dict[str, int]:
    assert facts.parameters and facts.layers  # the caller looked
    rollout, width = config.actor_rollout_ref.rollout, BYTES[config.actor_rollout_ref.model.dtype]
    in_flight = min(rollout.max_num_seqs, config.data.train_batch_size * rollout.n)
    per_token = 2 * width * facts.layers * (facts.kv_heads or 0) * (facts.head_dim or 0)
    weights = {} if shares else {"weights": width * facts.parameters // engine_width(config)}
    cache = per_token * in_flight * longest_sequence(config) // engine_width(config)
    return {**weights, "KV cache": cache}
