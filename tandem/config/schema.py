"""The two documents: a training run and an SFT run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr

from tandem.config.correction import RolloutCorrectionConfig
from tandem.config.execution import ColocateExecution, Execution, RuntimeConfig
from tandem.config.model import (
    ActorRolloutRef,
    Aggregation,
    CriticConfig,
    ModelConfig,
    OptimConfig,
)
from tandem.config.node import Count, File, Files, MaybeFile, Names, Node, Seconds, TypedNode, Whole
from tandem.config.trainer import TrainerConfig


class KlConfig(Node):
    """The penalty for leaving the reference policy."""

    where: Annotated[Literal["off", "loss", "reward"], Field(alias="in")] = "off"
    """Added to the loss, taken from the reward, or off."""
    type: str = "k3"
    """Estimator. In the loss, k3 has the gradient of KL(ref || policy), k3+ and k2 that of KL(policy || ref); none of
    them weighs samples of older weights."""
    coef: NonNegativeFloat = 0.001
    """Weight; 0 is off."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Whether the coefficient moves towards a target."""
    target: PositiveFloat = 0.1
    """KL per token that the adaptive controller steers to."""
    horizon: int = 10000
    """Samples over which the adaptive controller acts."""


class FilterGroupsConfig(Node):
    """Draw another prompt where all rewards of a group are equal (no signal)."""

    enable: bool = False
    max_draws: PositiveInt = 10
    """Draws in a row for one ticket that may be filtered before the run ends with an error."""


class AdvantageConfig(TypedNode):
    """``{type: NAME, ...parameters}`` of the estimator."""

    type: str = "grpo"


class PolicyLossConfig(TypedNode):
    """``{type: NAME, ...parameters}`` of the loss."""

    type: str = "ppo_clip"


class StageConfig(TypedNode):
    """``{type: NAME, ...parameters}`` of a stage that a plug-in registers."""


class DistillationConfig(TypedNode):
    """Learning from a teacher: ``{type: NAME, ...parameters}`` of the objective, and its weight."""

    type: str = "reverse_kl"
    """Objective."""
    coef: NonNegativeFloat = 1.0
    """Weight of the teacher's advantage or loss; 0 is off."""
    only: bool = False
    """Learn from the teacher alone: the reward trains nothing, and needn't be there."""


class AlgorithmConfig(Node):
    """What the policy learns from: advantages, loss and KL."""

    adv_estimator: str | AdvantageConfig = "grpo"
    """Advantage estimator: a name, or {type: NAME, ...parameters}."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Policy loss with its parameters."""
    loss_agg_mode: Aggregation = "token-mean"
    """How per-token losses become one number."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; default: data.max_response_length."""
    kl: KlConfig = KlConfig()
    distillation: DistillationConfig | None = None
    """What is learned from ``actor_rollout_ref.teacher``; null: nothing."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    use_tis: bool = False
    """Truncated importance weights old / rollout: short for rollout_correction.weights: token."""
    tis_cap: PositiveFloat = 2.0
    """Where the weights of ``use_tis`` are truncated."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Weights and rejections for samples of another policy than the one at the start of a step."""
    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """Where the proximal log-probs come from; ``auto`` skips the pass where the ratio is 1 by construction. In
    fully_async they are of actor_fwd's weights, up to max_staleness versions older than the step's."""
    stages: list[str | StageConfig] = []
    """Stages of plug-ins that a step has beside its own: names, or {type: NAME, ...parameters}."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong: Literal["train", "mask"] = "train"
    """Whether answers cut at max_response_length enter statistics and loss."""

    @property
    def correction(self) -> RolloutCorrectionConfig:
        """The rollout correction, in either way of writing it."""
        if not self.use_tis:
            return self.rollout_correction
        return self.rollout_correction.model_copy(update={"weights": "token", "cap": self.tis_cap})


NO_REWARD = "none"
"""The scorer that scores nothing."""


class RewardConfig(TypedNode):
    """The scorer: ``type``, its parameters, and where it runs."""

    type: str = "exact"
    file: MaybeFile = None
    """A .py file that defines the scorer named by ``type``."""
    workers: Count = 1
    """Scoring processes."""
    timeout_s: Seconds = 30.0
    """Deadline of one scoring, in seconds."""
    start_s: Seconds = 120.0
    """Deadline of a scoring process to get ready (imports, a reward model), in seconds."""
    on_error: Literal["mask", "refill", "stop"] = "mask"
    """A failed scoring: leave the sample out, draw the group anew, or end the run."""
    _whole: Whole = PrivateAttr(default_factory=Whole)

    @property
    def root(self) -> Config | None:
        """The whole config that this section belongs to; None for a section made by hand."""
        root: Config | None = self._whole.config
        return root


class SourceConfig(TypedNode):
    """A data source of the user's: class ``type`` in ``file``, with its constructor's parameters; or ``verifiers``."""

    file: MaybeFile = None
    """A .py file that defines a subclass of BaseDataSource. Without one ``type`` is a built-in source: verifiers."""


class DataConfig(Node):
    """Prompts, or preferences where the policy loss learns from them."""

    train_files: Files = []
    """Parquet or jsonl files."""
    val_files: Files = []
    """Held-out prompts for the evaluation."""
    reasoning_gym: dict[str, Any] | None = None
    """A procedural task instead of files: {dataset: NAME, size: N, seed: S, ...}."""
    source: SourceConfig | None = None
    """Rows from Python instead of files: {file: FILE.py, type: CLASS, ...parameters}."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    answer_key: str | None = "answer"
    """Column of the ground truth; null: there is none."""
    uid_key: str | None = None
    """Column that identifies a row; default: file and row number."""
    data_source_key: str | None = None
    """Column that names the row's origin."""
    extra_keys: Names = []
    """Columns handed to the scorer as extra_info."""
    chosen_key: str = "chosen"
    """Preferences: column of the better answer, text or chat messages."""
    rejected_key: str = "rejected"
    """Preferences: column of the worse answer."""
    label_key: str | None = None
    """Preferences of single answers: column of true (good) or false (bad); null: rows are pairs."""
    response_key: str = "response"
    """Preferences of single answers: column of the answer."""
    template: str | None = None
    """Text built from columns, such as "{question}\\n"; replaces prompt_key."""
    chat: bool = False
    """Wrap a plain text in the tokenizer's chat template."""
    chat_template: MaybeFile = None
    """File of a chat template (Jinja) in place of the tokenizer's own; it is saved with the model."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as {enable_thinking: false}: its defaults then, in saved models too."""
    system_prompt: str | None = None
    """System message of the chat template."""
    tools_key: str | None = None
    """Column of tool definitions for the chat template: a list of mappings, or JSON text; null in a row: no tools."""
    image_key: str | None = None
    """Column of the images of a row: one or a list of paths, bytes, data URLs or {bytes, path}; null: none beside those
    in messages."""
    image_max_pixels: PositiveInt = 2**24
    """Pixels (width × height) that an image may have; a larger one makes a bad row."""
    image_max_bytes: PositiveInt = 2**25
    """Bytes that the file of an image may have."""
    keep_nulls: bool = False
    """Keep null keys in messages and tools of parquet and Python rows, though Arrow gives all rows the same keys."""
    train_batch_size: PositiveInt = 256
    """Prompts per step (P)."""
    max_prompt_length: PositiveInt = 512
    """Tokens."""
    max_response_length: PositiveInt = 512
    """Tokens."""
    on_overlong_prompt: Literal["error", "drop", "left", "right"] = "error"
    """A prompt over max_prompt_length: refuse, drop (counted), or cut its left or right end."""
    on_overlong_response: Literal["error", "drop", "right"] = "error"
    """Preferences: an answer over max_response_length: refuse, drop (counted), or keep its beginning."""
    on_bad_row: Literal["error", "drop"] = "error"
    """A row that can't be read: refuse, or drop (counted)."""
    shuffle: bool = True
    """New order each epoch, by seed."""
    use_streaming_dataset: bool = False
    """Read from disk as needed instead of holding all rows."""
    drop_val_prompts: bool = True
    """Leave training rows out whose prompt is also held out (counted)."""


class EvaluationConfig(Node):
    """Scores on held-out prompts during the run."""

    interval: NonNegativeInt = 0
    """Every so many steps; 0 is off."""
    at_start: bool = False
    """Also before the first step."""
    n: PositiveInt = 1
    """Samples per prompt."""
    k: list[PositiveInt] = []
    """pass@k to report; each at most n."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_prompts: PositiveInt | None = None
    """Only the first so many prompts."""

    @property
    def during_run(self) -> bool:
        """Whether a run scores held-out prompts by itself."""
        return self.interval > 0 or self.at_start


class Config(Node):
    """A training run: ``tandem train run.yaml``."""

    execution: Execution = ColocateExecution()
    actor_rollout_ref: ActorRolloutRef
    critic: CriticConfig = CriticConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward_manager: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    plugins: Names = []
    """Modules imported in the driver and in every worker."""

    def model_post_init(self, context: Any, /) -> None:
        """Let the sections that are built one by one find the whole; copies, since defaults are shared by configs.

        Where only a teacher is learned from, no reward is what nothing written means.
        """
        teaching = self.algorithm.distillation
        if teaching is not None and teaching.only and "reward_manager" not in self.model_fields_set:
            self.__dict__["reward_manager"] = RewardConfig(type=NO_REWARD)
        for name in ("actor_rollout_ref", "critic", "reward_manager"):
            section = getattr(self, name).model_copy()
            section._whole = Whole(self)
            self.__dict__[name] = section


class NewModelConfig(Node):
    """A fresh Llama with a character tokenizer, for tasks that a laptop learns."""

    alphabet: Annotated[str, Field(min_length=1)]
    """One token a character; the first one ends an answer."""
    hidden_size: Annotated[int, Field(ge=8, le=2**16)] = 128
    num_layers: Count = 4
    num_heads: Count = 4
    max_position_embeddings: Annotated[int, Field(gt=0, le=2**24)] = 256
    chat_template: str | None = None
    """Jinja template of conversations, for rows of messages."""


class SftModelConfig(ModelConfig):
    """The model that is tuned, loaded or made."""

    path: File = ""
    """A local Hugging Face folder or a hub id; empty with ``new``."""
    new: NewModelConfig | None = None
    """Make a model instead of loading one."""


class MixPartConfig(Node):
    """One data set of a mix. Columns left out are those of ``data``; naming some decides what its rows are."""

    files: Files
    """Parquet or jsonl files."""
    weight: PositiveFloat = 1.0
    """Its share of the examples is its weight over the sum of all."""
    name: str | None = None
    """What metrics call it; default: its first file's name without the ending."""
    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    tools_key: str | None = None
    chat: bool | None = None


class SftDataConfig(Node):
    """Examples: conversations, or prompt and response."""

    train_files: Files = []
    """Parquet or jsonl files."""
    mix: list[MixPartConfig] = []
    """Several data sets by weight, instead of train_files: [{files: [...], weight: 0.7}, ...]."""
    val_files: Files = []
    """Held-out rows."""
    source: SourceConfig | None = None
    """Rows from Python instead of files: {file: FILE.py, type: CLASS, ...parameters}."""
    messages_key: str | None = None
    """Column of chat messages; else prompt_key and response_key are used."""
    prompt_key: str = "prompt"
    response_key: str = "response"
    tools_key: str | None = None
    """Column of tool definitions for the chat template: a list of mappings, or JSON text; null in a row: no tools."""
    image_key: str | None = None
    """Column of the images of a row: one or a list of paths, bytes, data URLs or {bytes, path}; null: none beside those
    in messages."""
    image_max_pixels: PositiveInt = 2**24
    """Pixels (width × height) that an image may have; a larger one makes a bad row."""
    image_max_bytes: PositiveInt = 2**25
    """Bytes that the file of an image may have."""
    keep_nulls: bool = False
    """Keep null keys in messages and tools of parquet and Python rows, though Arrow gives all rows the same keys."""
    chat: bool = False
    """Wrap prompt and response in the tokenizer's chat template."""
    chat_template: MaybeFile = None
    """File of a chat template (Jinja) in place of the tokenizer's own; it is saved with the model."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as {enable_thinking: false}: its defaults then, in saved models too."""
    add_eos: bool = True
    """End a response with the tokenizer's end token (prompt and response only)."""
    max_length: PositiveInt = 1024
    """Tokens of a whole example."""
    on_overlong: Literal["error", "drop", "right"] = "error"
    """An example over max_length: refuse, drop (counted), or keep its beginning."""
    on_bad_row: Literal["error", "drop"] = "error"
    train_batch_size: PositiveInt = 32
    """Examples per optimizer step."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Token budget of a micro-batch."""
    shuffle: bool = True


class SftEvaluationConfig(Node):
    """The loss on held-out rows, and greedy answers to their prompts (prompt and response rows)."""

    interval: NonNegativeInt = 0
    """Every so many updates; 0 is off."""
    max_new_tokens: PositiveInt = 16
    stop_at_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """End the training once so many answers are exact."""


class SftConfig(Node):
    """Supervised fine-tuning: ``tandem sft sft.yaml``."""

    model: SftModelConfig
    data: SftDataConfig
    optim: OptimConfig = OptimConfig(lr=1e-5)
    evaluation: SftEvaluationConfig = SftEvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    runtime: RuntimeConfig = RuntimeConfig()
