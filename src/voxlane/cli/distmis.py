"""Configs of DistMIS, given in place of voxlane's own."""

from __future__ import annotations

import sys
from typing import Any

from voxlane.compat.distmis import is_distmis, translate


def translate_distmis(
    values: dict[str, Any], origin: str, *, searching: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config values of the JSON file `origin`, and options of the command that it sets. Where the file is a
    config of DistMIS, it is translated, and the translation is printed on stderr."""
    if not is_distmis(values):
        return values, {}
    from voxlane.train import ranks

    translation = translate(values, searching=searching)
    rank = ranks.read_rank_info()
    options = translation.options if rank.world_size == 1 else {}  # else a launcher has started the ranks
    if rank.rank == 0:
        print(f"{origin}: a config of DistMIS, translated to", file=sys.stderr)
        print(f"  {_format_overrides(translation.fields)}", file=sys.stderr)
        if options:
            print(f"  {' '.join(_format_option(name, value) for name, value in options.items())}", file=sys.stderr)
        for note in translation.notes:
            print(f"  note: {note}", file=sys.stderr)
    return translation.fields, options


def _format_overrides(values: dict[str, Any], prefix: str = "") -> str:
    """Return nested values as the overrides that set them."""
    from voxlane.pages.formatting import format_value

    parts = []
    for name, value in values.items():
        if isinstance(value, dict) and not (len(value) == 1 and isinstance(next(iter(value.values())), list)):
            parts.append(_format_overrides(value, f"{prefix}{name}."))
        else:
            parts.append(f"{prefix}{name}={format_value(value)}")
    return " ".join(parts)


def _format_option(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"
