"""Ranges of numbers for the annotations of parameters, beside pydantic's ``PositiveFloat`` and its like.

A parameter annotated with one is checked by the plan, and its range stands in the generated pages.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Fraction = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1, both included."""

InnerFraction = Annotated[float, Field(gt=0, lt=1)]
"""Between 0 and 1, neither included."""
