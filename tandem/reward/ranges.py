"""Ranges of numbers for the annotations of scorers' parameters, which the plan checks.

Of ``annotated_types`` and not of pydantic, which scoring processes would have to import.
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Lt

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
BelowRight = Annotated[float, Lt(1)]
"""What a wrong answer may get, of rewards that give 1 to a right one."""
InnerFraction = Annotated[float, Ge(0), Lt(1)]
