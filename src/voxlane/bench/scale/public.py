"""The public table, and what we measured of patches, as data.

Source: GoogleCloudPlatform/dataflux-pytorch, demo/lightning/image-segmentation/README.md, "Benchmark Results", and the
demo's code beside it. Nodes are n2-standard-32, each with one device, batches of 32, 16 DataLoader workers that
prefetch 2 batches each, 2 epochs, and a sleep for a step. The dataset is 105,000 images of "about 150 MB" with labels.

What the table does not say, we take from it: egress divided by requests is 92 to 95 MB in its first rows, which is what
a float32 image of 150 MB and its uint8 label of a quarter of that come to. A worker of the demo downloads all images of
its batch, one after the other, and then all labels. Labels are small enough for two to be composed, but then a request
would have been 75 MB or 125 MB, so it seems they were not.
"""

from __future__ import annotations

from dataclasses import dataclass

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
"""What Google gives for n2-standard-32 without Tier 1 networking."""
STEP_S = (3.0, 10.0)
"""Observed step times, "longer with more nodes"."""


@dataclass(frozen=True)
class Row:
    """One line of the table: the highest egress and request rate seen on the bucket, in each epoch."""

    nodes: int
    steps: int
    """A node and epoch."""
    gbps: tuple[float, float]
    requests_per_s: tuple[float, float]

    @property
    def mean_gbps(self) -> float:
        """Over both epochs."""
        return sum(self.gbps) / len(self.gbps)


TABLE = (
    Row(32, 102, (454.2, 503.8), (619, 692)),
    Row(64, 51, (1032, 1067), (1358, 1458)),
    Row(128, 25, (1844, 1261), (2439, 1879)),
    Row(256, 12, (1950, 1832), (2648, 2220)),
    Row(512, 6, (1907, 1820), (2855, 2133)),
    Row(1024, 3, (1823, 2122), (3286, 2710)),
)
FIRST = TABLE[0]
PLATEAU = TABLE[3:]

PATCH_BYTES = 3_161_334.0
PATCH_REQUESTS = 8.975
PATCH_CPU_S = 0.035
"""Of a 128-cubed patch and its label from a CT of 336 cubed, read at 20 ms without a cache: median of
benchmarks/results/segmentation_loading.json. Requests are those for chunks, without the two for indexes; most are
ranges of one object."""
PREPARED_BYTES = 43.13e6
"""Of a CT of 300 x 512 x 512 and its label, prepared: benchmarks/results/patch_readers.json."""
WHOLE_CPU_S_PER_BYTE = 2.95e-9
"""Of our own client, reading objects of 150 MiB: median of benchmarks/results/loading.json."""
FOREGROUND_SHARE = 0.33
INDEX_REQUESTS = 2
