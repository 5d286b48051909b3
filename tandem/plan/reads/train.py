"""Which keys of a training run are read only in some configurations, and in which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tandem.config.schema import Config
from tandem.plan.checks.model.folder import renders
from tandem.plan.parts.engine import engine_capabilities
from tandem.plan.parts.entries import Entries
from tandem.plan.parts.placement import train_ranks
from tandem.plan.parts.preference import learns_preferences
from tandem.plan.parts.teacher import learns_from_reward, uses_teacher
from tandem.plan.reads.engine import engine_reads
from tandem.plan.reads.episode import episode_reads
from tandem.plan.reads.form import Reads, adapter_reads, checkpoint_reads, file_reads, schedule_reads, template_reads

ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Setting:
    """A config with what the plan made of it; ``shares``: the rollout engine generates with the actor's weights."""

    config: Config
    entries: Entries
    runtime: str
    shares: bool

    @property
    def prefers(self) -> bool:
        """Whether it learns from given answers."""
        return learns_preferences(self.config)

    @property
    def evaluates(self) -> bool:
        """Whether held-out rows are looked at during the run."""
        return self.config.evaluation.during_run

    @property
    def streams(self) -> bool:
        """Whether the engine has weights of its own, to which new ones travel."""
        return not (self.prefers or self.shares)


_GIVEN = "it learns from given answers, nothing is generated"

PREFERENCES: tuple[Reads[Setting], ...] = (
    Reads(
        (
            "reward_manager",
            "algorithm.adv_estimator",
            f"{ROLLOUT}",
            "actor_rollout_ref.teacher",
            "data.answer_key",
            "data.extra_keys",
            "evaluation.n",
            "evaluation.k",
            "evaluation.temperature",
            "evaluation.top_p",
            "trainer.rollouts_per_step",
            "trainer.samples",
            "runtime.threads",
        ),
        lambda s: not s.prefers,
        lambda s: f"{s.config.algorithm.policy_loss.type}: {_GIVEN}",
        noted=True,
    ),
    Reads(
        (
            "algorithm.loss_agg_mode",
            "algorithm.loss_scale_factor",
            "algorithm.entropy_coef",
            "actor_rollout_ref.actor.router_aux_loss_coef",
            "actor_rollout_ref.actor.router_replay",
            "algorithm.use_tis",
            "algorithm.tis_cap",
            f"{CORRECTION}",
            "algorithm.old_logprobs",
            "algorithm.overlong",
            "algorithm.stages",
            "algorithm.distillation",
            "algorithm.filter_groups",
        ),
        lambda s: not s.prefers,
        lambda s: (
            f"{s.config.algorithm.policy_loss.type} is a mean over "
            f"{'pairs' if s.config.data.label_key is None else 'answers'} and has no such term"
        ),
    ),
    Reads(
        ("data.chosen_key", "data.rejected_key"),
        lambda s: s.prefers and s.config.data.label_key is None,
        lambda s: (
            "labelled rows have one answer" if s.prefers else "the loss learns from rewards, not from given pairs"
        ),
        "Leave it out, or write algorithm.policy_loss.type: dpo",
    ),
    Reads(
        ("data.response_key", "data.label_key"),
        lambda s: s.prefers and s.config.data.label_key is not None,
        lambda s: (
            "rows are pairs where data.label_key is null"
            if s.prefers
            else "the loss learns from rewards, not from labelled answers"
        ),
        "Leave it out, or write data.label_key and algorithm.policy_loss.type: kto",
    ),
    Reads(
        ("data.on_overlong_response",),
        lambda s: s.prefers,
        "generated answers end at data.max_response_length",
        "Leave it out; algorithm.overlong: mask leaves answers that were cut out of the loss",
    ),
)

ALGORITHM: tuple[Reads[Setting], ...] = (
    *schedule_reads("actor_rollout_ref.actor.optim", lambda s: s.config.actor_rollout_ref.actor.optim.schedule),
    *adapter_reads(MODEL, lambda s: s.config.actor_rollout_ref.model),
    Reads(
        ("algorithm.kl.type", "algorithm.kl.coef"),
        lambda s: s.config.algorithm.kl.where != "off",
        "a KL that is off has no weight and no type",
        "Write algorithm.kl.in: loss or reward, or remove it",
    ),
    Reads(
        ("algorithm.kl.controller",),
        lambda s: s.config.algorithm.kl.where == "reward",
        "the adaptive controller steers a KL in the reward; this config has none",
        "Write kl.in: reward, or controller: fixed",
    ),
    Reads(
        ("algorithm.kl.target", "algorithm.kl.horizon"),
        lambda s: s.config.algorithm.kl.controller == "adaptive",
        "the coefficient of the KL is fixed: nothing steers it",
        "Write algorithm.kl.controller: adaptive, or leave it out",
    ),
    Reads(
        ("algorithm.loss_scale_factor",),
        lambda s: s.config.algorithm.loss_agg_mode == "seq-mean-token-sum-norm",
        lambda s: f"it divides the loss of seq-mean-token-sum-norm, and the mode is {s.config.algorithm.loss_agg_mode}",
        "Remove it, or write loss_agg_mode: seq-mean-token-sum-norm",
    ),
    Reads(
        ("algorithm.tis_cap",),
        lambda s: s.config.algorithm.use_tis,
        "it caps the weights of use_tis, which is off",
        f"Write algorithm.use_tis: true, or {CORRECTION}.cap with {CORRECTION}.weights: token",
    ),
    Reads(
        (f"{CORRECTION}.cap",),
        lambda s: s.config.algorithm.rollout_correction.weights != "off",
        lambda s: (
            "use_tis has a cap of its own"
            if s.config.algorithm.use_tis
            else "it caps importance weights, and there are none"
        ),
        "Write weights: token or sequence beside it, or algorithm.tis_cap with use_tis",
    ),
    Reads(
        (f"{CORRECTION}.floor", f"{CORRECTION}.normalize"),
        lambda s: s.config.algorithm.correction.weights != "off",
        "it shapes importance weights, and there are none",
        "Write weights: token or sequence",
    ),
    Reads(
        ("algorithm.filter_groups.max_draws",),
        lambda s: s.config.algorithm.filter_groups.enable or s.config.reward_manager.on_error == "refill",
        "nothing is drawn again: no group is filtered, and a failed scoring is not refilled",
        "Write algorithm.filter_groups.enable: true, or leave it out",
    ),
    Reads(
        ("algorithm.adv_estimator",),
        lambda s: s.prefers or learns_from_reward(s.config),
        "only a teacher is learned from: no advantages are estimated",
        noted=True,
    ),
    Reads(
        ("algorithm.distillation", "actor_rollout_ref.teacher"),
        lambda s: uses_teacher(s.config),
        "algorithm.distillation.coef is 0: nothing is learned from a teacher, and none is loaded",
        noted=True,
    ),
    Reads(
        ("critic",),
        lambda s: s.config.critic.enable,
        "critic.enable is false",
        noted=True,
    ),
    *schedule_reads("critic.optim", lambda s: s.config.critic.optim.schedule),
    *adapter_reads("critic.model", lambda s: s.config.critic.model),
)


def _takes_turns(role: str, setting: Setting) -> bool:
    section = setting.config.actor_rollout_ref
    offload = section.actor.offload if role == "actor" else section.rollout.offload
    return offload is False or (setting.config.execution.mode == "colocate" and not setting.prefers)


_TAKES_TURNS = "the engine generates with the actor's own weights, in turns with it"

EXECUTION: tuple[Reads[Setting], ...] = (
    *episode_reads(lambda s: s.config),
    Reads(
        (f"{ROLLOUT}.on_weight_update",),
        lambda s: s.config.execution.mode != "colocate",
        "nothing is being generated when weights change in colocate",
        "Remove it, or write execution.mode: hybrid",
    ),
    *(
        Reads(
            (f"actor_rollout_ref.{role}.offload",),
            partial(_takes_turns, role),
            "actor and engine have devices of their own, and nobody else could use what they give up",
            "Remove it, or write execution.mode: colocate",
        )
        for role in ("actor", "rollout")
    ),
    Reads(
        (f"{ROLLOUT}.partial",),
        lambda s: s.config.actor_rollout_ref.rollout.on_weight_update == "abort",
        lambda s: f"nothing is aborted with on_weight_update: {s.config.actor_rollout_ref.rollout.on_weight_update}",
        "Remove it, or write on_weight_update: abort",
    ),
    Reads(
        (f"{ROLLOUT}.keep_kv",),
        lambda s: s.config.actor_rollout_ref.rollout.on_weight_update == "keep",
        lambda s: (
            "no generation goes on over new weights with on_weight_update: "
            f"{s.config.actor_rollout_ref.rollout.on_weight_update}"
        ),
        "Remove it, or write on_weight_update: keep",
    ),
    *engine_reads(lambda s: s.config),
    Reads(
        (f"{ROLLOUT}.dispatch",),
        lambda s: s.streams,
        lambda s: _GIVEN if s.prefers else f"one engine is given all prompts of a step at once: {_TAKES_TURNS}",
        "Leave it out, or write execution.mode: hybrid",
    ),
    Reads(
        (f"{ROLLOUT}.oversample",),
        lambda s: not s.prefers,
        _GIVEN,
        "Leave it out",
    ),
    Reads(
        ("actor_rollout_ref.ref.fsdp_config",),
        lambda s: False,
        "the reference is sharded as the actor is",
        noted=True,
    ),
    Reads(
        ("execution.weight_sync.overlap",),
        lambda s: s.config.execution.mode != "colocate",
        "there is no transfer to overlap in colocate: actor and rollout take turns",
        "Write false, or execution.mode: hybrid",
    ),
    Reads(
        (
            "execution.weight_sync.bucket_mb",
            "execution.weight_sync.deadline_s",
            "execution.weight_sync.health_s",
            "execution.data_plane.capacity_groups",
            "execution.max_engine_restarts",
            "execution.stall_warning_s",
        ),
        lambda s: s.streams,
        lambda s: _GIVEN if s.prefers else f"nothing streams in colocate: {_TAKES_TURNS}",
        noted=True,
    ),
    Reads(
        ("execution.weight_sync.probe",),
        lambda s: s.streams and engine_capabilities(s.config).proof == "fingerprint",
        lambda s: (
            f"the engine {s.config.actor_rollout_ref.rollout.name} is asked at every push"
            if s.streams
            else "no new weights travel"
        ),
        noted=True,
    ),
    Reads(
        (f"{ROLLOUT}.swap",),
        lambda s: s.config.actor_rollout_ref.rollout.swap is not None,
        "the engine is the same to the end",
    ),
    Reads(
        (f"{ROLLOUT}.start_s",),
        lambda s: s.streams and not s.config.runtime.threads,
        lambda s: "no engine is started in a process of its own",
        noted=True,
    ),
    Reads(
        ("execution.weight_sync.lora",),
        lambda s: s.streams and s.config.actor_rollout_ref.model.trains_adapters,
        lambda s: (
            "no new weights travel" if s.shares or s.prefers else "there are no adapters: all weights are trained"
        ),
        noted=True,
    ),
    Reads(
        ("execution.data_plane.num_data_storage_units",),
        lambda s: s.runtime == "ray" and not s.prefers,
        "the store is in this process: only on Ray are there storage actors",
        noted=True,
    ),
    Reads(
        ("execution.balance_data",),
        lambda s: train_ranks(s.config) > 1,
        "one train rank has all tokens: there is nothing to balance",
        noted=True,
    ),
    Reads(
        ("reward_manager.workers", "reward_manager.start_s"),
        lambda s: not s.config.runtime.threads,
        "runtime.threads keeps scoring in this process",
        noted=True,
    ),
)

DATA: tuple[Reads[Setting], ...] = (
    Reads(
        ("data.prompt_key",),
        lambda s: s.config.data.template is None and s.config.data.reasoning_gym is None,
        lambda s: (
            "a procedural task has its own column"
            if s.config.data.template is None
            else "data.template builds the prompt"
        ),
        "Leave one of the two out",
    ),
    Reads(
        ("data.answer_key", "data.extra_keys"),
        lambda s: s.config.data.reasoning_gym is None,
        "a procedural task has its own columns",
    ),
    Reads(
        ("data.system_prompt",),
        lambda s: s.config.data.chat,
        "only a chat template has a place for it, and data.chat is false",
        "Write data.chat: true, or leave it out",
    ),
    Reads(
        ("data.tools_key",),
        lambda s: s.config.data.reasoning_gym is None and (s.config.data.chat or s.config.data.template is None),
        lambda s: (
            "a procedural task has no tools"
            if s.config.data.reasoning_gym is not None
            else "only a chat template has a place for tools, and data.template makes plain text"
        ),
        "Write data.chat: true, or leave it out",
    ),
    template_reads(lambda s: renders(s.config)),
    file_reads(lambda s: s.config.data),
    Reads(
        ("data.drop_val_prompts",),
        lambda s: bool(s.config.data.val_files) or s.config.data.source is not None or s.evaluates,
        "nothing is held out",
        noted=True,
    ),
    Reads(
        ("data.val_files",),
        lambda s: s.evaluates or s.config.data.drop_val_prompts,
        "nothing is evaluated during the run; `tandem eval` reads it",
        noted=True,
    ),
    Reads(
        ("evaluation.n", "evaluation.k", "evaluation.temperature", "evaluation.top_p", "evaluation.max_prompts"),
        lambda s: s.evaluates,
        "nothing is evaluated during the run; `tandem eval` reads it",
        noted=True,
    ),
    Reads(
        ("trainer.samples.max_mb", "trainer.samples.tokens"),
        lambda s: s.config.trainer.samples.every > 0,
        "trainer.samples.every is 0: no samples are kept",
        noted=True,
    ),
    Reads(
        ("evaluation.top_p",),
        lambda s: s.config.evaluation.temperature > 0,
        "evaluation.temperature 0 is greedy",
        noted=True,
    ),
    Reads(
        ("trainer.export_dtype",),
        lambda s: s.config.trainer.export == "merged" or s.config.critic.enable,
        "trainer.export is adapter, and an adapter stays in float32",
        "Leave it out, or write trainer.export: merged",
    ),
    checkpoint_reads(lambda s: s.config.trainer),
)

READS = (*PREFERENCES, *ALGORITHM, *EXECUTION, *DATA)
