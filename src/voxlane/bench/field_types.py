"""Types of numbers in the settings of benchmarks."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from voxlane.errors import ConfigError
from voxlane.sizes import parse_bytes

Positive = Annotated[int, pydantic.Field(ge=1)]
Count = Annotated[int, pydantic.Field(ge=1, le=10_000_000)]
CountOrZero = Annotated[int, pydantic.Field(ge=0, le=10_000_000)]
Seconds = Annotated[float, pydantic.Field(ge=0, le=36_000)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
Fraction = Annotated[float, pydantic.Field(ge=0, le=1)]
Limit = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=True)]
"""A limit, such as bytes per second; infinite: no limit."""


def _parse_size(value: Any) -> Any:
    try:
        return parse_bytes(value, name="size") if isinstance(value, str) else value
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("size: ")) from None


SIZE = pydantic.BeforeValidator(_parse_size)
"""For a number of bytes that may be written as 150M or 2Gi."""


def default_size(text: str) -> Any:
    """Return the default of a number of bytes, which --help shows as it is written here."""
    return pydantic.Field(default=text, validate_default=True)
