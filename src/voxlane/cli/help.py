"""Text of help pages and suggestions, without the command-line library, so that `voxlane --help` starts at once."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence


def terminal_width() -> int:
    """Return the number of columns for help texts."""
    return max(40, min(shutil.get_terminal_size().columns, 120))


def format_text(text: str, width: int) -> str:
    """Wrap the paragraphs of a help text at `width`; those with indented lines, such as examples, stay as they are."""
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        literal = any(line.startswith(" ") for line in lines)
        blocks.append(block if literal else textwrap.fill(" ".join(lines), width))
    return "\n\n".join(blocks)


def format_rows(rows: Sequence[tuple[str, str]], width: int, indent: int = 26) -> str:
    """Format names and descriptions as two columns; a name that is too long gets a line of its own."""
    lines = []
    for name, description in rows:
        head = f"  {name}"
        if len(head) > indent - 2:
            lines.append(head)
            head = ""
        start = f"{head:<{indent}}"
        wrapped = textwrap.wrap(
            description, width, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False
        )
        lines += wrapped or [start.rstrip()]
    return "\n".join(lines)


def did_you_mean(word: str, candidates: Sequence[str], prefix: str = "", cutoff: float = 0.6) -> str:
    """Return `. Did you mean X?` for the candidate that starts with `word` or is spelt like it, or an empty string.
    X starts with `prefix`; `cutoff` is the smallest similarity of difflib."""
    import difflib

    nearest = [name for name in candidates if len(word.strip("-")) > 1 and name.startswith(word)]
    nearest = nearest or difflib.get_close_matches(word, candidates, 1, cutoff)
    return f". Did you mean {prefix}{nearest[0]}?" if nearest else ""
