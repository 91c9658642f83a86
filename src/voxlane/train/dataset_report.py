"""The page of `voxlane check`: what is wrong or suspicious in a dataset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from voxlane import uri as uris
from voxlane.pages.render import Tile, render
from voxlane.sizes import format_plural
from voxlane.store import Store, StoreConfig

JSON_NAME, PAGE_NAME = "check.json", "check.html"


def write_check_report(report: Mapping[str, Any], out: str, config: StoreConfig | None = None) -> str:
    """Write the report of a check and its page below `out`, and return the URI of the page."""
    store, prefix = Store(out, config), uris.parse(out).key.rstrip("/")
    prefix = f"{prefix}/" if prefix else ""
    store.put(f"{prefix}{JSON_NAME}", json.dumps(report, indent=1).encode())
    store.put(f"{prefix}{PAGE_NAME}", render_check_page(report).encode())
    return store.uri(f"{prefix}{PAGE_NAME}")


def render_check_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report. Pure: the same report gives the same page."""
    kinds = Counter((finding["severity"], finding["kind"]) for finding in report["findings"])
    unusable = report["cases"] - report["usable_cases"]
    return render(
        "check.html.j2",
        title=str(report["name"]),
        tiles=[
            Tile("Cases", f"{report['cases']:,}", f"layout {report['layout']}"),
            Tile("Usable", f"{report['usable_cases']:,}", f"{format_plural(unusable, 'case')} with errors"),
            Tile("Errors", f"{report['errors']:,}", "make a case unusable"),
            Tile("Warnings", f"{report['warnings']:,}", "deserve a look"),
        ],
        footer=report["source"],
        report=report,
        kinds=sorted(((severity, kind, count) for (severity, kind), count in kinds.items()), key=lambda row: row[:2]),
    )
