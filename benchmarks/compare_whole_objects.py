"""Compare patches with whole objects, using `voxlane bench loading`.

`python benchmarks/compare_whole_objects.py [--quick] [--ct SCAN.nii.gz] [--label LABEL.nii.gz]` writes
results/segmentation_loading.json. One process reads volumes of 152 MB (float32 .npy) with labels of 38 MB, as in the
public segmentation demo, and the dataset prepared from them on the same grid. The emulator delays every request by
20 ms and counts the bytes that it sends. There is no training step, so the figures are the loader's speed. The cases
without a cache, with an empty cache and with a filled one take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isolated_runs
import medical_loader_data
import servers
from voxlane.testing import Faults

BUCKET = "volumes"
LATENCY_S = 0.02


@dataclass(frozen=True)
class Volumes:
    """Volumes of one size, raw and prepared, in the bucket."""

    name: str
    side: int
    count: int
    patch: int

    @property
    def raw(self) -> str:
        """URI of the .npy pairs."""
        return f"gs://{BUCKET}/{self.name}/raw"

    @property
    def prepared(self) -> str:
        """URI of the prepared dataset."""
        return f"gs://{BUCKET}/{self.name}/prepared"


BIG = Volumes("150mb", side=336, count=8, patch=128)
QUICK = Volumes("20mb", side=160, count=3, patch=64)


def main() -> None:
    """Make the data, run the benchmark and write the result file."""
    arguments = _arguments()
    volumes = QUICK if arguments.quick else BIG
    steps, epochs = (4, 1) if arguments.quick else (40, 3)
    with tempfile.TemporaryDirectory(prefix="voxlane-bench-") as folder, servers.emulator(latency_s=0) as server:
        assert server.emulator is not None
        server.emulator.create_bucket(BUCKET)
        paths = [str(path.resolve()) if path else "" for path in (arguments.ct, arguments.label)]
        write(server, Path(folder), volumes, *paths)
        server.emulator.set_faults(Faults(latency_s=LATENCY_S))
        words = [volumes.raw, volumes.prepared, "--patch", str(volumes.patch), "--step-time", "0"]
        words += ["--foreground-share", "0", "--steps", str(steps), "--epochs", str(epochs), "--prefetch", "4"]
        words += [word for kind in ("none", "cold", "warm") for word in ("--cache", kind)]
        bench(server.url, words, folder, arguments)


def write(server: servers.Server, folder: Path, volumes: Volumes, ct: str, label: str) -> None:
    """Make the volumes below `folder` and upload both formats to the bucket."""
    assert server.emulator is not None
    target = str(folder / volumes.name)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        numbers = range(volumes.count)
        for future in [
            pool.submit(medical_loader_data.make_source, target, i, volumes.side, ct, label) for i in numbers
        ]:
            future.result()
        for future in [pool.submit(medical_loader_data.write_raw, target, i) for i in numbers]:
            future.result()
        root = volumes.prepared.replace("gs://", "s3://")  # the emulator's S3 interface, which accepts access keys
        prepared = [
            pool.submit(medical_loader_data.write_prepared, target, i, root, server.url, volumes.patch) for i in numbers
        ]
        medical_loader_data.publish_prepared(root, server.url, volumes.patch, [future.result() for future in prepared])
    for path in sorted(Path(target, "raw").rglob("*.npy")):
        server.emulator.put(BUCKET, f"{volumes.name}/{path.relative_to(target)}", path.read_bytes())


def bench(endpoint: str, words: Sequence[str], cache: str, arguments: argparse.Namespace) -> None:
    """Run the command as a user does, and remove this machine's name from its result."""
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    quiet = {"STORAGE_EMULATOR_HOST": endpoint, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "voxlane", "bench", "loading", *words, "--cache-dir", cache, "--out", str(out)]
    print(f"voxlane bench loading {' '.join(words)}", flush=True)
    subprocess.run(command, env={**os.environ, **quiet}, check=True)
    isolated_runs.hide_host(out)
    result: dict[str, Any] = json.loads(out.read_text())
    result["volume"] = "a real CT, repeated" if arguments.ct else "synthetic"
    out.write_text(json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use small volumes and few steps: about a minute")
    parser.add_argument("--ct", type=Path, help="CT scan (NIfTI) to build the volumes from")
    parser.add_argument("--label", type=Path, help="label (NIfTI, slices first) to build the labels from")
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "segmentation_loading.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
