"""Which roles are deployed, on which devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.config.execution import Devices
from tandem.config.schema import Config
from tandem.plan.parts.preference import learns_preferences, loss_reads
from tandem.plan.parts.teacher import learns_from_reward, teaches_as_tag, uses_teacher
from tandem.stages.facts import TEACHER

ONE_DEVICE = (1, 1)
NO_DEVICE = (1, 0)
ADVANTAGES = "advantages"
"""A role that computes beside the driver of the run, on no device of its own."""
REFERENCE_NAMES = ("reference", "ref")
GUESTS = ("critic", TEACHER)
"""Roles that take turns on the actor's devices in hybrid where they are given none of their own."""


@dataclass(frozen=True)
class Placement:
    """A deployed role. Roles of the same ``group`` take turns on the same devices."""

    role: str
    group: str
    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        """The number of devices of the role."""
        return self.nodes * self.devices_per_node


def deployed_roles(config: Config) -> tuple[str, ...]:
    """Return the roles that a run of this config starts, in the order of the dataflow."""
    if learns_preferences(config):
        return ("actor",)
    critic = ("critic",) if config.critic.enable else ()
    teacher = (TEACHER,) if uses_teacher(config) and not teaches_as_tag(config) else ()
    if config.execution.mode != "fully_async":
        return ("actor", *critic, "rollout", *teacher)
    reference = ("reference",) if uses_reference(config) else ()
    advantages = ("advantages",) if learns_from_reward(config) or config.algorithm.correction.gives else ()
    return ("actor", *critic, "rollout", *advantages, *reference, *teacher, "actor_fwd")


def uses_reference(config: Config) -> bool:
    """Return whether anything compares with the reference policy: a coefficient of 0 means off."""
    if learns_preferences(config):
        return loss_reads(config, "ref_logprobs")
    return config.algorithm.kl.where != "off" and config.algorithm.kl.coef > 0


def placements(config: Config) -> tuple[Placement, ...]:
    """Return the place of each deployed role."""
    return tuple(_place(config, role) for role in deployed_roles(config))


def train_ranks(config: Config) -> int:
    """Count the data-parallel ranks of the actor: the devices, or groups of those that see the same samples."""
    return max(1, _place(config, "actor").devices // config.actor_rollout_ref.actor.devices_of_a_sample)


def _place(config: Config, role: str) -> Placement:
    nodes, per_node = _devices(config, role)
    if config.execution.mode == "colocate":
        group = "shared"
    elif config.execution.mode == "hybrid" and role in GUESTS and role not in config.execution.resource:
        group, (nodes, per_node) = "actor", _devices(config, "actor")
    else:
        group = role
    return Placement(role, group, nodes, per_node)


def _devices(config: Config, role: str) -> Devices:
    if role == ADVANTAGES:
        return NO_DEVICE
    names = REFERENCE_NAMES if role == "reference" else (role,)
    for name, devices in config.execution.resource.items():
        if name in names:
            return devices
    given = [devices for name, devices in config.execution.resource.items() if name != ADVANTAGES]
    if config.execution.mode == "colocate" and given:
        # Roles that take turns need no entry of their own: they use what the others were given.
        return max(given, key=lambda pair: pair[0] * pair[1])
    rollout = config.actor_rollout_ref.rollout
    if (
        rollout.name != "hf"
        and not config.execution.resource
        and (role == "rollout" or config.execution.mode == "colocate")
    ):
        return 1, rollout.tensor_model_parallel_size  # one engine, as wide as it is
    return ONE_DEVICE


def device_groups(placed: Iterable[Placement]) -> dict[str, int]:
    """Count the devices of each group: separate groups add up, roles that share one need the largest share."""
    groups: dict[str, int] = {}
    for placement in placed:
        groups[placement.group] = max(groups.get(placement.group, 0), placement.devices)
    return {group: devices for group, devices in groups.items() if devices}


def choose_runtime(config: Config, placed: Iterable[Placement]) -> str:
    """Choose ``local`` where one device a role suffices, else ``ray``, unless the config says which."""
    if config.runtime.name != "auto":
        return config.runtime.name
    return "local" if all(placement.devices <= 1 for placement in placed) else "ray"
