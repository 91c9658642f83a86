"""Plans for ranged reads: pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """The bytes `[start, stop)` of one object."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Coalesced:
    """The requests to make, and the position of each span in their bodies."""

    groups: list[Span]
    """Ranges of the requests, ordered by start."""
    places: list[tuple[int, int]]
    """Index into `groups` of each span, and the offset of its first byte in that group's body."""


def coalesce(spans: Sequence[Span], *, max_gap_bytes: int) -> Coalesced:
    """Combine spans that overlap or lie at most `max_gap_bytes` apart into one request."""
    groups: list[Span] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].stop)):
        span = spans[index]
        if groups and span.start <= groups[-1].stop + max_gap_bytes:
            groups[-1] = Span(groups[-1].start, max(groups[-1].stop, span.stop))
        else:
            groups.append(span)
        places[index] = (len(groups) - 1, span.start - groups[-1].start)
    return Coalesced(groups, places)


def split(size_bytes: int, part_bytes: int) -> list[Span]:
    """Split an object of `size_bytes` into consecutive parts of at most `part_bytes`, none empty."""
    return [Span(start, min(start + part_bytes, size_bytes)) for start in range(0, size_bytes, part_bytes)]
