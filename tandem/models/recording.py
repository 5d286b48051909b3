"""Whether the experts that tokens go to can be recorded in a model, and in how many bytes."""

from __future__ import annotations

from tandem.base.errors import ContractError
from tandem.models.causal_lm import CausalLM
from tandem.models.routers import Routers

_REMEDY = "write actor_rollout_ref.actor.router_replay: false"


def routes_width(model: CausalLM) -> int:
    """Return the bytes of the record of a token. Raises ``ContractError`` for a model whose routers are not known."""
    if model.routers is None:
        raise ContractError(f"the family {model.family!r} has no routers that are known, to be replayed: {_REMEDY}")
    return model.routers.width


def recorder(model: CausalLM, width: int) -> Routers | None:
    """Return the routers whose choices are recorded in ``width`` bytes a token; None where nothing is.

    Raises ``ContractError`` for a model that can't be recorded, or that makes other records.
    """
    if width == 0:
        return None
    if (found := routes_width(model)) != width:
        raise ContractError(f"routes of {width} bytes a token are asked of a model that makes {found}")
    if model.route != "packed":
        raise ContractError(f"experts are recorded in packed rows, and this model runs as {model.route!r}: {_REMEDY}")
    return model.routers
