"""The result files that docs/performance.md is made of, and how a figure is written beside its peer's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Document = dict[str, Any]
Spread = Mapping[str, float]
"""`median`, `min` and `max` of what was measured several times."""
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = {
    "loading": "compare_loading.py",
    "listing": "compare_listing.py",
    "compose": "compare_composed_download.py",
    "checkpoint": "compare_checkpoint.py",
    "patch_readers": "compare_patch_readers.py",
    "staging": "compare_staging.py",
    "first_batch": "compare_first_batch.py",
    "peers": "compare_medical_loaders.py",
    "segmentation_loading": "compare_whole_objects.py",
}
"""Script that writes each result file."""
LINK = "../benchmarks/results/"
"""From docs/ to the result files."""


@dataclass(frozen=True)
class Results:
    """What is in a folder of result files. A file that is not there was not measured."""

    documents: Mapping[str, Document]
    """By file name without `.json`; those in folders by `simulator/NAME` and `hippocampus/NAME/FILE`."""
    pictures: frozenset[str]
    """Names of the figures that are there, without `.png`."""

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Read all of them."""
        paths = sorted([*folder.glob("*.json"), *folder.glob("simulator/*.json"), *folder.glob("hippocampus/*/*.json")])
        documents = {str(p.relative_to(folder).with_suffix("")): json.loads(p.read_text()) for p in paths}
        pictures = (p.relative_to(folder).with_suffix("") for p in folder.rglob("*.png"))
        return cls(documents, frozenset(map(str, pictures)))

    def get(self, name: str) -> Document | None:
        """A result, or None."""
        return self.documents.get(name)

    def machines(self) -> list[str]:
        """Every machine that something was measured on, as the files say."""
        recorded_hardware = (document["hardware"] for document in self.documents.values() if "hardware" in document)
        return sorted({machine(hardware) for hardware in recorded_hardware})

    def picture(self, name: str, title: str) -> str:
        """The figure of a result, if it was drawn."""
        return f"![{title}]({LINK}{name}.png)\n\n" if name in self.pictures else ""


def link(name: str) -> str:
    """Return a link to a result file."""
    return f"[{name}.json]({LINK}{name}.json)"


def provenance(name: str, command: str, document: Document) -> str:
    """Return the command, file, date, commit and machine of a section's figures."""
    load = f", load before {document['load_before']}" if "load_before" in document else ""
    quick = ". **A quick run: do not quote**" if settings(document).get("quick") else ""
    return (
        f"`{command}` wrote {link(name)} on {document['date'][:10]} at commit {document['commit']}: "
        f"{machine(document['hardware'])}{load}, "
        f"Python {document['python']}{quick}.\n"
    )


def machine(hardware: Mapping[str, Any]) -> str:
    """Return a description of a machine."""
    gpus = f", {' and '.join(hardware['gpus'])}" if hardware.get("gpus") else ""
    return f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB{gpus}"


def settings(document: Document) -> dict[str, Any]:
    """Return the settings; `voxlane bench` and the scripts of this folder store them under different names."""
    values: dict[str, Any] = document.get("settings") or document.get("setting") or {}
    return values


def missing(command: str) -> str:
    """Return the text for a benchmark without a result file."""
    return f"Not measured yet. To measure: `{command}`, then `make bench-report`.\n"


def rows_of(document: Document, **values: Any) -> list[dict[str, Any]]:
    """Return the rows of the summary that did not fail and have these values."""
    return [
        row
        for row in document["summary"]
        if "error" not in row and all(row.get(name) == value for name, value in values.items())
    ]


def first_row(document: Document, **values: Any) -> dict[str, Any] | None:
    """Return the first such row, or None."""
    return next(iter(rows_of(document, **values)), None)


def faster(our_spread: Spread, peer_spread: Spread) -> Spread:
    """Return how many times faster ours is: the ratio of medians, with the smallest and largest ratio that both spreads
    allow."""
    return {
        "median": peer_spread["median"] / our_spread["median"],
        "min": peer_spread["min"] / our_spread["max"],
        "max": peer_spread["max"] / our_spread["min"],
    }


def more(our_spread: Spread, peer_spread: Spread) -> Spread:
    """Return the same for rates, of which more is better."""
    return faster(peer_spread, our_spread)


def times(ratio: Spread) -> str:
    """`26.3x (24.9 to 27.4)`, and whether that is slower or not significant; without a spread if there is none."""
    digits = 1 if ratio["median"] >= 9.95 else 2
    if ratio["min"] == ratio["max"]:
        return f"{ratio['median']:.{digits}f}x, no spread" + verdict(ratio)
    text = f"{ratio['median']:.{digits}f}x ({ratio['min']:.{digits}f} to {ratio['max']:.{digits}f})"
    return text + verdict(ratio)


def verdict(ratio: Spread) -> str:
    """Return a remark on ratios that are not a gain."""
    if ratio["max"] < 1:
        return ", **slower**"
    return ", not significant" if ratio["min"] <= 1 else ""


def best(rows: Iterable[dict[str, Any]], figure: str, *, least: bool) -> dict[str, Any] | None:
    """The row with the least or the greatest median of a figure."""
    ordered = sorted(rows, key=lambda row: row[figure]["median"])
    return None if not ordered else ordered[0] if least else ordered[-1]


def sentence(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"
