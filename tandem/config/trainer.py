"""The run itself: its length, its folder, what it saves and logs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from tandem.config.node import File, MaybeFile, Names, Node

AUTO, LATEST = "auto", "latest"
"""What ``trainer.resume`` may be beside a folder."""


class SamplesConfig(Node):
    """Which samples are kept whole, in parquet parts under ``samples/`` of the run's folder."""

    every: NonNegativeInt = 1
    """All samples of every so many steps, and those of each evaluation; 0: none."""
    max_mb: PositiveInt = 1000
    """MB on the disk. Where they are reached, older steps are thinned out evenly; the newest are always kept."""
    tokens: bool = False
    """Also the ids and log-probs of each token, which take several times the room."""


class TrainerConfig(Node):
    """The run: its length, its folder, what it saves and logs."""

    total_steps: PositiveInt | None = None
    """Steps; with total_epochs, whichever ends first."""
    total_epochs: PositiveInt | None = None
    """Passes over the data; default 1 without total_steps, else no bound."""
    seed: NonNegativeInt = 0
    """Everything random derives from it."""
    exact: bool = False
    """Bit-equal samples and weights whatever the batch composition (slower); sets MKL_CBWR and ATEN_CPU_CAPABILITY."""
    output_dir: File = "runs/default"
    """Everything the run writes."""
    save_interval: NonNegativeInt = 0
    """Steps between checkpoints, the last step included; 0: none is written at a step."""
    save_on_interrupt: bool = True
    """Write a checkpoint of the steps that are done where Ctrl-C or SIGTERM ends the run."""
    export: Literal["merged", "adapter"] = "merged"
    """What a LoRA run leaves: the model with its adapters merged, or a PEFT adapter folder."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """In which dtype the model is left, in checkpoints and at the end; ``auto``: that of the folder that it began with.
    What a resume reads keeps full precision."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_best: str | None = None
    """Such as ``eval/reward``: the checkpoint with the best value of this metric stays too, and is written at each
    evaluation that is better than all before. Of ``eval/loss`` lower is better."""
    max_idle_steps: PositiveInt = 10
    """Most steps in a row that may train nothing; one more ends the run with the reason."""
    resume: MaybeFile = None
    """``latest``: the newest checkpoint of output_dir; ``auto``: that, or begin anew where there is none; or a
    checkpoint folder."""
    logger: Names = ["console"]
    """Trackers beside metrics.jsonl: console, tensorboard, wandb, mlflow, trackio, swanlab, or one of your own."""
    project: str = "tandem"
    """Under which wandb, mlflow (as the experiment), trackio and swanlab show the run."""
    run_name: str | None = None
    """Its name there; default: that of output_dir."""
    rollouts_per_step: NonNegativeInt = 4
    """Samples written to rollouts.jsonl each step."""
    samples: SamplesConfig = SamplesConfig()
    trace: bool = False
    """Write a Chrome trace of the steps."""

    def model_post_init(self, context: Any, /) -> None:
        """Count one pass where nothing bounds the run, for whoever counts them: a loop over epochs is a user's own."""
        if self.total_epochs is None and self.total_steps is None:
            self.__dict__["total_epochs"] = 1
