"""Which keys a loop, or a trainer, of the user's own has no reader for, beside those that no run has."""

from __future__ import annotations

from tandem.plan.reads import Reads
from tandem.plan.sft_reads import SftSetting
from tandem.plan.train_reads import Setting

_TURNS = "a loop of your own generates and trains in turns"
_YOURS = "a loop of your own does this itself, or not at all"

LOOP_READS: tuple[Reads[Setting], ...] = (
    Reads(
        ("algorithm.filter_groups", "algorithm.overlong", "actor_rollout_ref.ref.update_interval"),
        lambda s: False,
        "a loop of your own draws the prompts, drops samples and refreshes the reference itself, and none of these "
        "parts looks at it",
        "Leave it out and do it in the loop, or use `tandem train`",
    ),
    Reads(
        ("execution.max_staleness", "execution.num_iters_per_train_update", "execution.train_pipelining"),
        lambda s: False,
        f"{_TURNS}: every sample is of the newest weights, nothing streams",
        "Leave it out, or use `tandem train`",
    ),
    Reads(
        ("execution.mode",),
        lambda s: s.config.execution.mode != "fully_async",
        f"{_TURNS}: no role has a loop beside it",
        "Write colocate, or use `tandem train`",
    ),
    Reads(
        ("execution.mode", "execution.resource", "execution.balance_data", "runtime.threads", "runtime.torch_threads"),
        lambda s: False,
        f"{_TURNS}, in one process",
        told=True,
    ),
    Reads(
        (
            "trainer.output_dir",
            "trainer.save_interval",
            "trainer.export",
            "trainer.keep_checkpoints",
            "trainer.resume",
            "trainer.logger",
            "trainer.rollouts_per_step",
            "trainer.trace",
            "evaluation",
        ),
        lambda s: False,
        _YOURS,
        told=True,
    ),
)
"""For what ``build_actor_rollout_ref`` and its like build. What the user's own code may read is told, not refused."""

TRAINER_READS: tuple[Reads[SftSetting], ...] = (
    Reads(
        (
            "trainer.resume",
            "trainer.save_interval",
            "trainer.keep_checkpoints",
            "trainer.export",
            "trainer.trace",
            "evaluation",
            "runtime",
            "data.max_token_len_per_gpu",
        ),
        lambda s: False,
        "a trainer of your own runs from start to end, a batch at a time, in this process",
        "Leave it out, or use `tandem sft`",
    ),
    Reads(
        ("data.on_bad_row",),
        lambda s: False,
        "rows come from your data source, and a bad one is an error",
        "Leave it out",
    ),
)
"""For ``BaseTrainer.fit``; keys of ``model`` and columns of ``data`` are for the user's own code to read."""
