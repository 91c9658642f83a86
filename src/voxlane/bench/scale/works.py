"""What samples cost, of the public demo and of ours, and what is taken from the public table for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from voxlane.bench.scale import public
from voxlane.bench.scale.model import Latency, Round, Work


@dataclass(frozen=True)
class Fit:
    """What was taken from the table; all else is settings or prediction."""

    stream_bytes_per_s: float
    """What one worker's connection gets, its processor time included: from the 32-node row, the mean of its epochs."""
    bucket_bytes_per_s: float
    """What the bucket gives: the mean of the rows from 256 nodes on."""


def fit(latency: Latency) -> Fit:
    """The two numbers that the table is asked for. A worker's stream waits `latency` for each of two objects a sample
    and then moves them, and 32 nodes x 16 workers of that are the first row."""
    sample_bytes = public.IMAGE_BYTES + public.LABEL_BYTES
    sample_s = sample_bytes * public.FIRST.nodes * public.WORKERS / (public.FIRST.mean_gbps * 1e9 / 8)
    moving_s = sample_s - 2 * latency.mean_s()
    plateau_gbps = sum(row.mean_gbps for row in public.PLATEAU) / len(public.PLATEAU)
    return Fit(sample_bytes / moving_s if moving_s > 0 else math.inf, plateau_gbps * 1e9 / 8)


def demo_work(
    batch: int = public.BATCH, image_bytes: float = public.IMAGE_BYTES, label_bytes: float = public.LABEL_BYTES
) -> Work:
    """A batch, as a worker of the demo fetches it: image after image, then label after label."""
    return Work.of(*[Round(1, image_bytes)] * batch, *[Round(1, label_bytes)] * batch, samples=batch)


def patch_work(
    *,
    requests: float = public.PATCH_REQUESTS,
    size: float = public.PATCH_BYTES,
    cpu_s: float = public.PATCH_CPU_S,
    foreground_share: float = public.FOREGROUND_SHARE,
) -> Work:
    """A patch of a volume that this process has not read from before, which is what nearly all are in a large dataset:
    around foreground, first where that is; then the indexes of image and label; then the chunks."""
    rest = (Round(public.INDEX_REQUESTS, 0.0), Round(requests, size))
    kinds = [(foreground_share, (Round(1, 0.0), *rest)), (1 - foreground_share, rest)]
    return Work(kinds=tuple(kind for kind in kinds if kind[0] > 0), cpu_s=cpu_s)
