"""Many ranges of one file, wanted in many places: planned as few requests of whole blocks, read many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from voxlane.checkpoint.source import Source
from voxlane.store.ranges import Span, coalesce

_MAX_GAP_BYTES = 256 * 1024
"""Ranges closer than this share a request."""


@dataclass(frozen=True)
class Wanted:
    """Bytes of a file, from `start` on, and where they shall go."""

    start: int
    target: npt.NDArray[np.uint8]

    @property
    def stop(self) -> int:
        """Exclusive."""
        return self.start + len(self.target)


@dataclass
class Request:
    """One ranged read `[start, stop)` and who wants something of it."""

    start: int
    stop: int
    wanted: list[Wanted] = field(default_factory=list)


def plan_requests(source: Source, wanted: Sequence[Wanted]) -> list[Request]:
    """Whole blocks that hold all that is wanted, near ones together, none larger than a good request."""
    pieces = sorted((w for w in wanted if len(w.target)), key=lambda w: w.start)
    spans = [Span(*source.aligned(w.start, w.stop)) for w in pieces]
    step = source.request_bytes
    requests = [
        Request(at, min(at + step, group.stop))
        for group in coalesce(spans, max_gap_bytes=_MAX_GAP_BYTES).groups
        for at in range(group.start, group.stop, step)
    ]
    first = 0
    for piece in pieces:
        while requests[first].stop <= piece.start:
            first += 1
        index = first
        while index < len(requests) and requests[index].start < piece.stop:
            requests[index].wanted.append(piece)
            index += 1
    return requests


def submit_wanted(source: Source, wanted: Sequence[Wanted]) -> list[Future[None]]:
    """Start reading all that is wanted of one file, on the store's threads."""
    return [source.store.submit_part(_run, source, request) for request in plan_requests(source, wanted)]


def read_wanted(source: Source, wanted: Sequence[Wanted]) -> None:
    """Read all that is wanted of one file."""
    futures = submit_wanted(source, wanted)
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()


def _run(source: Source, request: Request) -> None:
    if len(request.wanted) == 1:
        (only,) = request.wanted
        if only.start <= request.start and request.stop <= only.stop:  # straight to its place
            source.read_into(request.start, only.target[request.start - only.start : request.stop - only.start])
            return
    data = np.empty(request.stop - request.start, np.uint8)
    source.read_into(request.start, data)
    for piece in request.wanted:
        low, high = max(piece.start, request.start), min(piece.stop, request.stop)
        piece.target[low - piece.start : high - piece.start] = data[low - request.start : high - request.start]
