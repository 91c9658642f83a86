"""Types of numbers in the settings of benchmarks."""

from __future__ import annotations

from typing import Annotated

import pydantic

Positive = Annotated[int, pydantic.Field(ge=1)]
Count = Annotated[int, pydantic.Field(ge=1, le=10_000_000)]
CountOrZero = Annotated[int, pydantic.Field(ge=0, le=10_000_000)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=36_000)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
Limit = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=True)]
"""A limit, such as bytes per second; infinite: no limit."""
