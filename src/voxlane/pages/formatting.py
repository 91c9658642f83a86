"""Format numbers, sizes and times for readers."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

from markupsafe import Markup

NO_VALUE = Markup('<span class="soft" title="not scored">–</span>')
"""Stands in for a number that does not exist."""
_THIN_SPACE = "\u202f"


def as_float(value: Any) -> float:
    """Return a JSON value as a number; NaN if it is not one."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def as_number(value: Any) -> float | None:
    """Return a finite number, or None; booleans are not numbers."""
    number = as_float(value)
    return number if math.isfinite(number) else None


def format_number(value: Any, digits: int) -> str:
    """Format a number with `digits` decimals and thin spaces between thousands; `NO_VALUE` if it is not a number."""
    number = as_number(value)
    return NO_VALUE if number is None else f"{number:,.{digits}f}".replace(",", _THIN_SPACE)


def format_count(value: float) -> str:
    """Format a large number in words, such as 1.4 million."""
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return format_number(value, 0)


def format_bytes(value: Any) -> str:
    """Format bytes in decimal units; `NO_VALUE` if the value is not a number."""
    size = as_number(value)
    if size is None:
        return NO_VALUE
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def format_duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def format_time(iso: str) -> str:
    """Format an ISO 8601 time in UTC to the minute; text that is not a time stays as it is."""
    try:
        time = datetime.datetime.fromisoformat(iso)
    except ValueError:
        return iso
    if time.tzinfo is None:
        return f"{time:%Y-%m-%d %H:%M}"
    return f"{time.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC"


def format_dollars(dollars: float) -> str:
    """Format US dollars; an empty string if the amount is not a number."""
    if not math.isfinite(dollars):
        return ""
    return f"${dollars:,.2f}" if dollars >= 0.01 else f"${dollars:.5f}" if dollars else "nothing"


def format_size(values: Any, digits: int = 6) -> str:
    """Format sizes such as 32 × 64 × 64."""
    return " × ".join(f"{v:.{digits}g}" for v in values or ())


def format_value(value: Any) -> str:
    """Format any config value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else _format_scientific(value, 2)
    if isinstance(value, (list, tuple)) and value and all(as_number(v) is not None for v in value):
        return " × ".join(format_value(v) for v in value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def value_key(value: Any) -> str:
    """Return the same text for equal values, whether they come from a file or from a search."""
    return json.dumps(value, sort_keys=True, default=str)


def format_tick(value: float) -> str:
    """Format the number of a tick without unnecessary digits."""
    return _format_scientific(value, 1) if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.6g}"


def _format_scientific(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
