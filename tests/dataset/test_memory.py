"""The documented bound: a stream holds its read-ahead and one sample, for objects of any size."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import Bucket
from voxlane.testing import Emulator

MIB = 1 << 20
PROGRAM = """
import resource, sys
from voxlane import IterableDataset, StoreConfig
config = StoreConfig(endpoint=sys.argv[1])
list(IterableDataset("gs://bkt/small/", config=config))  # imports, threads and connections are not the stream's
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for body in IterableDataset("gs://bkt/large/", config=config, read_ahead_bytes=int(sys.argv[2])):
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_reading_large_objects_stays_within_the_bound(gcs: Bucket, emulator: Emulator) -> None:
    size, read_ahead = 48 * MIB, 64 * MIB
    emulator.fill("bkt", count=64, key="small/{:03d}", size_bytes=1000)
    emulator.fill("bkt", count=12, key="large/{:03d}", size_bytes=size)
    command = [sys.executable, "-c", PROGRAM, emulator.url, str(read_ahead)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=400).stdout)
    # Besides the stream there is the sample in the loop, and bodies that are being received.
    in_flight = 8 * 8 * MIB
    assert grown < read_ahead + 2 * size + in_flight
