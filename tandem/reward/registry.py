"""The registry of scorers. Imports no torch, so that planning and scoring processes start fast.

A scorer is

- a function of *one* sample: its positional parameters are named after what it needs (``SAMPLE_FIELDS``), its
  keyword-only parameters are its YAML parameters::

      @register_reward("shouting")
      def shouting(response: str, *, bonus: float = 1.0) -> float:
          return bonus if response.isupper() else 0.0

- a class, whose constructor's parameters are its YAML parameters. ``__call__(self, data: DataProto)`` scores a whole
  batch and gives B numbers (a tensor, an array or a list). A ``__call__`` with the parameters of a function scores one
  sample; the object then keeps its state between samples.

Either may be ``async``. One sample's result is a number, or a dict with ``score`` and further numbers, which become
metrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from tandem.base.errors import TandemError
from tandem.base.hidden import is_env_of_secret, is_variable
from tandem.base.registry import Registry, Scope, near

ScorerTarget = Callable[..., Any]


class Objection(NamedTuple):
    """Why a scorer can't take the value of a ``parameter``, and what to write instead."""

    parameter: str
    reason: str
    remedy: str


Check = Callable[[Mapping[str, Any]], Iterator[Objection]]
"""From all parameters of a scorer, defaults included and types right, to what is wrong with their values."""


def check_variables(parameters: Mapping[str, Any]) -> Iterator[Objection]:
    """Refuse anything else where the name of the environment variable of a secret belongs (``api_key_env``)."""
    for name, value in parameters.items():
        if isinstance(value, str) and is_env_of_secret(name) and not is_variable(value):
            secret = name[: -len("_env")].upper()
            yield Objection(
                name,
                "no environment variable is called so: what is secret belongs into one, and its name here",
                f"Write export {secret}=... before the run, and {name}: {secret}",
            )


Target = TypeVar("Target", bound=ScorerTarget)

SAMPLE_FIELDS = {
    "response": "the decoded answer (str)",
    "ground_truth": "the reference answer of the data, as it is there",
    "prompt": "the decoded prompt (str)",
    "data_source": "the name of the data set (str or None)",
    "extra_info": "the further fields of the data row (dict)",
    "response_length": "length of the answer in tokens (int)",
    "truncated": "whether the answer was cut by the length limit (bool)",
    "messages": "the chat messages that the prompt was rendered from (list of dicts, or None)",
}

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

REWARDS: Registry[ScorerTarget] = Registry("reward")


@dataclass(frozen=True)
class CallStyle:
    """How a scorer is called: with these ``fields`` of a sample, or with a batch; awaited or not."""

    fields: tuple[str, ...]
    is_batch: bool
    is_async: bool


def no_objection(parameters: Mapping[str, Any]) -> Iterator[Objection]:
    """Object to nothing, for a scorer whose annotations say all: a range is ``Annotated[float, Gt(0)]``."""
    yield from ()


def register_reward(
    name: str, *, packages: tuple[str, ...] = (), check: Check = no_objection
) -> Callable[[Target], Target]:
    """Return a decorator that makes a scorer known as ``type: name``.

    ``packages`` are the importable names that it imports itself when first called; they are looked for by the plan and
    imported before the first sample, whose deadline they would eat up. ``check`` objects to values of parameters, for
    the plan: what no annotation can say.

    Raises ``TandemError`` if the name is taken or the scorer asks for what no sample has. Example::

        @register_reward("short", packages=("textstat",))
        def short(response: str, *, most_words: int = 50) -> float:
            return float(len(response.split()) <= most_words)
    """

    def add(target: Target) -> Target:
        call_style(target, name)
        REWARDS.register(name, scope=Scope.SEQUENCE, packages=packages, check=check)(target)
        return target

    return add


@contextmanager
def known_here(name: str, target: ScorerTarget) -> Iterator[str]:
    """Keep a scorer that no other process can import registered as long as the block lasts; yield its name.

    It is called in this process. Raises ``TandemError`` as ``register_reward`` does.
    """
    call_style(target, name)
    REWARDS.register(name, scope=Scope.SEQUENCE, packages=(), check=no_objection, here=True)(target)
    try:
        yield name
    finally:
        REWARDS.remove(name)


def call_style(target: ScorerTarget, name: str) -> CallStyle:
    """Read off the signature of a function, of a class's ``__call__`` or of an object.

    A single required parameter that is no field of a sample means a batch, but not for a function: that scores one
    sample. Raises ``TandemError`` on a parameter that can't be filled, or a class that can't be called.
    """
    function = _defined(target, "__call__") if inspect.isclass(target) else target
    if function is None:
        raise TandemError(f"reward {name!r}: class {target.__name__} needs __call__(self, data)")
    positional = [p for p in inspect.signature(function).parameters.values() if p.kind in _POSITIONAL]
    if inspect.isclass(target):
        positional = positional[1:]
    names = tuple(p.name for p in positional)
    required = [p.name for p in positional if p.default is p.empty]
    is_async = any(inspect.iscoroutinefunction(f) for f in (function, _defined(type(target), "__call__")))
    if len(required) == 1 and required[0] not in SAMPLE_FIELDS and not inspect.isfunction(target):
        return CallStyle((), is_batch=True, is_async=is_async)
    for field in names:
        if (reason := unknown_field(field)) is not None:
            raise TandemError(f"reward {name!r}: {reason}")
    return CallStyle(names, is_batch=False, is_async=is_async)


def _defined(cls: type, name: str) -> Any:
    """Return the attribute as the class or a base defines it; None where only the metaclass has it."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def unknown_field(field: str) -> str | None:
    """Return why a positional parameter of this name can't be filled, and what to write; None if it can."""
    if field in SAMPLE_FIELDS:
        return None
    return (
        f"no sample has {field!r}: {near(field, SAMPLE_FIELDS)} "
        f"(a YAML parameter stands behind a '*': def score(response, *, {field}))"
    )
