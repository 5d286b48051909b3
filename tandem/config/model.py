"""The actor, its model, its optimizer, the rollout engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from tandem.config.node import Count, File, Files, MaybeFile, Names, Node, Seconds, Section, TypedNode

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Decay = Annotated[float, Field(ge=0, lt=1)]


OnWeightUpdate = Literal["wait", "abort", "keep"]
"""What becomes of a running generation when new weights arrive."""


class ModelConfig(Node):
    """The model that is trained."""

    path: File
    """A local Hugging Face folder or a hub id."""
    tokenizer_path: MaybeFile = None
    """Folder of the tokenizer; default: the model's."""

    @property
    def tokenizer(self) -> str:
        """The folder or hub id of the tokenizer: the model's own unless another one is named."""
        return self.path if self.tokenizer_path is None else self.tokenizer_path

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the forward; master weights stay float32."""
    trust_remote_code: bool = False
    """Run code that the model's folder ships."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, more time."""
    freeze: list[Literal["vision_tower", "projector"]] = []
    """Parts of a model that sees images which are not trained."""
    adapter_path: MaybeFile = None
    """Folder of a PEFT LoRA adapter that the run starts from and goes on training; rank and targets are its own."""
    lora_rank: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: PositiveFloat = 32.0
    """Scale of LoRA adapters."""
    lora_target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Modules that get adapters."""
    lora_base_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the frozen weights of modules with adapters are held in; bfloat16 halves them and changes no result of
    ``dtype: bfloat16``, which casts them anyway."""

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are what is trained, beside frozen base weights."""
        return self.lora_rank > 0 or self.adapter_path is not None


class OptimConfig(Node):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    """Decay of the moment estimates."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Updates of linear warm-up."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the learning rate is after the last update, as a part of the peak; that update's own is a little more."""
    num_cycles: PositiveFloat = 0.5
    """Periods of the cosine: a half falls once, each more rises to the peak and falls again."""


class ActorConfig(Node):
    """How the policy is trained."""

    strategy: str = "fsdp2"
    """Training engine: fsdp2 (or fsdp, the same), or megatron, which needs the package megatron-core."""
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; default: data.train_batch_size."""
    global_batch_size: PositiveInt | None = None
    """Samples per optimizer step (mini-batch × n): another way to write ppo_mini_batch_size."""
    ppo_epochs: PositiveInt = 1
    """Passes over a partition."""
    ppo_micro_batch_size: PositiveInt | None = None
    """Samples per micro-batch; default: token budgets only."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Token budget of a micro-batch on one device."""
    tensor_model_parallel_size: PositiveInt = 1
    """Tensor parallelism of training: neighbouring devices of the actor that each layer and the vocabulary are split
    over."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Sequence parallelism of training: neighbouring devices of the actor that share the tokens of each sample."""
    tag_device: Literal["cpu", "device"] = "cpu"
    """Where copies of the weights are kept (ref, old_actor, a teacher): in the host's memory, or beside the weights."""
    gather_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which dtype the actor's devices send each other the weights of a layer before they compute it; bfloat16 is
    half the traffic, and no copy of a layer stays until its backward. The shards that are trained stay float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which dtype the gradients of the actor's devices are summed."""
    reduce_every: Literal["micro_batch", "mini_batch"] = "micro_batch"
    """When they are: mini_batch sums once for all its micro-batches, and holds whole gradients on each device until
    then."""
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Mixture of experts: what the balance of each sample over the experts weighs in the loss; 0 is off."""
    router_replay: bool = False
    """Mixture of experts: the experts that the engine sent each token to are recorded, and taken in training too."""
    offload: bool | None = None
    """Keep the optimizer's moments in the host's memory while the engine generates; default: in colocate."""
    optim: OptimConfig = OptimConfig()

    @property
    def by_megatron(self) -> bool:
        """Whether Megatron-core's model is trained in the place of transformers'."""
        return self.strategy == "megatron"

    @property
    def devices_of_a_sample(self) -> int:
        """How many devices see each sample."""
        return self.tensor_model_parallel_size * self.ulysses_sequence_parallel_size

    @property
    def micro_batch_tokens(self) -> int:
        """Token budget of a micro-batch, on all devices that share its tokens."""
        return self.ppo_max_token_len_per_gpu * self.ulysses_sequence_parallel_size


class SandboxConfig(Node):
    """What a program of the tool ``python`` may use."""

    isolation: Literal["full", "network", "limits"] = "full"
    """What it can't reach: anything; the network; nothing but the limits of time and memory (for models you trust)."""
    seconds: Seconds = 5.0
    """Longest time of a program."""
    memory_mb: PositiveInt = 512
    """Memory of a program, in MiB."""
    packages: Names = []
    """Installed packages that a program may import besides Python's own library."""


class EpisodeConfig(TypedNode):
    """What a sample is: one answer, or an episode of several turns. ``type``, its parameters, and where it runs."""

    type: str = "single_turn"
    """single_turn, tool_calls, program, verifiers, openenv, or the name of an async function of ``file``."""
    file: MaybeFile = None
    """A .py file that defines the episode named by ``type``."""
    tools: Files = []
    """What a model may call: .py files whose functions are tools, and the word python for a sandbox that runs
    programs."""
    mcp: dict[str, Names] = {}
    """MCP servers whose tools a model may call: name -> command that is started and speaks over standard input and
    output."""
    sandbox: SandboxConfig = SandboxConfig()
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "pythonic"] = "auto"
    """How the model writes calls; ``auto`` is what the chat template shows."""
    past: Literal["fixed", "edited", "template"] | None = None
    """Whether earlier messages may change: not at all, by the episode, or by the chat template too; there the context
    begins anew. Default: edited for a program and for environments of others, else fixed."""
    max_turns: PositiveInt = 8
    """Turns after which an episode is cut."""
    max_sampled: PositiveInt | None = None
    """Most tokens that the model may sample in an episode, whatever tools say between them; data.max_response_length
    bounds all of them together."""
    branches: Count = 1
    """Conversations that an episode may have side by side, each asked for with a number from 0 on; max_turns holds for
    each, and each has an equal share of data.max_response_length and of max_sampled."""
    turn_rewards: bool = False
    """The episode rewards single turns besides: each counts from its turn backwards, not for all tokens alike."""
    timeout_s: Seconds = 60.0
    """Seconds that an episode may take outside of the policy, for its tools and its environment."""
    workers: Count = 1
    """Processes in which episodes run."""
    concurrency: Count = 256
    """Most episodes at a time in one process."""
    start_s: Seconds = 120.0
    """Deadline of a process to get ready (imports), in seconds."""


class SwapConfig(Node):
    """Another engine that takes over between two steps."""

    step: PositiveInt
    """The first step whose weights it is pushed before the step begins; steps count from 0."""
    name: str
    """Rollout engine."""
    python: MaybeFile = None
    """Interpreter of its process; see ``rollout.python``."""


class RolloutConfig(Node):
    """How answers are generated."""

    name: str = "hf"
    """Rollout engine."""
    python: MaybeFile = None
    """Interpreter of the engine's process, where the engine is installed in an environment of its own; default: the
    one that runs Tandem."""
    n: PositiveInt = 8
    """Samples per prompt."""
    do_sample: bool = True
    """Sample; greedy decoding can't train."""
    temperature: Annotated[float, Field(le=100)] = 1.0
    """Divides the logits."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 keeps all tokens."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Tokens kept; -1 keeps all."""
    stop_token_ids: list[TokenId] = []
    """Tokens that end an answer besides the tokenizer's end token."""
    ignore_eos: bool = False
    """Generate max_response_length tokens whatever comes."""
    logprobs_of: Literal["sampled", "full"] = "sampled"
    """Which distribution rollout_logprobs describe: the one sampled from, or before top-p/top-k."""
    max_num_seqs: PositiveInt = 512
    """Most samples in flight per engine."""
    offload: bool | None = None
    """Give up the engine's memory on the device while the actor trains; default: in colocate."""
    max_num_batched_tokens: PositiveInt = 16384
    """Token budget of a prefill."""
    tensor_model_parallel_size: PositiveInt = 1
    """Devices per engine."""
    start_s: PositiveFloat = 600.0
    """Longest start of an engine: imports, loading, compiling, in seconds."""
    on_weight_update: OnWeightUpdate = "wait"
    """What a running generation does when weights arrive."""
    partial: Literal["resume", "discard"] = "resume"
    """What becomes of an aborted generation."""
    episode: EpisodeConfig = EpisodeConfig()
    keep_kv: Literal["old", "recompute"] = "old"
    """Under ``keep``: go on with the old keys and values, or recompute them."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """vLLM and SGLang only."""
    enable_chunked_prefill: bool = True
    """vLLM and SGLang only."""
    kv_cache_gib: PositiveFloat | None = None
    """hf only: GiB of memory that an engine's keys and values may take; prompts wait until they fit. Default: 80 % of
    what the device has free when a generation begins, on the CPU half."""
    strict: bool = True
    """Refuse settings that only another engine has; false: they are listed as not used, so that one file serves
    several engines."""
    dispatch: Literal["auto", "in_order", "longest_first"] = "auto"
    """In which order engines are given the prompts of a step: as drawn, or those first whose answers were longest in
    earlier epochs; ``auto``: the second where several engines share them, unless ``trainer.exact``."""
    oversample: NonNegativeInt = 0
    """Groups that are begun for a step beyond those that it needs: the first that are done are taken, the others ended.
    Long answers are taken less often then."""
    swap: SwapConfig | None = None
    """Another engine from some step on; default: the same to the end."""


class RefConfig(Node):
    """The reference policy: a tag of the actor in colocate and hybrid."""

    update_interval: PositiveInt | None = None
    """Refresh the reference with the actor's weights every so many steps; default: never."""
    fsdp_config: dict[str, Any] | str = {}
    """Of other programs, and not used: the reference is sharded as the actor is."""


class TeacherConfig(Node):
    """Whom the actor learns from by distillation: one model for all samples, or one for each data source."""

    path: MaybeFile = None
    """A local Hugging Face folder or a hub id: the teacher of every sample that ``by_source`` has none for."""
    by_source: dict[str, str] = {}
    """Data source -> folder or hub id of its teacher."""


class ActorRolloutRef(Section):
    """The composite node: one model as actor, rollout and reference."""

    hybrid_engine: bool | None = None
    """Whether ref, old_actor and teacher are tags inside the actor; default: what the mode needs."""
    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()
    teacher: TeacherConfig = TeacherConfig()


class CriticConfig(Section):
    """The value model: a critic for estimators that need ``values``, such as gae."""

    enable: bool = False
    """Deploy a critic."""
    model: ModelConfig | None = None
    """Its model, with the actor's tokenizer; default: the actor's, as it is before training."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic is trained; weights versions advance meanwhile."""
    ppo_epochs: PositiveInt | None = None
    """Passes over a partition; default: the actor's."""
    cliprange_value: PositiveFloat | None = 0.5
    """How far a value may move from what it was before the step, in the loss; null: not clipped."""
    loss_agg_mode: Aggregation = "token-mean"
    """How per-token losses become one number."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Token budget of a micro-batch on one device; default: the actor's."""
