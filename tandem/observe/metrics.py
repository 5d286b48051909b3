"""The run's own record: ``metrics.jsonl`` (a line per step) and ``rollouts.jsonl`` (a few samples per step).

Keys of a metrics line; a part that does not exist in a run leaves its keys out:

=============================  =====================================================================
``step, version, updates``     the step of the line; weights version and optimizer steps after it
``reward/mean`` ...            rewards of the step's valid samples (``reward/std, reward/failed`` ...)
``eval/...``                   scores on held-out prompts (``eval/reward, eval/pass@4`` ...)
``kl/mean``                    KL to the reference, nats per trained token
``entropy/mean``               entropy of the policy, nats per trained token
``length/mean, length/max``    response tokens per sample
``lag/mean, lag/max``          versions between generation and training
``loss/...``                   loss terms (``loss/policy, loss/sft`` ...)
``grad/norm, optim/lr``        of the last optimizer step
``moe/...``                    what the routers of a mixture of experts did with the tokens of the step
``mismatch/...``               rollout against trainer log-probs
``time/PART``                  wall seconds of a named part; ``cpu/PART`` processor seconds; in streaming modes
                               ``time/rollout`` is how long engines worked in the step, for whichever partitions,
                               ``time/wait`` how long the actor waited, ``time/push_PHASE`` the last push of weights
``push/bytes``                 what each engine took over in it
``episode/...``                means over episodes: turns, tool calls and errors, seconds outside of the model; and the
                               share that a limit has cut
``limit/step_s``               seconds of the best possible step with these parts
``limit/fraction``             how much of that the step reached
``limit/resumed_after``        in the first line after a resume: the step before it
``rollout/work_s``             seconds that engines worked for the step's partition, whenever (streaming modes)
``rollout/longest_s``          seconds from admission to end of its longest group (streaming modes)
``rollout/longest_ended_s``    of the longest group that ended in the step, of whichever partition (streaming modes)
``throughput/tokens_per_second``  trained response tokens per wall second
=============================  =====================================================================
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tandem.base.run_folder import CONFIG_FILE as CONFIG_FILE
from tandem.base.run_folder import METRICS_FILE as METRICS_FILE
from tandem.base.run_folder import ROLLOUTS_FILE as ROLLOUTS_FILE

Row = dict[str, object]


def to_json(value: object) -> object:
    """Turn ``value`` into what strict JSON can hold: tensors and arrays become numbers or lists, non-finite numbers
    None.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars included
        return to_json(value.tolist())
    return str(value)


def from_json(text: str | bytes) -> Any:
    """Read JSON, whoever wrote it: a number that no float holds, such as ``NaN`` or ``1e999``, is None.

    Raises ``ValueError`` for what is no JSON, or is nested too deeply to be read.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_int=_whole, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _whole(text: str) -> int | None:
    return int(text) if math.isfinite(float(text)) else None


def read_rows(path: Path) -> list[Row]:
    """Read the whole lines of a JSON-lines file. A line cut by a crash is left out; a file that isn't there gives no
    rows.
    """
    if not path.exists():
        return []
    rows: list[Row] = []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            try:
                row = from_json(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


class StepLog:
    """An append-only JSON-lines file whose lines carry a ``step``; each line is on its way to the disk when written.

    ``resumed_step`` is the last step that the resumed checkpoint contains: later lines and a line cut by the crash are
    dropped, so no step appears twice. ``None`` begins a new run: a file of an earlier run in the same folder is set
    aside as ``NAME.1.jsonl``, ``NAME.2.jsonl`` and so on.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None:
            _keep_through(path, resumed_step)
        elif path.exists():
            _set_aside(path)
        self._file: IO[str] = _open(path, "a")

    def append(self, step: int, row: Mapping[str, object]) -> None:
        """Write one line, ``step`` first."""
        self._file.write(_line({"step": step, **row}))
        self._file.flush()

    def close(self) -> None:
        """Close the file; nothing is appended afterwards."""
        self._file.close()


class MetricLog(StepLog):
    """``metrics.jsonl`` in ``output_dir``: always written, whatever trackers are configured."""

    def __init__(self, output_dir: Path, *, resumed_step: int | None = None) -> None:
        super().__init__(output_dir / METRICS_FILE, resumed_step=resumed_step)


@dataclass(frozen=True)
class RolloutRecord:
    """One sample as a person reads it; ``reward`` None if scoring failed.

    ``version`` is the weights version of its oldest token, ``version_max`` that of its newest. ``messages`` are
    those of an episode, ``turn_rewards`` what it gave to its turns besides ``reward``, ``images`` small ones of the
    prompt as data URLs; without such they are left out.
    """

    prompt: str
    response: str
    reward: float | None
    ground_truth: object
    version: int
    version_max: int | None = None
    messages: object = None
    turn_rewards: object = None
    images: object = None


class RolloutLog(StepLog):
    """``rollouts.jsonl`` in ``output_dir``: a few samples per step."""

    def __init__(self, output_dir: Path, *, resumed_step: int | None = None) -> None:
        super().__init__(output_dir / ROLLOUTS_FILE, resumed_step=resumed_step)

    def record(self, step: int, records: list[RolloutRecord]) -> None:
        """Append the samples of one step."""
        for record in records:
            shown = vars(record).items()
            self.append(
                step, {key: v for key, v in shown if v is not None or key not in ("messages", "turn_rewards", "images")}
            )


def _line(row: Mapping[str, object]) -> str:
    return json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"


def _open(path: Path, mode: str) -> IO[str]:
    # A lone surrogate, which UTF-8 can't hold, is written as \udXXX: that is its JSON escape.
    return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n")


def _keep_through(path: Path, last_step: int) -> None:
    """Rewrite the file without what came after ``last_step``; a crash meanwhile leaves the old file whole."""
    kept = [row for row in read_rows(path) if isinstance(row.get("step"), int) and row["step"] <= last_step]  # type: ignore[operator]
    beside = path.with_name(path.name + ".partial")
    with _open(beside, "w") as file:
        file.writelines(_line(row) for row in kept)
    os.replace(beside, path)


def _set_aside(path: Path) -> None:
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    os.rename(path, target)
