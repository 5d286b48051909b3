"""Configs drawn from the options, and what becomes of each: refused with keys that it has, or a run that ends well."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.base.errors import ConfigError, Problem
from tandem.cli.planning import runnable_sft, runnable_train
from tandem.observe.metrics import METRICS_FILE, read_rows
from tests.generated.options import MODES, PREFERENCES, SFT, TRAIN, Option
from tests.generated.world import ALPHABET, run

STEPS = 2
SECTIONS = {
    "execution", "actor_rollout_ref", "critic", "algorithm", "reward_manager", "data", "evaluation", "trainer",
    "runtime", "plugins", "model", "optim",
}  # fmt: skip
_NAME = re.compile(r"\w+")
_MOST_REPAIRS = 12


@dataclass(frozen=True)
class Drawn:
    """``command`` with the ``base`` that all configs share and the options ``words`` that this one has."""

    command: str
    base: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]

    @property
    def words(self) -> list[str]:
        """Of the command line."""
        return [*self.base, *(word for option in self.options for word in option)]

    def without(self, index: int) -> Drawn:
        """The same with one option less."""
        return Drawn(self.command, self.base, self.options[:index] + self.options[index + 1 :])


def draw(here: Path, seed: int) -> Drawn:
    """A config of one of three kinds; the same for the same seed."""
    rng = random.Random(seed)
    kind = rng.choices(["train", "preference", "sft"], [0.72, 0.13, 0.15])[0]
    table: Sequence[Option] = {"train": TRAIN, "preference": PREFERENCES, "sft": SFT}[kind]
    taken = rng.sample(range(len(table)), rng.randint(1, 9))
    options = [rng.choice(table[index]) for index in taken]
    if kind == "train":
        options.insert(0, rng.choice(MODES))
    new = ALPHABET.replace("\n", ";")
    filled = (tuple(word.format(here=here, new=new) for word in option) for option in options)
    return Drawn("sft" if kind == "sft" else "train", _base(kind, here), tuple(filled))


def _base(kind: str, here: Path) -> tuple[str, ...]:
    ended = (f"trainer.total_steps={STEPS}", f"trainer.output_dir={here}/run", "trainer.logger=[]")
    if kind == "sft":
        examples = f"data.train_files={here}/examples.jsonl"
        return f"model.path={here}/model", examples, "data.train_batch_size=4", "data.max_length=16", *ended
    model = "actor_rollout_ref"
    data = ("data.train_batch_size=4", "data.max_prompt_length=6", "data.max_response_length=4")
    common = (f"{model}.model.path={here}/model", f"{model}.actor.optim.lr=1e-3", *data, *ended)
    if kind == "preference":
        return *common, f"data.train_files={here}/pairs.jsonl", "algorithm.policy_loss.type=dpo"
    scorer = f"reward_manager={{type: varied, file: {here}/code.py}}"
    limits = ("execution.deadline_s=60", "runtime.threads=true")
    return *common, f"data.train_files={here}/train.jsonl", f"{model}.rollout.n=2", scorer, *limits


def problems_of(drawn: Drawn) -> list[Problem]:
    """What the plan says against it; a fault of the test where a refusal names no key, or something else is raised."""
    _clear(drawn)  # else a run before would be there to go on from
    try:
        (runnable_sft if drawn.command == "sft" else runnable_train)(drawn.words)
    except ConfigError as error:
        for problem in error.problems:
            named = _NAME.match(problem.key)
            assert problem.key.startswith("--") or (named is not None and named[0] in SECTIONS), problem
            assert problem.reason and problem.remedy and "\n" not in str(problem), problem
        return error.problems
    return []


def accepted(drawn: Drawn) -> tuple[Drawn, list[Problem]]:
    """The config without the options that its problems name, until the plan accepts it; the problems on the way."""
    found: list[Problem] = []
    for _ in range(_MOST_REPAIRS):
        problems = problems_of(drawn)
        if not problems:
            return drawn, found
        found += problems
        named = [i for i, option in enumerate(drawn.options) if any(_names(p, option) for p in problems)]
        for index in reversed(named or [len(drawn.options) - 1]):
            drawn = drawn.without(index)
    raise AssertionError(f"still refused: {found[-1]}, {drawn.words}")


def _names(problem: Problem, option: Sequence[str]) -> bool:
    """Whether the option has the key of the problem, or one above or below it."""
    if problem.key.startswith("--"):
        return problem.key in option
    key = re.split(r"[\[:]", problem.key)[0]
    own = [word.partition("=")[0] for word in option]
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in own)


def fault_of(drawn: Drawn, here: Path) -> str | None:
    """What went wrong in a run that the plan accepts; None where it ended as it should."""
    _clear(drawn)
    result: Any = run(drawn.command, *drawn.words)
    raised = result.exception
    if raised is not None and not isinstance(raised, SystemExit):
        return f"{type(raised).__name__}: {raised}"
    if result.exit_code != 0:
        return f"exit {result.exit_code}: {result.output[-600:]}"
    steps = [row["step"] for row in read_rows(here / "run" / METRICS_FILE) if "updates" in row]
    early = any("stop_at_accuracy" in word for word in drawn.words)
    if steps != [*range(1, STEPS + 1)] and not early:
        return f"steps {steps}"
    if not any((here / "run" / "final").glob("*.safetensors")):
        return "no model was left"
    return None


def _clear(drawn: Drawn) -> None:
    """Remove what runs before have left."""
    (word,) = (word for word in drawn.base if word.startswith("trainer.output_dir="))
    output = Path(word.partition("=")[2])
    for old in output.parent.glob(f"{output.name}*"):
        shutil.rmtree(old)


def smallest(drawn: Drawn, here: Path) -> Drawn:
    """The same fault with as few options as can be."""
    index = 0
    while index < len(drawn.options):
        less = drawn.without(index)
        if not problems_of(less) and fault_of(less, here) is not None:
            drawn = less
        else:
            index += 1
    return drawn
