"""A plan for people: tables on a terminal, aligned plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from tandem.cli.planning import NoPlan
from tandem.plan.memory import Part
from tandem.plan.plan import Plan
from tandem.plan.reward import ScoringPlan
from tandem.plan.sft import SftPlan

PLAIN_WIDTH = 4000
"""Columns where there is no terminal: lines are never wrapped, so that they can be searched."""

_TOTAL = {True: "total at once", False: "total at once, at least"}

PUSHED = {
    "nothing": "none, it generates with the actor's own",
    "merged": "all of them, adapters merged if there are any",
    "adapter": "the adapters alone",
}


def show(plan: Plan | SftPlan | NoPlan) -> None:
    """Print the plan and, last, everything that is wrong with it."""
    console = _console()
    if isinstance(plan, Plan):
        _show_train(console, plan)
    elif isinstance(plan, SftPlan):
        _show_sft(console, plan)
    if not isinstance(plan, NoPlan):
        show_notes(plan, console)
    _show_problems(console, plan)


def show_notes(plan: Plan | SftPlan, console: Console | None = None) -> None:
    """Print what is worth knowing and no problem, as a run does when it starts."""
    for note in plan.notes:
        (console or _console()).print(f"note: {note}", markup=False)


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else PLAIN_WIDTH, highlight=False, soft_wrap=not terminal)


def _show_train(console: Console, plan: Plan) -> None:
    given = "" if plan.generates else "; answers are given, nothing is generated"
    console.print(f"mode {plan.mode}, runtime {plan.runtime}, {plan.devices} device{'s' * (plan.devices != 1)}{given}")
    rows = [(p.role, p.group, f"{p.nodes} x {p.devices_per_node}") for p in plan.placements]
    _table(console, "Roles", ("role", "devices of", "nodes x devices"), rows)
    if plan.scoring is not None:
        console.print(f"rewards: {_scoring(plan.scoring)}", markup=False)
    tags = ", ".join(f"{tag} (adapters off, no copy)" if tag in plan.base_tags else tag for tag in plan.tags)
    old = f"; old log-probs: {plan.old_logprobs}" if plan.generates else ""
    console.print(f"tags of the actor: {tags}{old}")
    if plan.generates:
        way = {"nothing": ""}.get(plan.pushed, f", by {plan.transport.replace('_', ' ')}")
        console.print(f"weights to the engine: {PUSHED[plan.pushed]}{way}")
    console.print(f"columns of the data: {', '.join(plan.source_columns)}")
    stages = [
        (
            f"{i}",
            s.name,
            s.role + (f" ({s.tag})" if s.tag else ""),
            s.phase,
            ", ".join(s.needs),
            ", ".join(s.gives),
        )
        for i, s in enumerate(plan.stages, 1)
    ]
    _table(console, "Stages of a step", ("", "stage", "role (tag)", "phase", "needs", "gives"), stages)
    _table(console, "Batch", ("", "", ""), _batch_rows(plan))
    memory = [
        (m.group, f"{name}{_turn(part)}", "unknown" if part.size is None else _size(part.size))
        for m in plan.memory
        for name, part in (*m.held.items(), (_TOTAL[m.known], Part(m.total)))
    ]
    if memory:
        _table(console, "Memory per device (estimated)", ("devices of", "for", "size"), memory)
    for later in plan.later:
        console.print(f"{'not yet' if 'be run yet' in later.reason else 'not here'}: {later}", markup=False)


def _scoring(scoring: ScoringPlan) -> str:
    many = f"{scoring.processes} process{'es' * (scoring.processes > 1)} of their own"
    where = many if scoring.processes else "the training process"
    devices = f", a model on {' and '.join(scoring.devices)} (beside the devices above)" if scoring.devices else ""
    return f"{', '.join(scoring.types)} in {where}{devices}"


def _batch_rows(plan: Plan) -> list[tuple[str, str, str]]:
    b = plan.batch
    in_all = "unknown" if b.optimizer_steps_in_all is None else str(b.optimizer_steps_in_all)
    steps = "as the data last" if b.steps is None else str(b.steps)
    return [
        ("prompts", str(b.prompts), "per step" + (", the longest answers first" if plan.longest_first else "")),
        ("samples", str(b.samples), f"{b.samples // b.prompts} per prompt"),
        ("sub-batches", str(b.sub_batches), f"of {b.sub_batch_prompts} prompts"),
        ("mini-batches", str(b.mini_batches), f"of {b.mini_batch_prompts} prompts = {b.mini_batch_samples} samples"),
        ("micro-batches", str(b.micro_batches), "per optimizer step and device, at most"),
        ("optimizer steps", str(b.optimizer_steps), f"per step; {in_all} in all"),
        ("steps", steps, "of the run"),
    ]


def _show_sft(console: Console, plan: SftPlan) -> None:
    rows = [
        ("examples", "unknown" if plan.rows is None else str(plan.rows), "per epoch"),
        *((f"  {p.name}", "unknown" if p.rows is None else str(p.rows), f"{p.share:.0%} of the mix") for p in plan.mix),
        ("batch", str(plan.batch_examples), "examples per optimizer step"),
        ("optimizer steps", "as the data last" if plan.updates is None else str(plan.updates), "in all"),
    ]
    _table(console, "SFT", ("", "", ""), rows)


def _show_problems(console: Console, plan: Plan | SftPlan | NoPlan) -> None:
    problems = plan.problems
    if not problems:
        later = len(plan.later) if isinstance(plan, Plan) else 0
        console.print(f"can't be run here: see the line{'s' * (later > 1)} above" if later else "no problem found")
        return
    console.print(f"{len(problems)} problem{'s' * (len(problems) != 1)}", style="bold red")
    for problem in problems:
        console.print(f"  - {problem}", markup=False)


def _table(console: Console, title: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    headed = any(names)
    table = Table(title=title, title_justify="left", box=SIMPLE if console.is_terminal else None, show_header=headed)
    for name in names:
        table.add_column(name, no_wrap=not console.is_terminal)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _turn(part: Part) -> str:
    return "" if part.turn is None else f" (during {part.turn})"


def _size(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}"
