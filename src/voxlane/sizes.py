"""Sizes and durations in the notation of Kubernetes, and counts of things."""

from __future__ import annotations

import re

from voxlane.errors import ConfigError

_UNITS = {unit: 1000**power for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
QUANTITY = r"^[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$"
DURATION = r"^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$"


def parse_bytes(quantity: str | int, *, name: str = "size") -> int:
    """Return the number of bytes of a quantity such as 100Gi or 5M. Units without the i are powers of 1000, as in
    Kubernetes. `name` is used in the error message."""
    text = str(quantity).strip()
    match = re.fullmatch(QUANTITY, text)
    if not match:
        raise ConfigError(f"{name}: expected a size such as 100Gi, got {text!r}")
    unit = match[2] or ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


def format_bytes(size_bytes: int) -> str:
    """Return a size with its unit, such as 1.5 GiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_plural(count: int, noun: str) -> str:
    """Format a count with its noun, such as 2 cases."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_rough_duration(seconds: float) -> str:
    """Format an estimate, such as 40 s, 3 min or 2.5 h."""
    seconds = max(0.0, seconds)
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def parse_duration(duration: str | int, *, name: str = "duration") -> int:
    """Return the seconds of a duration above zero, such as 2h, 30m or 1h30m. `name` is used in the error message."""
    text = str(duration).strip()
    parts = re.findall(r"([0-9]+)([smhd])", text)
    seconds = sum(int(count) * _SECONDS[unit] for count, unit in parts)
    if not re.fullmatch(DURATION, text) or seconds <= 0:
        raise ConfigError(f"{name}: expected a duration such as 2h or 30m, got {text!r}")
    return seconds
