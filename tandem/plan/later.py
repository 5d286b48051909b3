"""What can be planned and not be run, or not here. A part that arrives takes its line out of ``LATER``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from tandem.base.errors import Problem
from tandem.config.schema import Config
from tandem.plan.files.folder import describes_alone
from tandem.plan.parts.engine import after_swap, engine_capabilities, engine_width
from tandem.plan.parts.preference import learns_preferences
from tandem.rollout.registry import engines


@dataclass(frozen=True)
class Later:
    """The value at ``key`` is known and planned, and where ``applies`` holds a run with it is refused."""

    key: str
    value: Callable[[Config, str], object]
    applies: Callable[[Config, str], bool]
    instead: str
    reason: str = "can be planned and not be run yet"


def _runtime(config: Config, runtime: str) -> str:
    return runtime


def _strategy(config: Config, runtime: str) -> str:
    return config.actor_rollout_ref.actor.strategy


def _engine_width(config: Config, runtime: str) -> int:
    return engine_width(config)


def _has_megatron() -> bool:
    """Return whether Megatron-core is there: other packages have a part of its name."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


LATER = (
    Later(
        "actor_rollout_ref.model.path",
        lambda c, r: c.actor_rollout_ref.model.path,
        lambda c, r: describes_alone(c.actor_rollout_ref.model),
        "Download or save the whole model, and name its folder",
        "its folder has the config of a model and neither weights nor a tokenizer: it can be planned with",
    ),
    Later(
        "runtime.name",
        _runtime,
        lambda c, r: r == "ray" and find_spec("ray") is None,
        "pip install 'tandem-rl[ray]', or give each role one device and write runtime.name: local",
        "needs the package ray, which is not installed here",
    ),
    Later(
        "runtime.name",
        _runtime,
        lambda c, r: r == "ray" and learns_preferences(c),
        "Give the actor one device, and write local or auto: preference training has one rank",
    ),
    Later(
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        _engine_width,
        lambda c, r: _engine_width(c, r) > 1,
        "Write 1, and give the rollout as many engines as it has devices",
        "can be planned and not be run yet: an engine is placed on one device",
    ),
    Later(
        "actor_rollout_ref.actor.strategy",
        _strategy,
        lambda c, r: c.actor_rollout_ref.actor.by_megatron and not _has_megatron(),
        "pip install 'tandem-rl[megatron]', or write fsdp2",
        "needs the package megatron-core, which is not installed here",
    ),
)


def what_comes_later(config: Config, runtime: str) -> tuple[Problem, ...]:
    """Return one line for each part of the config that can be planned but not be run yet."""
    found = [later for later in LATER if later.applies(config, runtime)]
    problems = [Problem(later.key, later.value(config, runtime), later.reason, later.instead) for later in found]
    return (*problems, *_lacking_package(config))


def _lacking_package(config: Config) -> Iterator[Problem]:
    """Report the engine's own package where it is missing. It is looked for where the engine would run."""
    yield from _package_of(config, "actor_rollout_ref.rollout.name")
    if config.actor_rollout_ref.rollout.swap is not None:
        yield from _package_of(after_swap(config), "actor_rollout_ref.rollout.swap.name")


def _package_of(config: Config, key: str) -> Iterator[Problem]:
    rollout, capabilities = config.actor_rollout_ref.rollout, engine_capabilities(config)
    if rollout.name in engines and rollout.python is None and (reason := capabilities.lacks_package()) is not None:
        python = key.removeprefix("actor_rollout_ref.").removesuffix("name") + "python"
        remedy = (
            f"Write {python}: the interpreter of an environment that has it (docs/engines.md); or pip install "
            f"{capabilities.requirement!r}"
        )
        yield Problem(key, rollout.name, reason, remedy)
