"""Contradictions in the run itself: output, steps, evaluation, loggers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence

from tandem.base.device_kinds import device_kind, known_devices
from tandem.base.errors import Problem
from tandem.base.hidden import HIDDEN, hidden_keys
from tandem.config.model import OptimConfig
from tandem.config.schema import Config, SftConfig
from tandem.config.trainer import TrainerConfig
from tandem.observe.trackers import TRACKERS
from tandem.plan.checks.parameters import COLDEST
from tandem.plan.checks.run.run_folder import check_output
from tandem.plan.files.rows import TrainedRows
from tandem.plan.parts.batch import BatchPlan
from tandem.plan.parts.entries import unknown

MOST_SAMPLES = 10_000_000
"""A step is held in memory: more than this is a slip of the pen."""


def check_trainer(trainer: TrainerConfig, document: Config | SftConfig) -> Iterator[Problem]:
    """Check loggers, the device, and the folder to write to; ``document`` is the config that says so."""
    for index, name in enumerate(trainer.logger):
        key = f"trainer.logger[{index}]"
        if name in trainer.logger[:index]:
            yield Problem(key, name, "it stands there twice, and would be told everything twice", "Leave one out")
        if name not in TRACKERS:
            yield unknown(key, name, "logger", list(TRACKERS))
            continue
        package = TRACKERS[name].traits.get("package")
        if isinstance(package, str) and not installed(package):
            extra = TRACKERS[name].traits.get("extra")
            remedy = f"Install it with pip install 'tandem-rl[{extra}]', or take {name} out of the list"
            yield Problem(key, name, f"the package {package} is not installed", remedy)
    yield from _check_shown(trainer)
    device = document.runtime.device
    if device != "auto" and device_kind(device) is None:
        yield Problem("runtime.device", device, "no such device is known", known_devices(device))
    yield from check_output(trainer, document)


def installed(package: str) -> bool:
    """Return whether ``package`` can be imported; a mere folder of that name, as W&B leaves one, is none."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _check_shown(trainer: TrainerConfig) -> Iterator[Problem]:
    """Check whether a name under which services show the run is shown by one."""
    services = [name for name in TRACKERS if TRACKERS[name].traits.get("service")]
    if any(name in services for name in trainer.logger):
        return
    for key in ("project", "run_name"):
        value, default = getattr(trainer, key), TrainerConfig.model_fields[key].default
        if value != default:
            reason = "no logger of this run shows it: those that do are " + ", ".join(services)
            yield Problem(f"trainer.{key}", value, reason, "Leave it out, or add one of them to trainer.logger")


def check_hidden(document: Config | SftConfig) -> Iterator[Problem]:
    """Check whether a secret is missing that was left out when this config was written."""
    for key in hidden_keys(document.model_dump(mode="json", by_alias=True)):
        reason = "a run writes its config without secrets, and this one is not there"
        yield Problem(key, HIDDEN, reason, f"Write it again, such as {key}=... on the command line")


def check_schedule(key: str, optim: OptimConfig, updates: int | None, own_loop: bool = False) -> Iterator[Problem]:
    """Check whether the warm-up ends before the run does, and a falling schedule has an end.

    ``updates`` is None where only the data will tell; a run of the user's own (``own_loop``) never learns it.
    """
    if optim.schedule != "constant" and updates is None and own_loop:
        reason = "where it ends is unknown: nothing says how many steps the loop makes"
        yield Problem(f"{key}.schedule", optim.schedule, reason, "Write trainer.total_steps, or schedule: constant")
    if updates is not None and optim.warmup_steps >= updates and optim.warmup_steps > 0:
        reason = f"the run has {updates} optimizer steps, so the learning rate never leaves the warm-up"
        yield Problem(f"{key}.warmup_steps", optim.warmup_steps, reason, f"Write less than {updates}")


def check_evaluation(config: Config) -> Iterator[Problem]:
    """Check whether there is something to evaluate on, and the report can be made of what is sampled."""
    evaluation, data = config.evaluation, config.data
    wanted = evaluation.during_run
    if wanted and not (data.val_files or data.reasoning_gym is not None or data.source is not None):
        key, value = (
            ("evaluation.interval", evaluation.interval) if evaluation.interval else ("evaluation.at_start", True)
        )
        yield Problem(
            key, value, "there are no held-out prompts to evaluate on", "Write data.val_files, or turn it off"
        )
    for index, k in enumerate(evaluation.k):
        if k > evaluation.n:
            reason = f"pass@{k} needs {k} samples per prompt, and evaluation.n is {evaluation.n}"
            yield Problem(f"evaluation.k[{index}]", k, reason, f"Write at most {evaluation.n}, or evaluation.n: {k}")
    if evaluation.n > 1 and evaluation.temperature == 0:
        reason = "greedy answers to a prompt are all equal"
        yield Problem("evaluation.n", evaluation.n, reason, "Write 1, or evaluation.temperature above 0")
    if 0 < evaluation.temperature < COLDEST:
        reason, remedy = "practically greedy", f"Write 0 for greedy answers, or {COLDEST:g} or more"
        yield Problem("evaluation.temperature", evaluation.temperature, reason, remedy)


def check_kept(trainer: TrainerConfig, evaluates: bool, metrics: Sequence[str]) -> Iterator[Problem]:
    """Check whether the run has evaluations with the metric that says which checkpoint is the best."""
    metric = trainer.keep_best
    if metric is not None and not evaluates:
        reason = "nothing is evaluated after a step, so that no checkpoint is the best"
        yield Problem("trainer.keep_best", metric, reason, "Write evaluation.interval: 50, or leave it out")
    elif metric is not None and metric not in metrics:
        reason = "no evaluation of this run says by that which checkpoint is the best"
        yield Problem("trainer.keep_best", metric, reason, "Write " + " or ".join(metrics))


def metrics_to_keep_by(config: Config) -> list[str]:
    """Return the metrics of an evaluation by which a checkpoint can be the best."""
    own = config.evaluation
    return ["eval/reward", f"eval/mean@{own.n}", *(f"eval/pass@{k}" for k in own.k)]


def check_length(config: Config, batch: BatchPlan, rows: TrainedRows) -> Iterator[Problem]:
    """Check whether the run has a step at all."""
    if batch.steps == 0 and (rows.kept or rows.held_out):
        key, value = "data.train_batch_size", config.data.train_batch_size
        held = f" ({rows.held_out} more are held out)" if rows.held_out else ""
        reason = (
            f"the data have {rows.kept} prompts{held}, fewer than one step needs in all epochs together: nothing would "
            "be trained"
        )
        remedy = f"Write at most {rows.kept}, or raise trainer.total_epochs"
        yield Problem(key, value, reason, remedy if rows.kept else "Write data.drop_val_prompts: false, or other files")
    elif batch.samples > MOST_SAMPLES:
        key, value = "data.train_batch_size", config.data.train_batch_size
        reason = f"with {config.actor_rollout_ref.rollout.n} samples each a step has {batch.samples} samples"
        yield Problem(key, value, reason, f"Write a number that gives at most {MOST_SAMPLES} samples")


def notes_on_rows(rows: TrainedRows, batch: BatchPlan) -> Iterator[str]:
    """Note what is left out of the training files before steps are counted, and whether a step has it all several
    times.
    """
    if rows.kept and batch.steps != 0:
        yield from note_on_repeats(batch.prompts, rows.kept, "prompts")
    if rows.held_out:
        yield f"{rows.held_out} rows of data.train_files are held out too (data.val_files) and are not trained on"
    elif rows.at_most and batch.steps is not None:
        yield "the files are too large to be compared here: rows that are held out too make the steps fewer"


def note_on_repeats(batch: int, rows: int, of: str) -> Iterator[str]:
    """Yield a note where one step draws from several epochs; ``of`` is what the data have ``rows`` of."""
    if batch > rows:
        yield (
            f"data.train_batch_size = {batch} is more than the {rows} {of} of the data: epochs are joined end to end, "
            "and a step has the same ones several times"
        )
