"""Sizes and times, as people and Kubernetes write them."""

from __future__ import annotations

import re

from voxlane.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18} | {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
    "Pi": 1 << 50,
    "Ei": 1 << 60,
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
QUANTITY = r"^[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$"
DURATION = r"^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$"


def bytes_of(quantity: str | int, *, what: str = "a size") -> int:
    """Bytes of a quantity such as 100Gi or 5M; without the i, units are powers of 1000, as Kubernetes has them.
    `what` names it in the error."""
    text = str(quantity).strip()
    found = re.fullmatch(QUANTITY, text)
    if not found:
        raise ConfigError(f"{what}: {text!r} is no size", fix="Write one such as 100Gi")
    unit = found[2] or ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])


def written(size_bytes: int) -> str:
    """A size with its unit, such as 1.5 GiB."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_of(duration: str | int, *, what: str = "a time") -> int:
    """Seconds of a duration such as 2h, 30m or 1h30m, above zero; `what` names it in the error."""
    text = str(duration).strip()
    parts = re.findall(r"([0-9]+)([smhd])", text)
    seconds = sum(int(count) * _SECONDS[unit] for count, unit in parts)
    if not re.fullmatch(DURATION, text) or seconds <= 0:
        raise ConfigError(f"{what}: {text!r} is no time", fix="Write one such as 2h or 30m")
    return seconds
