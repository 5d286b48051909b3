"""The page ``docs/algorithms.md``, written from the registries: ``python tools/algorithms_page.py [FILE]``.

A test compares the page with what this module writes, so that it can't fall behind the code.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.algorithms import (
    ADVANTAGES,
    DISTILLATIONS,
    KL_CONTROLLERS,
    KL_TYPES,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    Aggregation,
)
from tandem.base.registry import Entry, Parameter, Registry
from tandem.plan.checks.parameters import spelled
from tandem.reward import resolve as _built_in  # noqa: F401  (registers the built-in scorers)
from tandem.reward.parts import COMBINING
from tandem.reward.registry import REWARDS, call_style

TARGET = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
HEAD = """\
# Algorithms

Generated from the registries by `python tools/algorithms_page.py`; do not edit.

*Columns* are what the function reads; those in brackets are used where they exist. *Parameters* are written in YAML
beside `type` (`policy_loss: {type: ppo_clip, clip_ratio: 0.2}`). *Scope* is the widest set of samples that it must see
at once: `token`, `sequence`, `group` or `partition`. *Source* is the paper, with the equation where one is meant. How
to add one of your own: [extend.md](extend.md).
"""
ESTIMATORS = """\
## Advantage estimators

`algorithm.adv_estimator: NAME`, or `{type: NAME, ...parameters}`. *Group*: needs `rollout.n` of 2 or more, since it
compares the samples of one prompt. What a few columns ask for beside the name: `values` a critic (`critic.enable:
true`); `reward_components` a reward of parts (`reward_manager: {type: weighted_sum, ...}`); `reward_baselines` one
greedy answer more per prompt, which the rollout makes and scores by itself; `sum_pi_squared` comes with the forward of
the old policy.
"""
LOSSES = """\
## Policy losses

`algorithm.policy_loss: {type: NAME, ...parameters}`. A loss gives one term per token; `algorithm.loss_agg_mode` says
how they become one number. `logprobs` come from the training forward. Those marked *mini-batch* compare tokens of the
whole mini-batch with each other: give them a token budget (`actor.ppo_max_token_len_per_gpu`) that holds it in one
piece.
"""
PREFERENCES = """\
## Preference losses

`algorithm.policy_loss: {type: NAME, ...parameters}`, the same key: one of these makes `tandem train` learn from given
answers ([data.md](data.md#preferences)), with no generation and no rewards. Those that read `group_ids` compare the two
answers of a prompt; `kto` judges each answer alone. `ref_logprobs` make the plan keep a reference (the weights of the
start; with LoRA the base model, at no cost). The loss is the mean over pairs, or over answers.
"""
KL = """\
## KL estimators

`algorithm.kl: {in: loss, type: NAME, coef: 0.001}` or `in: reward`. Arguments are log-probs of the sampled tokens under
the policy (`pi`) and the reference (`ref`). A name with `+` has the value of the estimator and the gradient of `k2`.
"""
TEACHING = """\
## Distillation

`algorithm.distillation: {type: NAME, coef: 1.0, ...parameters}`, with a teacher under `actor_rollout_ref.teacher`. The
teacher scores what the student sampled. Columns named `teacher_*` come from its forward, `student_topk_logprobs` from
the training forward: no matrix of tokens by vocabulary is kept of either.
"""
CONTROLLERS = """\
## KL controllers

`algorithm.kl.controller`; `coef`, `target` and `horizon` are keys of `algorithm.kl`.
"""
AGGREGATION = "## Loss aggregation\n\n`algorithm.loss_agg_mode`. Sums and counts are those of the whole mini-batch.\n"
CORRECTION = """\
## Rollout correction

`algorithm.rollout_correction`: what is done about samples of another policy than the one at the start of the step, be
it by the engine's numerics or by staleness. `r` is old / rollout; both log-probs are recorded, and `mismatch/*` in the
metrics tells how far apart they are whether or not anything is corrected.

```yaml part
algorithm:
  rollout_correction:
    weights: token          # or sequence: the product over an answer; off by default
    cap: 2.0                # truncates; with floor: 0.5 what is outside [0.5, 2.0] weighs 0
    normalize: false        # true: divided by the mean over the partition
    reject:
      - {by: seq_mean_k1, low: 0.9, high: 1.1}      # the geometric mean of an answer's ratios
      - {by: token_k3, quantile: 0.99}              # the hundredth part that drifted most
    veto: 1.0e-4            # an answer with a token whose r is below
```

`by` is `token_*` (each token by itself), `seq_sum_*`, `seq_mean_*`, `seq_max_*` or `seq_min_*` (whole answers), of
`k1` = r, `k2` = (log r)^2 / 2 or `k3` = r - 1 - log r. What is rejected keeps its place in the statistics of its group
and is left out of the loss and of its counts. Bounds are on old / rollout, as the weights are: where another system
bounds rollout / old (verl's rejection does), its band [low, high] is [1 / high, 1 / low] here. `use_tis: true` with
`tis_cap` is short for `weights: token` with `cap`. Scope: `normalize` and `quantile` look at the whole partition, the
rest at a token or an answer. Sources: truncated weights (Ionides 2008; V-trace, arXiv 1802.01561), weights that are 0
outside a band (IcePop), k1 to k3 (Schulman 2020).
"""
SCORERS = """\
## Rewards

`reward_manager: {type: NAME, ...parameters}`. *Reads* are fields of a sample. See [rewards.md](rewards.md).
"""
NEEDS_PEERS, WHOLE, USE_WHEN = "group_baseline", "whole_mini_batch", "use_when"
WHAT = ("name", "what it is", "use it when")
PLAIN = (*WHAT, "source", "columns", "scope", "parameters")
PAPER = re.compile(r"arXiv\s+\d{4}\.\d{5}(?:,\s+(?:equation|section) [\d.]*\d)?")


def page() -> str:
    """The whole page."""
    estimators = (*WHAT, "source", "columns", "scope", "group", "parameters")
    losses = (*WHAT, "source", "columns", "scope", "mini-batch", "parameters")
    parts = [
        HEAD,
        ESTIMATORS,
        table(estimators, (_estimator(entry) for entry in own(ADVANTAGES))),
        LOSSES,
        table(losses, (_loss(entry) for entry in own(POLICY_LOSSES))),
        PREFERENCES,
        table(PLAIN, (_entry(entry) for entry in own(PREFERENCE_LOSSES))),
        KL,
        table(WHAT, (_what(entry) for entry in own(KL_TYPES))),
        TEACHING,
        table(PLAIN, (_entry(entry) for entry in own(DISTILLATIONS))),
        CONTROLLERS,
        table(WHAT, (_what(entry) for entry in own(KL_CONTROLLERS))),
        AGGREGATION,
        "\n".join(text(line) for line in _modes()) + "\n",
        CORRECTION,
        SCORERS,
        table(("name", "what it is", "reads", "parameters"), (_scorer(entry) for entry in own(REWARDS))),
    ]
    return "\n".join(parts)


def own(registry: Registry[Any]) -> Iterator[Entry[Any]]:
    """Tandem's entries by name; what a plugin registered in this process is not on the page."""
    for name in registry.names():
        if registry[name].target.__module__.startswith("tandem."):
            yield registry[name]


def table(names: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = (names, tuple("---" for _ in names), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def text(summary: str) -> str:
    """A docstring's paragraph on one line, as Markdown that fits into a cell: what is returned, not that it is."""
    thing = re.sub("^Return (.)", lambda found: found[1].upper(), " ".join(summary.split()))
    return thing.replace("``", "`").replace("|", "\\|")


def code(name: str) -> str:
    """A name as code."""
    return f"`{name}`"


def _estimator(entry: Entry[Any]) -> tuple[str, ...]:
    peers = "yes" if entry.traits.get(NEEDS_PEERS) else ""
    return (*_what(entry), papers(entry), _columns(entry), _scope(entry), peers, _parameters(entry))


def _loss(entry: Entry[Any]) -> tuple[str, ...]:
    whole = "yes" if entry.traits.get(WHOLE) else ""
    return (*_what(entry), papers(entry), _columns(entry), _scope(entry), whole, _parameters(entry))


def _what(entry: Entry[Any]) -> tuple[str, str, str]:
    return code(entry.name), text(entry.summary), text(str(entry.traits.get(USE_WHEN, "")))


def papers(entry: Entry[Any]) -> str:
    """The papers that the docstring cites."""
    found = PAPER.findall(inspect.getdoc(entry.target) or "")
    return "; ".join(dict.fromkeys(" ".join(paper.split()) for paper in found))


def _scope(entry: Entry[Any]) -> str:
    return entry.scope.name.lower()


def _entry(entry: Entry[Any]) -> tuple[str, ...]:
    return (*_what(entry), papers(entry), _columns(entry), _scope(entry), _parameters(entry))


def _scorer(entry: Entry[Any]) -> tuple[str, ...]:
    if entry.name in COMBINING:
        inside = ", ".join(map(code, entry.signature.parameters))
        return code(entry.name), text(entry.summary), "what its parts read", inside
    reads = _columns(entry)
    if inspect.isclass(entry.target):
        style = call_style(entry.target, entry.name)
        reads = "the batch" if style.is_batch else ", ".join(map(code, style.fields))
    return code(entry.name), text(entry.summary), reads, _parameters(entry)


def _columns(entry: Entry[Any]) -> str:
    optional = [f"[{code(name)}]" for name in entry.signature.optional_columns]
    return ", ".join([*(code(name) for name in entry.signature.columns), *optional])


def _parameters(entry: Entry[Any]) -> str:
    return ", ".join(code(_parameter(parameter)) for parameter in entry.signature.parameters.values())


def _parameter(parameter: Parameter) -> str:
    kind = "" if parameter.annotation is None else f": {spelled(parameter.annotation)}".replace("|", "\\|")
    return f"{parameter.name}{kind}" + ("" if parameter.required else f" = {_yaml(parameter.default)}")


def _yaml(value: object) -> str:
    """A default as YAML writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def _modes() -> Iterator[str]:
    """The list in the docstring of ``Aggregation``, an item a line."""
    items = (inspect.getdoc(Aggregation) or "").split("\n- ")[1:]
    yield from (f"- {item}" for item in items)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(page(), "utf-8")
