"""Estimated memory per device: what a step of this config can hold, and no more.

For N parameters on R train ranks (parameters, gradients and moments are sharded over them), of which W are one model
(tensor parallelism; else 1), fp32 master weights (with strategy megatron R is W: the other ranks have all of it, too):

- weights 4N / R, and 2N / W more where the forward casts them to bfloat16, unless layers are gathered so; whole
  gradients until the end of a mini-batch where they are summed only then; gradients 4T / R, Adam moments 8T / R, where
  T is N, or with LoRA the adapters' parameters: rank x (rows + columns) of each adapted matrix;
- tags: 4T / R for each copy beside the weights in place, and once more for the actor while another one takes its
  place; a reference that is the base with the adapters off is no copy; a teacher of its own: 4 bytes a parameter / R;
- activations of one micro-batch: its samples are those of the mini-batch at their longest, within the token budget, and
  a prompt that they share runs once; where ranks share rows, each has its part. Each token that runs keeps in each
  layer 6 vectors of the hidden size in float32 (residuals and norms), and in the dtype of the forward 4 more, its keys
  and values, and 4 vectors of the MLP's width (counted by hand on a Llama layer; Korthikanti et al., arXiv 2205.05198,
  count alike); attention gathers keys and values once more for each sample. W ranks share all of this but 8 vectors of
  the hidden size. With gradient checkpointing: the inputs of the layers, and one layer's inside;
- a forward of a role of its own (reference, actor_fwd): two vectors of the hidden size in float32 for each token of
  a micro-batch, and of the dtype of the forward what attention or the MLP of one layer makes, whichever is more;
- log-probs: logits of one chunk (or of the whole micro-batch, if that is less), four times (a chunk is what the largest
  accelerator holds at once; a smaller one takes a 32nd of its memory for all four), and the gradient of the
  head beside the one that it is added to, of V / W tokens; not for the critic;
- rollout: weights (0 where the engine uses the actor's own); keys and values of the answers in flight, which may be of
  as many partitions as the staleness allows and one more, in columns that grow by an eighth, and of their prompts, both
  no more than ``rollout.kv_cache_gib``; logits and probabilities of the
  rows that are drawn, four times.

Roles and phases that take turns on a device (``turn`` of a part) hold memory one after the other: a device needs the
parts that stay and the largest turn. What no file says is None, and the total is then a lower bound. It leaves out the
framework itself (about 0.5 GB a process) and fragmentation. ``python bench/memory.py`` measures all this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.base.machine import has_accelerator, physical_memory
from tandem.config.model import ActorConfig, ModelConfig
from tandem.config.schema import Config
from tandem.models.families import PER_DOCUMENT
from tandem.models.kv_cost import grown
from tandem.plan.files.model import ModelFacts, sampled_tokens
from tandem.plan.kv import kv_bound
from tandem.plan.parts.adapters import adapter_parameters
from tandem.plan.parts.batch import longest_sequence, mini_batch_prompts
from tandem.plan.parts.critic import critic_model, plan_critic
from tandem.plan.parts.engine import engine_width
from tandem.plan.parts.flow import plan_flow
from tandem.plan.parts.placement import Placement
from tandem.plan.parts.preference import samples_per_prompt
from tandem.plan.parts.teacher import teacher_parameters
from tandem.stages.facts import TEACHER

BYTES = {"float32": 4, "bfloat16": 2}
MASTER = 4
CHUNK, MOST, DRAWN = 1 << 23, 1 << 28, 1 << 24
"""Elements of logits that are there at once: of scored tokens on a CPU and on a large accelerator, of sampled ones."""
TRAINING, CRITIC, GENERATION, FORWARD = "training", "training of the critic", "generation", "forward"


@dataclass(frozen=True)
class Part:
    """Bytes on each device, None where they are unknown; ``turn``: the phase that it lasts for, None: it stays."""

    size: int | None
    turn: str | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """What is held on each device of a group, by what it is for."""

    group: str
    held: dict[str, Part]

    @property
    def parts(self) -> dict[str, int | None]:
        """Bytes of each part."""
        return {name: part.size for name, part in self.held.items()}

    @property
    def total(self) -> int:
        """Bytes at once, of what is known: the parts that stay, and the largest turn."""
        turns: dict[str | None, int] = {}
        for part in self.held.values():
            turns[part.turn] = turns.get(part.turn, 0) + (part.size or 0)
        return turns.pop(None, 0) + max(turns.values(), default=0)

    @property
    def known(self) -> bool:
        """Whether the total leaves nothing out."""
        return all(part.size is not None for part in self.held.values())


def plan_memory(
    config: Config,
    facts: ModelFacts | None,
    placed: tuple[Placement, ...],
    copies: int,
    shares: bool,
    critic: ModelFacts | None = None,
) -> tuple[MemoryPlan, ...]:
    """Return one estimate a group; none where sizes are unknown.

    ``facts`` are of the actor's model, ``critic`` of the critic's. ``copies`` are the actor's tags beside the weights
    in place, ``shares``: the engine uses the actor's weights.
    """
    if facts is None or not (facts.parameters and facts.hidden and facts.layers and facts.vocabulary):
        return ()
    groups: dict[str, dict[str, Part]] = {}
    for placement in placed:
        parts = groups.setdefault(placement.group, {})
        if placement.role == "actor":
            actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
            parts.update(
                _trained("actor", TRAINING, config, model, facts, placement, actor.micro_batch_tokens, copies, actor)
            )
            parts["actor log-probs"] = Part(_logprobs(config, facts, placement), TRAINING)
        elif placement.role == "critic" and critic is not None and critic.parameters:
            planned = plan_critic(config)
            assert planned is not None  # it is deployed
            model = critic_model(config)
            parts.update(_trained("critic", CRITIC, config, model, critic, placement, planned.max_tokens, 0))
        elif placement.role == "rollout":
            parts.update(_rollout(config, facts, shares))
        elif placement.role == TEACHER:
            known = teacher_parameters(config)
            parts["teacher weights"] = Part(None if known is None else MASTER * known // placement.devices)
        elif placement.role in ("reference", "actor_fwd"):
            parts[f"{placement.role} weights"] = Part(MASTER * facts.parameters // placement.devices)
            parts[f"{placement.role} forward"] = Part(_forward(config, facts, placement), FORWARD)
    return tuple(MemoryPlan(group, parts) for group, parts in groups.items() if parts)


def notes_on_memory(config: Config, runtime: str, plans: tuple[MemoryPlan, ...]) -> Iterator[str]:
    """Note a warning where one machine is to hold more than it has. An accelerator's memory is not known here."""
    device = config.runtime.device
    if runtime != "local" or device not in ("cpu", "auto") or (device == "auto" and has_accelerator()):
        return
    needed, there = sum(plan.total for plan in plans), physical_memory()
    if there is not None and needed > there:
        yield (
            f"WARNING: the step can need about {needed / 2**30:.1f} GiB, and this machine has {there / 2**30:.1f} GiB: "
            "lower ppo_max_token_len_per_gpu, data.train_batch_size or rollout.max_num_seqs, take "
            "gradient_checkpointing or lora_rank, or a smaller model"
        )


def _trained(
    role: str,
    turn: str,
    config: Config,
    model: ModelConfig,
    facts: ModelFacts,
    placement: Placement,
    budget: int,
    copies: int,
    shared: ActorConfig | None = None,
) -> dict[str, Part]:
    assert facts.parameters and facts.layers  # the caller looked
    ranks = placement.devices if shared is None else _sharded_over(placement, shared)
    trained = adapter_parameters(model, facts) if model.trains_adapters else facts.parameters
    split = 1 if shared is None else shared.tensor_model_parallel_size
    batch = _micro_batch(config, facts, placement.devices, budget, shared)
    weights = facts.parameters + (trained if model.trains_adapters else 0)
    found = {
        "weights": Part(MASTER * weights // ranks),
        "gradients": Part(MASTER * trained // ranks, turn),
        "optimizer": Part(2 * MASTER * trained // ranks),
        "activations": Part(_activations(model, facts, batch, split), turn),
    }
    if model.dtype != "float32" and (shared is None or shared.gather_dtype == "float32"):
        found["cast weights"] = Part(BYTES[model.dtype] * facts.parameters // split, turn)
    if shared is not None and shared.reduce_every == "mini_batch":
        found["whole gradients"] = Part(BYTES[shared.reduce_dtype] * trained, turn)
    if copies:
        found["other tags"] = Part((copies + 1) * MASTER * trained // ranks)
    return {f"{role} {name}": part for name, part in found.items()}


def _sharded_over(placement: Placement, actor: ActorConfig) -> int:
    """Return the ranks that have the actor's parameters among them: with Megatron-core those of one model."""
    return actor.tensor_model_parallel_size if actor.by_megatron else placement.devices


@dataclass(frozen=True)
class _Batch:
    """What a rank computes of its largest micro-batch: ``tokens`` of samples, ``run`` of them where prompts are
    shared.
    """

    tokens: int
    run: int


def _micro_batch(
    config: Config, facts: ModelFacts, ranks: int, budget: int, shared: ActorConfig | None = None
) -> _Batch:
    longest, n = longest_sequence(config), samples_per_prompt(config)
    most = config.actor_rollout_ref.actor.ppo_micro_batch_size
    together, rows = (1, 1) if shared is None else (shared.devices_of_a_sample, shared.ulysses_sequence_parallel_size)
    samples = math.ceil(mini_batch_prompts(config) * n / max(1, ranks // together))
    bounded = min(samples, max(1, budget // longest), samples if most is None else most)
    samples = n if config.trainer.exact else bounded
    copies = 1 if _each_alone(facts) else min(n, samples)
    prompts = math.ceil(samples / copies) * config.data.max_prompt_length
    run = prompts + samples * config.data.max_response_length
    return _Batch(math.ceil(samples * longest / rows), math.ceil(run / rows))


def _each_alone(facts: ModelFacts) -> bool:
    """Return whether each document has a row of its own, and its own prompt in it."""
    return any(family in PER_DOCUMENT for family in facts.families)


def _activations(model: ModelConfig, facts: ModelFacts, batch: _Batch, split: int) -> int:
    """Return what one micro-batch keeps for the backward."""
    width, hidden, layers = BYTES[model.dtype], facts.hidden or 0, facts.layers or 0
    mlp, keys = facts.inside or 4 * hidden, (facts.kv_heads or 0) * (facts.head_dim or 0)
    casts = 2 * hidden if width < MASTER else 0
    parted = (2 * hidden + 2 * keys + 4 * mlp) // split
    inside = (MASTER * 6 * hidden + width * (2 * hidden + parted + casts)) * batch.run
    inside += width * 2 * keys * batch.tokens // split
    return MASTER * hidden * layers * batch.run + inside if model.gradient_checkpointing else inside * layers


def _forward(config: Config, facts: ModelFacts, placement: Placement) -> int:
    """Return what one micro-batch has at once in a layer whose inside is not kept."""
    actor, width = config.actor_rollout_ref.actor, BYTES[config.actor_rollout_ref.model.dtype]
    hidden, keys = facts.hidden or 0, (facts.kv_heads or 0) * (facts.head_dim or 0)
    run = _micro_batch(config, facts, placement.devices, actor.micro_batch_tokens, actor).run
    return run * (2 * MASTER * hidden + width * max(3 * hidden + 2 * keys, 3 * (facts.inside or 4 * hidden)))


def _logprobs(config: Config, facts: ModelFacts, placement: Placement) -> int:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    vocabulary = (sampled_tokens(model, facts) or 0) // actor.tensor_model_parallel_size
    tokens = _micro_batch(config, facts, placement.devices, actor.micro_batch_tokens, actor).tokens
    answers = tokens * config.data.max_response_length // longest_sequence(config)
    head = 0 if model.trains_adapters else MASTER * vocabulary * (facts.hidden or 0)
    return 4 * MASTER * min(answers * vocabulary, MOST if _accelerated(config) else CHUNK) + head


def _rollout(config: Config, facts: ModelFacts, shares: bool) -> dict[str, Part]:
    assert facts.parameters and facts.layers  # the caller looked
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    width, ranks, n = BYTES[model.dtype], engine_width(config), rollout.n
    rows = min(rollout.max_num_seqs, config.data.train_batch_size * n * (1 + plan_flow(config).staleness))
    per_token = 2 * width * facts.layers * (facts.kv_heads or 0) * (facts.head_dim or 0)
    shared = n > 1 and not _each_alone(facts)
    prompt, answer = config.data.max_prompt_length, config.data.max_response_length
    columns = grown(answer if shared else prompt + answer)
    prompts = math.ceil(rows / n) * grown(prompt) if shared else 0
    held, bound = per_token * (rows * columns + prompts) // ranks, kv_bound(config)
    vocabulary = sampled_tokens(model, facts) or 0
    found = {
        "KV cache": Part(held if bound is None else min(held, bound), GENERATION),
        "logits": Part(4 * MASTER * min(rows * vocabulary, DRAWN), GENERATION),
    }
    if not shares:
        each = MASTER if rollout.name == "hf" else width
        found = {"weights": Part(each * facts.parameters // ranks), **found}
    if width < MASTER:
        found["cast weights"] = Part(width * facts.parameters // ranks, GENERATION)
    return {f"rollout {name}": part for name, part in found.items()}


def _accelerated(config: Config) -> bool:
    """Return whether roles compute on an accelerator, whose memory bounds what is there at once."""
    device = config.runtime.device
    return has_accelerator() if device == "auto" else device != "cpu"
