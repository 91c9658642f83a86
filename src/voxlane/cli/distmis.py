"""Configs of DistMIS, where one is given in the place of ours."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from voxlane.compat.distmis import is_distmis, translate


def in_our_words(
    values: dict[str, Any], options: argparse.Namespace, origin: str, *, searching: bool = False
) -> dict[str, Any]:
    """The values of the file `origin`; where they are DistMIS's, translated, its launch options set in `options` unless
    the command line has them, and what is not as it was told on stderr."""
    if not is_distmis(values):
        return values
    from voxlane.train import ranks

    found = translate(values, searching=searching)
    where = ranks.of_environment()
    if where.world_size == 1:  # else a launcher has made the ranks
        for name, value in found.options.items():
            if getattr(options, name, None) in (None, False):
                setattr(options, name, value)
    if where.rank == 0:
        print(f"{origin}: a config of DistMIS, taken as", file=sys.stderr)
        print(f"  {_flat(found.said)}", file=sys.stderr)
        if found.options and where.world_size == 1:
            print(f"  {' '.join(_option(name, value) for name, value in found.options.items())}", file=sys.stderr)
        for note in found.notes:
            print(f"  note: {note}", file=sys.stderr)
    return found.said


def _flat(values: dict[str, Any], prefix: str = "") -> str:
    """Nested values as the overrides that would say the same."""
    from voxlane.tune.axes import text

    parts = []
    for name, value in values.items():
        if isinstance(value, dict) and not (len(value) == 1 and isinstance(next(iter(value.values())), list)):
            parts.append(_flat(value, f"{prefix}{name}."))
        else:
            parts.append(f"{prefix}{name}={text(value)}")
    return " ".join(parts)


def _option(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
