"""Plans for ranged reads: pure, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Bytes `[start, stop)` of one object."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Coalesced:
    """Which requests to make, and where each span lies in their bodies."""

    spans: list[Span]
    groups: list[Span]
    """The requests, by start."""
    places: list[tuple[int, int]]
    """For each span: index into `groups`, and its first byte in that group's body."""


def coalesce(spans: Sequence[Span], *, max_gap_bytes: int) -> Coalesced:
    """Join spans that overlap or lie at most `max_gap_bytes` apart into one request."""
    groups: list[Span] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].stop)):
        span = spans[index]
        if groups and span.start <= groups[-1].stop + max_gap_bytes:
            groups[-1] = Span(groups[-1].start, max(groups[-1].stop, span.stop))
        else:
            groups.append(span)
        places[index] = (len(groups) - 1, span.start - groups[-1].start)
    return Coalesced(list(spans), groups, places)


def split(size_bytes: int, part_bytes: int) -> list[Span]:
    """An object of `size_bytes` as consecutive parts of at most `part_bytes`, none empty."""
    return [Span(start, min(start + part_bytes, size_bytes)) for start in range(0, size_bytes, part_bytes)]
