"""Reads of many ranges of one file, planned as few requests of whole blocks that run concurrently."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from voxlane.checkpoint.verified_reader import VerifiedObject
from voxlane.store.ranges import Span, coalesce

_MAX_GAP_BYTES = 256 * 1024
"""Ranges closer than this share a request."""


@dataclass(frozen=True)
class ReadTarget:
    """A buffer to fill with the bytes of a file from `start` on."""

    start: int
    target: npt.NDArray[np.uint8]

    @property
    def stop(self) -> int:
        """End of the range in the file, exclusive."""
        return self.start + len(self.target)


def plan_requests(source: VerifiedObject, targets: Sequence[ReadTarget]) -> list[tuple[Span, list[ReadTarget]]]:
    """Return ranges of whole blocks that cover all targets, each with the targets that need some of it. Nearby targets
    share a range, up to a good request size."""
    ordered = sorted((target for target in targets if len(target.target)), key=lambda target: target.start)
    spans = [Span(*source.align_to_blocks(target.start, target.stop)) for target in ordered]
    step = source.request_bytes
    requests: list[tuple[Span, list[ReadTarget]]] = [
        (Span(start, min(start + step, group.stop)), [])
        for group in coalesce(spans, max_gap_bytes=_MAX_GAP_BYTES).groups
        for start in range(group.start, group.stop, step)
    ]
    first = 0
    for target in ordered:
        while requests[first][0].stop <= target.start:
            first += 1
        index = first
        while index < len(requests) and requests[index][0].start < target.stop:
            requests[index][1].append(target)
            index += 1
    return requests


def submit_reads(source: VerifiedObject, targets: Sequence[ReadTarget]) -> list[Future[None]]:
    """Start to fill all targets from one file, on the store's threads."""
    return [source.store.submit_part(_read_range, source, *request) for request in plan_requests(source, targets)]


def read_bytes(source: VerifiedObject, start: int, stop: int) -> bytes:
    """Return the bytes `[start, stop)` of a file."""
    data = np.empty(stop - start, np.uint8)
    read_targets(source, [ReadTarget(start, data)])
    return data.tobytes()


def view_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the memory of a contiguous CPU tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def read_targets(source: VerifiedObject, targets: Sequence[ReadTarget]) -> None:
    """Fill all targets from one file."""
    futures = submit_reads(source, targets)
    try:
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()


def _read_range(source: VerifiedObject, span: Span, targets: Sequence[ReadTarget]) -> None:
    first = targets[0]
    if len(targets) == 1 and first.start <= span.start and span.stop <= first.stop:  # read straight into the target
        source.read_into(span.start, first.target[span.start - first.start : span.stop - first.start])
        return
    data = source.read_span(span)
    for target in targets:
        low, high = max(target.start, span.start), min(target.stop, span.stop)
        target.target[low - target.start : high - target.start] = data[low - span.start : high - span.start]
