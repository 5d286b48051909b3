"""Runs that are struck at random instants, and what must be true of them afterwards."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.e2e.interrupting import run, trained
from tests.e2e.seven import make_task, write_rows

ROOT = Path(__file__).parents[2]
STEPS = 6
PATIENCE_S = 400.0
STREAMING = "max_staleness: 0, num_iters_per_train_update: 2, deadline_s: 120"
KINDS = {
    "colocate": ("train", "execution={mode: colocate}"),
    "hybrid": ("train", f"execution={{mode: hybrid, {STREAMING}}}"),
    "fully_async": ("train", f"execution={{mode: fully_async, {STREAMING}}}"),
    "preference": ("train", "algorithm={policy_loss: {type: dpo}}", "data.max_response_length=5"),
    "sft": ("sft",),
    "ray": ("train", f"execution={{mode: hybrid, resource: {{actor: [1, 2], rollout: [1, 1]}}, {STREAMING}}}"),
}
BLOWS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL, "a child's SIGKILL": None}
REPORTS = ("note: ", "WARNING ", "the step under way", "what is under way")
"""How lines begin that a run may write before its last one."""
OF_RAY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\t(INFO|WARNING) ")
"""How lines begin that Ray itself writes as it starts."""
ENDS = {"SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated")}


@dataclass(frozen=True)
class Blow:
    """What hits the run: ``name`` of ``BLOWS``, ``after`` so many recorded steps and ``seconds`` more."""

    kind: str
    name: str
    after: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.name} {self.seconds:.2f} s after step {self.after}"


def drawn(rng: random.Random, kinds: list[str]) -> Blow:
    """A blow at random; a fifth of them before the first step."""
    kind, after = rng.choice(kinds), rng.choice([0, *range(STEPS)])
    names = [name for name in BLOWS if BLOWS[name] is not None or kind not in ("preference", "sft")]
    return Blow(kind, rng.choice(names), after, rng.uniform(0.0, 6.0 if after == 0 else 0.6))


class Arena:
    """A folder with a task, and the fingerprints of runs that nothing has struck."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.task = make_task(folder)
        pairs = [{"prompt": f"{d}>", "chosen": str(d) * 4, "rejected": str(9 - d) * 4} for d in range(10)]
        self._pairs = write_rows(folder / "pairs.jsonl", pairs)
        self._rows = write_rows(folder / "rows.jsonl", [{"prompt": f"{d}>", "response": str(d) * 4} for d in range(10)])
        self._whole: dict[str, str] = {}

    def words(self, kind: str, output: Path) -> list[str]:
        """The command line of a run of this kind, in processes of its own where it has some."""
        command, *own = KINDS[kind]
        ended = [f"trainer.total_steps={STEPS}", "trainer.save_interval=1", "trainer.logger=[]"]
        ended.append(f"trainer.output_dir={output}")
        if kind == "sft":
            data = [f"model.path={self.folder / 'model'}", f"data.train_files=[{self._rows}]"]
            return [command, *data, "data.train_batch_size=4", "data.max_length=16", *ended]
        if kind == "preference":
            own += [f"data.train_files=[{self._pairs}]", "data.train_batch_size=2"]
        else:
            own += ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=8", "runtime.threads=false"]
        own += ["runtime.name=ray"] if kind == "ray" else []
        exact = [] if kind == "ray" else ["trainer.exact=true"]  # with two ranks sums are of another order anyway
        return [command, str(self.task), *own, *exact, *ended]

    def whole(self, kind: str) -> str:
        """What an undisturbed run trains."""
        if kind not in self._whole:
            output = self.folder / f"whole-{kind}"
            result: Any = run(*self.words(kind, output))
            assert result.exit_code == 0, result.output
            self._whole[kind] = trained(output)
        return self._whole[kind]

    def fault_of(self, blow: Blow, output: Path) -> str | None:
        """Strike a run, let it go on, and compare; what is wrong, or None."""
        words = self.words(blow.kind, output)
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", *words], cwd=self.folder, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            children = _strike(process, blow, output)
            _, told = process.communicate(timeout=PATIENCE_S)
        except (subprocess.TimeoutExpired, psutil.Error) as error:
            process.kill()
            return f"no end: {error}"
        lines = [line for line in told.splitlines() if not line.startswith(REPORTS) and not OF_RAY.match(line)]
        if fault := _wrong_end(blow, process.returncode, lines):
            return fault
        if left := [child.pid for child in children if _alive(child)]:
            return f"processes are left: {left}"
        return self._gone_on(blow, words, output, lines, process.returncode)

    def _gone_on(self, blow: Blow, words: list[str], output: Path, lines: list[str], code: int) -> str | None:
        again = [*words, "trainer.resume=auto"]
        if code in (130, 143) and "with: " in lines[-1]:
            again = shlex.split(lines[-1].partition("with: ")[2])[1:]
        if code != 0:
            result: Any = run(*again)
            if result.exit_code != 0:
                return f"it does not go on: exit {result.exit_code}, {result.output[-500:]} {result.exception}"
        steps = [row["step"] for row in read_rows(output / METRICS_FILE)]
        if steps != [*range(1, STEPS + 1)]:
            return f"steps {steps}"
        if partial := [*output.rglob("*.partial*")]:
            return f"left behind: {partial}"
        return None if trained(output) == self.whole(blow.kind) else "other weights than without the blow"


def _strike(process: subprocess.Popen[str], blow: Blow, output: Path) -> list[psutil.Process]:
    """Wait for the instant and strike; the children that there were."""
    end = time.monotonic() + PATIENCE_S
    while blow.after and process.poll() is None and len(read_rows(output / METRICS_FILE)) < blow.after:
        if time.monotonic() > end:
            raise subprocess.TimeoutExpired("the steps before", PATIENCE_S)
        time.sleep(0.01)
    time.sleep(blow.seconds)
    if process.poll() is not None:
        return []
    children = psutil.Process(process.pid).children(recursive=True)
    number = BLOWS[blow.name]
    if number is not None:
        process.send_signal(number)
        return children
    workers = [child for child in children if _is_worker(child, blow.kind)]
    if workers:
        random.Random(blow.seconds).choice(workers).kill()
    return children


def _is_worker(child: psutil.Process, kind: str) -> bool:
    """An engine, a scorer, a rank: not what Ray itself consists of."""
    try:
        line = " ".join(child.cmdline())
    except psutil.Error:
        return False
    return line.startswith("ray::") and "IDLE" not in line if kind == "ray" else "python" in line


def _alive(child: psutil.Process) -> bool:
    try:
        gone, _ = psutil.wait_procs([child], timeout=20.0)
    except psutil.Error:
        return False
    return not gone and child.is_running() and child.status() != psutil.STATUS_ZOMBIE


def _wrong_end(blow: Blow, code: int, lines: list[str]) -> str | None:
    if code == 0 and (blow.name not in ENDS or not lines):
        return None  # it had ended before, or it survived the death of a child
    told = "\n".join(lines[-12:])
    if blow.name in ENDS and code == -BLOWS[blow.name].value and blow.after == 0 and blow.seconds < 1.5:  # type: ignore[union-attr]
        return None  # before the command's first line of code
    if "Traceback" in "\n".join(lines):
        return f"a traceback: {told}"
    if blow.name in ENDS:
        wanted, word = ENDS[blow.name]
        if (code, blow.after, lines) == (wanted, 0, [word]):
            return None  # before it had begun, so that nothing goes on
        if (code, len(lines)) != (wanted, 1) or not lines[0].startswith(word) or "with: tandem" not in lines[0]:
            return f"exit {code}: {told}"
        return None
    if blow.name == "SIGKILL":
        return None if code == -signal.SIGKILL else f"exit {code}: {told}"
    return None if code == 1 and any(line.startswith("error: ") for line in lines) else f"exit {code}: {told}"
