"""Every error that Tandem raises on purpose. Each says what is wrong, where, and what to write instead.

TandemError                       the base; the command line prints its message and ends with 1, or 2 for input
├── ConfigError                   a config that can't run, with every problem found (ends with 2)
│   └── InvalidConfigError        a config that can't even be read: tandem.config.load
├── DataError                     bad input data, with file and row (ends with 2)
│   ├── DamagedError              a file that is not as it was written: tandem.base.manifest
│   ├── OtherContentError         a folder of tensors other than those asked for: tandem.train.tensor_files
│   ├── RowError                  a row that can't be read: tandem.data.rows
│   └── TemplateError             a prompt template that can't be meant so: tandem.data.template
├── UnknownNameError              a name that nothing is registered under, with those near it
├── WriteError                    a file or folder that can't be written
├── ContractError                 code that broke its contract: a missing column, a wrong shape or dtype
├── PolicyError                   a question to the policy that an episode may not ask: tandem.episodes.policy
├── RefusedError                  a request that the policy's address does not answer: tandem.episodes.address.protocol
├── RewardError                   a failed reward, where the config says that one ends the run
├── StarvationError               a partition that can't be filled: too many prompts were dropped
├── BrokenCircleError             a broadcast of weights that others broke off: tandem.transport.circle
├── DeadlineError                 a wait that ended without its event, with who blocks it
├── DiedError                     a process that others wait for is gone
│   └── EngineDiedError           a rollout engine is gone
│       └── EngineHungError       a rollout engine that did nothing for too long; a DeadlineError, too
└── RankError                     a train rank that failed: tandem.roles.train_group
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.base.hidden import HIDDEN, hide, hide_in, names_secret

_ENDS = (".", "?", "!", "…")


def sentences(first: object, *others: object) -> str:
    """Return the texts one after the other, with a period after each that doesn't end one itself; the last stays as it
    is.
    """
    text = str(first).rstrip()
    for other in others:
        text = f"{text}{'' if text.endswith(_ENDS) else '.'} {other}"
    return text


class TandemError(Exception):
    """Base of all errors raised on purpose: printed without a traceback, and without the secrets in its text."""

    exit_code = 1

    def __str__(self) -> str:
        return hide(super().__str__())


@dataclass(frozen=True)
class Problem:
    """One contradiction in a config, found before anything starts.

    ``key`` is the dotted path, ``value`` what was written there, ``reason`` why it can't be, ``remedy`` what to write
    instead.
    """

    key: str
    value: object
    reason: str
    remedy: str

    def __str__(self) -> str:
        shown = self.hidden()
        return sentences(f"{shown.key} = {shown.value!r}: {shown.reason}", shown.remedy)

    def hidden(self) -> Problem:
        """Return the same problem without secrets in its texts."""
        name = self.key.rpartition(".")[2]
        value = HIDDEN if names_secret(name) else hide_in(self.value, name)
        return replace(self, value=value, reason=hide(self.reason), remedy=hide(self.remedy))


class ConfigError(TandemError):
    """A config that can't run; carries *all* problems found, not the first."""

    exit_code = 2

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        noun = "problem" if len(problems) == 1 else "problems"
        super().__init__(f"{len(problems)} {noun} in the config\n" + "\n".join(f"  - {p}" for p in problems))


class UnknownNameError(TandemError):
    """A name that no registry entry has; lists the near ones."""


class DataError(TandemError):
    """Bad input data: names the file and the row."""

    exit_code = 2


class WriteError(TandemError):
    """A file or folder can't be written; the message is one line with its name."""


class ContractError(TandemError):
    """A part broke its contract (a missing column, a wrong shape or dtype): a defect of code, not of input."""


class DeadlineError(TandemError):
    """A wait ended without its event; the message names who blocks, since when, and what was awaited."""


class RewardError(TandemError):
    """Scoring failed where the config says that a failure stops the run."""


class StarvationError(TandemError):
    """A partition can't be filled: too many draws in a row were dropped or filtered."""


class DiedError(TandemError):
    """A process that others wait for is gone: says which one, and what was lost with it."""


class EngineDiedError(DiedError):
    """A rollout engine is gone; its tickets can be given to others."""


class EngineHungError(EngineDiedError, DeadlineError):
    """A rollout engine was alive and did nothing for too long, so that it was ended: gone like one that died."""
