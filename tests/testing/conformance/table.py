"""The table of docs/testing.md: which operations of which clients each server supports.

``python -m tests.testing.conformance.table`` writes it. Every cell is a test of tests/testing/test_conformance.py: it
passes where the table says yes, and has to fail where the table names an exception.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .exceptions import EXCEPTIONS
from .registry import OPERATIONS, SERVERS, Api

PAGE = Path(__file__).parents[3] / "docs" / "testing.md"
BEGIN, END = "<!-- conformance tables: begin -->\n", "<!-- conformance tables: end -->\n"
_TITLES: dict[Api, str] = {"gcs": "Clients of Google Cloud Storage", "s3": "Clients of S3"}


def render_tables() -> str:
    """Return the tables of both APIs and the list of exceptions as Markdown."""
    notes = {reason: number for number, reason in enumerate(dict.fromkeys(EXCEPTIONS.values()), start=1)}
    sections = [_render_api(api, notes) for api in SERVERS]
    exceptions = [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join([*sections, "Exceptions:\n", *exceptions, ""])


def _render_api(api: Api, notes: dict[str, int]) -> str:
    counts = Counter(each.client.name for each in OPERATIONS if each.client.api == api)
    clients = [client for client, _ in counts.most_common()]
    operations = [each for each in OPERATIONS if each.client.api == api]
    operations.sort(key=lambda each: clients.index(each.client.name))
    names = list(dict.fromkeys(each.name for each in operations))
    supported = {(each.client.name, each.name) for each in operations}
    lines = [
        f"{_TITLES[api]}, each against {' / '.join(SERVERS[api])}:\n",
        f"| operation | {' | '.join(clients)} |",
        "|---" * (len(clients) + 1) + "|",
    ]
    for name in names:
        cells = []
        for client in clients:
            reasons = [EXCEPTIONS.get((server, client, name)) for server in SERVERS[api]]
            marks = ["yes" if reason is None else f"no ({notes[reason]})" for reason in reasons]
            cells.append(" / ".join(marks) if (client, name) in supported else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def replace_tables(page: str) -> str:
    """Return the text of a page with the tables between the two markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{render_tables()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replace_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
