"""Which keys a loop or a trainer of the user's own has no reader for, beside those that nothing has."""

from __future__ import annotations

from tandem.config.schema import Config
from tandem.plan.reads.form import Reads
from tandem.plan.reads.sft import SftSetting

TRAINER_READS: tuple[Reads[SftSetting], ...] = (
    Reads(
        (
            "trainer.resume",
            "trainer.save_interval",
            "trainer.keep_checkpoints",
            "trainer.keep_best",
            "evaluation",
            "runtime.device",
            "runtime.name",
            "runtime.threads",
        ),
        lambda s: False,
        "a trainer of your own runs from start to end, in this process",
        "Leave it out, or use `tandem sft`",
    ),
    Reads(
        ("trainer.export",),
        lambda s: False,
        "a trainer of your own leaves a model with its adapters merged",
        "Leave it out, or use `tandem sft`",
    ),
    Reads(
        ("trainer.export_dtype",),
        lambda s: False,
        "a trainer of your own leaves the model in the dtype that it has",
        "Leave it out, or use `tandem sft`",
    ),
    Reads(
        ("data.image_key", "data.image_max_pixels", "data.image_max_bytes", "model.freeze"),
        lambda s: False,
        "a trainer of your own learns from text alone",
        "Leave it out, or use `tandem sft`",
    ),
    Reads(
        ("data.source", "data.mix"),
        lambda s: False,
        "a trainer of your own has its rows from the data source that fit() is given",
        "Leave it out, or use `tandem sft`",
    ),
    Reads(
        ("data.max_token_len_per_gpu",),
        lambda s: False,
        "a trainer of your own pads a whole batch, in one piece",
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

_YOURS = "what it asks for is yours to do in a loop of your own"

LOOP_READS: tuple[Reads[Config], ...] = (
    Reads(
        (
            "trainer.save_interval",
            "trainer.keep_checkpoints",
            "trainer.keep_best",
            "trainer.save_on_interrupt",
            "trainer.export",
            "trainer.max_idle_steps",
            "trainer.rollouts_per_step",
            "trainer.samples",
            "trainer.trace",
            "evaluation",
        ),
        lambda config: False,
        _YOURS,
        noted=True,
    ),
    Reads(("trainer.logger",), lambda config: set(config.trainer.logger) <= {"console"}, _YOURS, noted=True),
)
"""For a loop over ``build_actor_rollout_ref``, whose keys otherwise are those of a run."""
