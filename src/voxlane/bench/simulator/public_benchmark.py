"""The table of the public benchmark, the rates fitted to it, and the cost of a sample there and in voxlane.

Source: GoogleCloudPlatform/dataflux-pytorch, demo/lightning/image-segmentation/README.md, "Benchmark Results", and the
demo's code beside it. Nodes are n2-standard-32, each with one device, batches of 32, 16 DataLoader workers that
prefetch 2 batches each, 2 epochs, and a sleep for a step. The dataset is 105,000 images of "about 150 MB" with labels.

The size of a label follows from the table: egress divided by requests is 92 to 95 MB in its first rows, which is the
mean of a float32 image of 150 MB and a uint8 label of a quarter of that. A worker of the demo downloads all images of
its batch, one after the other, and then all labels. Labels are small enough for two to be composed, but then a request
would have been 75 MB or 125 MB, so they apparently were not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from voxlane.bench.simulator.model import Latency, Round, Work

SOURCE = "GoogleCloudPlatform/dataflux-pytorch, demo/lightning/image-segmentation/README.md"
VOLUMES = 105_000
IMAGE_BYTES = 150e6
LABEL_BYTES = 37.5e6
BATCH = 32
WORKERS = 16
PREFETCH = 2
STEP_TIME_S = 1.0
CORES = 32
LINK_GBPS = 32.0
"""Bandwidth of n2-standard-32 without Tier 1 networking, according to Google."""
STEP_S = (3.0, 10.0)
"""Observed step times, "longer with more nodes"."""


@dataclass(frozen=True)
class PublicRow:
    """One line of the table: the highest egress and request rate of the bucket in each epoch."""

    nodes: int
    steps: int
    """Steps per node and epoch."""
    gbps: tuple[float, float]
    requests_per_s: tuple[float, float]

    @property
    def mean_gbps(self) -> float:
        """Mean egress over both epochs."""
        return sum(self.gbps) / len(self.gbps)


TABLE = (
    PublicRow(32, 102, (454.2, 503.8), (619, 692)),
    PublicRow(64, 51, (1032, 1067), (1358, 1458)),
    PublicRow(128, 25, (1844, 1261), (2439, 1879)),
    PublicRow(256, 12, (1950, 1832), (2648, 2220)),
    PublicRow(512, 6, (1907, 1820), (2855, 2133)),
    PublicRow(1024, 3, (1823, 2122), (3286, 2710)),
)
FIRST = TABLE[0]
PLATEAU = TABLE[3:]

PATCH_BYTES = 3_161_334.0
PATCH_REQUESTS = 8.975
PATCH_CPU_S = 0.035
"""Cost of a 128-cubed patch and its label from a CT of 336 cubed, read at 20 ms without a cache: median of
benchmarks/results/segmentation_loading.json. Requests are those for chunks, without the two for indexes; most are
ranges of one object."""
PREPARED_BYTES = 43.13e6
"""Bytes of a prepared CT of 300 x 512 x 512 and its label: benchmarks/results/patch_readers.json."""
WHOLE_CPU_S_PER_BYTE = 1.57e-9
"""Processor time of voxlane's client for objects of 150 MiB on GCS, in a map-style epoch at 20 ms:
median of benchmarks/results/loading.json."""
FOREGROUND_SHARE = 0.33
INDEX_REQUESTS = 2
"""Requests for the indexes of image and label, for a case that a process has not read before."""


def fit_rates(latency: Latency) -> dict[str, float]:
    """Fit two rates to the table; everything else is settings or prediction.

    stream_bytes_per_s: bytes per second of a worker's connection, including its processor time. The connection waits
        `latency` for each of two objects per sample and then transfers them; 32 nodes x 16 workers of that are the mean
        of the first row.
    bucket_bytes_per_s: bytes per second of the bucket, the mean of the rows from 256 nodes on.
    """
    sample_bytes = IMAGE_BYTES + LABEL_BYTES
    sample_s = sample_bytes * FIRST.nodes * WORKERS / (FIRST.mean_gbps * 1e9 / 8)
    transfer_s = sample_s - 2 * latency.mean_s()
    plateau_gbps = sum(row.mean_gbps for row in PLATEAU) / len(PLATEAU)
    return {
        "stream_bytes_per_s": sample_bytes / transfer_s if transfer_s > 0 else math.inf,
        "bucket_bytes_per_s": plateau_gbps * 1e9 / 8,
    }


def demo_work(batch: int, image_bytes: float, label_bytes: float, cpu_s: float) -> Work:
    """Return a batch as a worker of the demo fetches it: image after image, then label after label. `cpu_s` is the
    processor time of a sample."""
    rounds = *[Round(1, image_bytes)] * batch, *[Round(1, label_bytes)] * batch
    return Work.of(*rounds, cpu_s=cpu_s * batch, samples=batch)


def patch_work(requests: float = PATCH_REQUESTS, size: float = PATCH_BYTES, cpu_s: float = PATCH_CPU_S) -> Work:
    """Return a patch of a volume that the process has not read before, as nearly all are in a large dataset: the
    foreground (for some patches), then the indexes of image and label, then the chunks."""
    rest = (Round(INDEX_REQUESTS, 0.0), Round(requests, size))
    return Work(kinds=((FOREGROUND_SHARE, (Round(1, 0.0), *rest)), (1 - FOREGROUND_SHARE, rest)), cpu_s=cpu_s)
