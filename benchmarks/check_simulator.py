"""Check `voxlane bench simulate` against runs of `voxlane bench loading` with 1, 2 and 4 processes and five servers.

`python benchmarks/check_simulator.py [--quick]` makes small scans and measures loading them from our emulator with
different delays and limits. It writes results/simulator/*.json, one file per run, and results/simulator.json, which
compares the simulator with them. The servers are slower than this machine, so that runs mostly wait, which the
simulator models, and do not depend on the processors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np

from isolated_runs import RESULTS, hide_host
from voxlane.testing import Emulator, Faults
from voxlane.volume.prepare import PrepareConfig, prepare

BUCKET = "simulator"
SHAPE = (96, 112, 112)
PATCH = (64, 64, 64)
CASES = 12
RANKS = (1, 2, 4)
SERVERS: dict[str, tuple[Faults, float]] = {
    "latency": (Faults(latency_s=0.05), 0.1),
    "jitter": (Faults(latency_s=0.05, jitter_s=0.1), 0.02),
    "connection": (Faults(latency_s=0.05, bandwidth_bytes_per_s=10e6), 0.1),
    "bandwidth": (Faults(latency_s=0.03, total_bandwidth_bytes_per_s=50e6), 0.05),
    "requests": (Faults(latency_s=0.03, requests_per_s=60), 0.05),
}
"""Faults of the server and the seconds of a step, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all runs and compare them with the simulator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="measure two servers with 1 and 2 processes and fewer steps"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (default benchmarks/results)")
    options = parser.parse_args(arguments)
    runs = options.out / "simulator"
    runs.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"the machine is already busy (load {load:.1f}): steps will take longer", file=sys.stderr)
    servers, ranks = (["latency", "bandwidth"], (1, 2)) if options.quick else (list(SERVERS), RANKS)
    with tempfile.TemporaryDirectory(prefix="voxlane-simulator-") as folder, Emulator() as emulator:
        emulator.create_bucket(BUCKET)
        os.environ["STORAGE_EMULATOR_HOST"] = emulator.url
        make(Path(folder), emulator)
        written = [
            measured(emulator, name, count, runs, steps=6 if options.quick else 30 // count + 8)
            for count in ranks
            for name in servers
        ]
    command = [sys.executable, "-m", "voxlane", "bench", "simulate", "--check", *map(str, written)]
    return subprocess.call([*command, "--out", str(options.out / "simulator.json")])


def measured(emulator: Emulator, name: str, ranks: int, folder: Path, *, steps: int) -> Path:
    """Measure raw and prepared scans in turns; return the result file."""
    faults, step_s = SERVERS[name]
    out = folder / f"{name}-{ranks}.json"
    words = [f"gs://{BUCKET}/raw", f"gs://{BUCKET}/prepared", "--ranks", str(ranks), "--steps", str(steps)]
    words += ["--step-time", str(step_s), "--patch", str(PATCH[0]), "--epochs", "3", "--no-plot", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    emulator.set_faults(faults)
    try:
        subprocess.run([sys.executable, "-m", "voxlane", "bench", "loading", *words], check=True, env=environment)
    finally:
        emulator.clear_faults()
    hide_host(out)
    return out


def make(folder: Path, emulator: Emulator) -> None:
    """Make scans of noise with a bright block, raw as in the public demo (.npy, float32 and uint8) and prepared."""
    rng = np.random.default_rng(0)
    raw, scans = folder / "raw", folder / "scans"
    for path in (raw / "images", raw / "labels", scans):
        path.mkdir(parents=True)
    cases = []
    for number in range(CASES):
        label = np.zeros(SHAPE, np.uint8)
        label[tuple(slice(n // 3, n // 2) for n in SHAPE)] = 1
        image = (rng.normal(0, 60, SHAPE) + 200 * label).astype(np.int16)
        name = f"case_{number:02}"
        np.save(raw / "images" / f"{name}.npy", image[None].astype(np.float32))
        np.save(raw / "labels" / f"{name}.npy", label[None])
        for suffix, array in (("", image), ("-label", label)):
            scan = nibabel.Nifti1Image(array.transpose(2, 1, 0), np.diag([-1.0, -1.0, 1.0, 1.0]))
            nibabel.save(scan, scans / f"{name}{suffix}.nii")
        cases.append({"id": name, "image": f"{name}.nii", "label": f"{name}-label.nii"})
    description = {"name": "Blocks", "channels": ["CT"], "labels": {"background": 0, "block": 1}}
    (scans / "list.json").write_text(json.dumps({"description": description, "cases": cases}))
    network = {"features": (32, 64, 128), "strides": [[1, 1, 1], *[[2, 2, 2]] * 2], "kernels": [[3, 3, 3]] * 3}
    plan = {"patch": PATCH, "batch": 2, "spacing": (1, 1, 1), "network": network}
    config = PrepareConfig(folds=2, workers=1, plan=plan)
    prepare(str(scans / "list.json"), f"gs://{BUCKET}/prepared", config, progress=False)
    emulator.put_many(BUCKET, {f"raw/{p.relative_to(raw)}": p.read_bytes() for p in raw.rglob("*.npy")})


if __name__ == "__main__":
    sys.exit(main())
