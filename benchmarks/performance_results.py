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
        found = (document["hardware"] for document in self.documents.values() if "hardware" in document)
        return sorted({machine(hardware) for hardware in found})

    def picture(self, name: str, title: str) -> str:
        """The figure of a result, if it was drawn."""
        return f"![{title}]({LINK}{name}.png)\n\n" if name in self.pictures else ""


def link(name: str) -> str:
    """A link to a result file."""
    return f"[{name}.json]({LINK}{name}.json)"


def provenance(name: str, command: str, document: Document) -> str:
    """Where a section's figures come from: command, file, date, commit, machine."""
    load = f", load before {document['load_before']}" if "load_before" in document else ""
    quick = ". **A quick run: do not quote**" if settings(document).get("quick") else ""
    return (
        f"`{command}` wrote {link(name)} on {document['date'][:10]} at commit {document['commit']}: "
        f"{machine(document['hardware'])}{load}, "
        f"Python {document['python']}{quick}.\n"
    )


def machine(hardware: Mapping[str, Any]) -> str:
    """A machine in words."""
    gpus = f", {' and '.join(hardware['gpus'])}" if hardware.get("gpus") else ""
    return f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_gib']} GiB{gpus}"


def settings(document: Document) -> dict[str, Any]:
    """What was asked for; benchmarks of the command line and those of this folder name it differently."""
    found: dict[str, Any] = document.get("settings") or document.get("setting") or {}
    return found


def missing(command: str) -> str:
    """In place of figures that there are none of."""
    return f"Not measured yet. To measure: `{command}`, then `make bench-report`.\n"


def rows_of(document: Document, **wanted: Any) -> list[dict[str, Any]]:
    """Rows of the summary with these values that did not fail."""
    return [
        row
        for row in document["summary"]
        if "error" not in row and all(row.get(name) == value for name, value in wanted.items())
    ]


def one(document: Document, **wanted: Any) -> dict[str, Any] | None:
    """The first such row."""
    return next(iter(rows_of(document, **wanted)), None)


def faster(ours: Spread, peers: Spread) -> Spread:
    """How many times the peer's time ours is a part of: the ratio of medians, and the least and the most that the
    spreads of both allow. Above 1 ours is faster."""
    return {
        "median": peers["median"] / ours["median"],
        "min": peers["min"] / ours["max"],
        "max": peers["max"] / ours["min"],
    }


def more(ours: Spread, peers: Spread) -> Spread:
    """The same for rates, of which more is better."""
    return faster(peers, ours)


def times(ratio: Spread) -> str:
    """`26.3x (24.9 to 27.4)`, and whether that is slower or not told apart; without a spread where there is none."""
    digits = 1 if ratio["median"] >= 9.95 else 2
    if ratio["min"] == ratio["max"]:
        return f"{ratio['median']:.{digits}f}x, no spread" + verdict(ratio)
    told = f"{ratio['median']:.{digits}f}x ({ratio['min']:.{digits}f} to {ratio['max']:.{digits}f})"
    return told + verdict(ratio)


def verdict(ratio: Spread) -> str:
    """Words for ratios that a reader must not take for a gain."""
    if ratio["max"] < 1:
        return ", **slower**"
    return ", not told apart" if ratio["min"] <= 1 else ""


def best(rows: Iterable[dict[str, Any]], figure: str, *, least: bool) -> dict[str, Any] | None:
    """The row with the least or the greatest median of a figure."""
    found = sorted(rows, key=lambda row: row[figure]["median"])
    return None if not found else found[0] if least else found[-1]


def sentence(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "none"
