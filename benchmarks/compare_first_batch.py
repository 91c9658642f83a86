"""Measure the time from the start of a process to its first batch, on a dataset of 105,000 volumes.

`python benchmarks/compare_first_batch.py [--quick]` writes results/first_batch.json. Each measurement starts a fresh
interpreter, as a user's script does. The time starts before the interpreter and ends with the first batch. It is split
into the interpreter, the imports, the listing, building the dataset, and the batch itself. There are two modes:

- patches: a prepared dataset whose table has 105,000 different cases (name, versions, sizes, location of the scan).
  Objects exist only for the cases that the first batches read; the seed determines which these are.
- whole objects: 105,000 images and as many labels in the bucket, found by saved manifests or by a real listing.

The server is our GCS emulator with 20 ms added to every request. The files of Python and its libraries are in the page
cache, because an unmeasured process has read them before.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import isolated_runs
import servers
from voxlane import Store, StoreConfig, list_objects
from voxlane.bench.report import summarize
from voxlane.testing import Emulator, Faults
from voxlane.volume.case_writer import write_case
from voxlane.volume.description import Description
from voxlane.volume.grid import Grid
from voxlane.volume.patch_sampling import case_for_position
from voxlane.volume.plan import Network, Normalisation, Plan
from voxlane.volume.prepare import foreground_voxels
from voxlane.volume.prepared_dataset import PreparedCase, fold_for_patient, publish_dataset

BUCKET = "first-batch"
PREPARED, RAW = "prepared/", "raw/"
VOLUMES = 105_000
LATENCY_S = 0.02
BATCH = 2
PATCH = (128, 128, 128)
SHAPE = (150, 500, 500)
"""Voxels of a volume: 150 MB as float32, as in the public demonstration."""
QUICK_SHAPE = (128, 160, 160)
FOLD, FOLDS, SEED = 0, 5, 0
TOUCHED = 64
"""Number of positions at the start of the epoch whose cases have objects; all workers prefetch fewer."""
LIMIT_S = 120.0
STEPS = ("interpreter", "torch", "voxlane", "listing", "dataset", "first batch")
LIBRARIES = ["voxlane", "torch", "obstore", "pyarrow", "numpy"]


def main() -> None:
    """Measure both modes and write the result file."""
    arguments = _arguments()
    volumes = arguments.volumes or (2_000 if arguments.quick else VOLUMES)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    shape = QUICK_SHAPE if arguments.quick else SHAPE
    facts = isolated_runs.facts(LIBRARIES)
    samples: list[dict[str, Any]] = []
    with servers.emulator(latency_s=0) as server:
        assert server.emulator is not None
        server.emulator.create_bucket(BUCKET)
        store = Store(f"gs://{BUCKET}", StoreConfig(endpoint=server.url))
        table_bytes = fill_prepared(server.emulator, store, volumes, shape)
        manifest_bytes = fill_raw(server.emulator, store, volumes, shape) if "whole-object" in arguments.mode else {}
        server.emulator.set_faults(Faults(latency_s=LATENCY_S))
        ways = [way for way in WAYS if WAYS[way]["mode"] in arguments.mode]
        _first_batch(server, WAYS[ways[0]], volumes)  # fills the page cache
        for turn, way in isolated_runs.interleaved(ways, rounds):
            samples.append({"way": way, "round": turn, **_first_batch(server, WAYS[way], volumes)})
            _print_sample(samples[-1])
    settings = {
        "volumes": volumes,
        "latency_s": LATENCY_S,
        "batch": BATCH,
        "patch": PATCH,
        "shape": shape,
        "rounds": rounds,
        "quick": arguments.quick,
        "table_bytes": table_bytes,
        "manifest_bytes": manifest_bytes,
        "ways": WAYS,
    }
    isolated_runs.save(arguments.out, {**facts, "settings": settings, "summary": summary(samples), "samples": samples})
    if failed := [s for s in samples if "error" in s]:
        sys.exit(f"{len(failed)} measurements failed; first: {failed[0]['error']}")


WAYS: dict[str, dict[str, Any]] = {
    "patches, in the process": {"mode": "patches", "workers": 0},
    "patches, 2 workers": {"mode": "patches", "workers": 2},
    "whole objects, saved manifest, in the process": {"mode": "whole-object", "workers": 0, "manifest": True},
    "whole objects, saved manifest, 2 workers": {"mode": "whole-object", "workers": 2, "manifest": True},
    "whole objects, listed, in the process": {"mode": "whole-object", "workers": 0, "manifest": False},
}


def _first_batch(server: servers.Server, way: dict[str, Any], volumes: int) -> dict[str, Any]:
    """Run one process from its start to its first batch."""
    assert server.emulator is not None
    folder = PREPARED if way["mode"] == "patches" else RAW
    order = {
        **way,
        "uri": f"gs://{BUCKET}/{folder.rstrip('/')}",
        "endpoint": server.url,
        "batch": BATCH,
        "patch": PATCH,
        "fold": FOLD,
        "seed": SEED,
    }
    script = str(Path(__file__).with_name("first_batch_process.py"))
    server.emulator.reset_counters()
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, script, json.dumps(order)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:500]}
    answer = json.loads(done.stdout)
    if tuple(answer["shape"][-3:]) != PATCH or answer["shape"][0] != BATCH or answer["std"] < 0.1:
        return {"error": f"unexpected first batch: {answer}"}
    counted = server.emulator.counters()
    marks = dict(answer["marks"])
    times = [started, *(marks[name] for name in STEPS)]
    return {
        "first_batch_s": times[-1] - started,
        "after_imports_s": times[-1] - marks["voxlane"],
        "steps_s": {name: b - a for name, a, b in zip(STEPS, times, times[1:], strict=False)},
        "epoch_samples": answer["samples"],
        "server_requests": counted.requests,
        "server_bytes": counted.bytes_out,
    }


# -- data --------------------------------------------------------------------------------------------------------------


def fill_prepared(emulator: Emulator, store: Store, volumes: int, shape: Sequence[int]) -> int:
    """Write a prepared dataset of `volumes` cases and return the size of its table in bytes."""
    codes, label = _volume(shape)
    written = write_case(
        store,
        f"{PREPARED}model.zarr",
        image=codes[None],
        label=label,
        foreground=foreground_voxels(label, "model"),
        attributes={},
        patch=PATCH,
    )
    cases = [_case(number, written, shape) for number in range(volumes)]
    # The cases that the first workers of the first epoch read get the model's objects and their versions.
    rows = [number for number, case in enumerate(cases) if case.fold != FOLD]
    places = [case_for_position(p, cases=len(rows), samples=len(rows), seed=SEED, epoch=0) for p in range(TOUCHED)]
    for number in sorted({rows[place] for place in places}):
        case = cases[number]
        cases[number] = PreparedCase(
            case.id, case.patient, case.fold, case.source, {**case.volume, "objects": written["objects"]}
        )
        for name, *_ in written["objects"]:
            model = f"{PREPARED}model.zarr/{name}"
            emulator.fill(BUCKET, 1, key=PREPARED + "cases/case_{:06d}.zarr/" + name, first=number, like=model)
    publish_dataset(
        store,
        PREPARED,
        description=Description(name="first batch", channels=("CT",), labels={"background": 0, "organ": 1}),
        plan=Plan(
            spacing=(1.0, 1.0, 1.0),
            normalisation=(Normalisation(scheme="ct", lower=-79, upper=304, mean=101, std=76.9),),
            patch=PATCH,
            batch=BATCH,
            network=Network(),
        ),
        fingerprint={},
        source={"uri": "gs://scans", "layout": "kits19", "excluded": []},
        folds=FOLDS,
        cases=cases,
    )
    header = json.loads(bytes(store.get(f"{PREPARED}prepared.json")))
    return len(bytes(store.get(PREPARED + header["cases"])))


def _case(number: int, written: dict[str, Any], shape: Sequence[int]) -> PreparedCase:
    """Return a case as `prepare` would record it, with its own scan, sizes and versions."""
    chance = random.Random(number)
    name = f"case_{number:06d}"
    spacing = (round(chance.uniform(0.7, 3.0), 4), *[round(chance.uniform(0.6, 0.95), 6)] * 2)
    z, y, x = shape
    grid = Grid((z, y, x), spacing, (0, 0, 0), (z, y, x), (z, y, x), (1.0, 1.0, 1.0), (0, 0, 0), (z, y, x))
    origin = [round(chance.uniform(-300, 300), 4) for _ in range(3)]
    affine = [[-spacing[2], 0.0, 0.0, origin[0]], [0.0, -spacing[1], 0.0, origin[1]], [0.0, 0.0, spacing[0], origin[2]]]
    affine.append([0.0, 0.0, 0.0, 1.0])
    volume = {
        **written,
        "objects": [
            [n, int(size * chance.uniform(0.5, 1)), f"{chance.getrandbits(128):032x}", chance.getrandbits(32), None]
            for n, size, *_ in written["objects"]
        ],
        "case": name,
        "grid": asdict(grid),
        "geometry": {"shape": list(shape), "affine": affine},
        "affine": affine,
        "spacing": [1.0, 1.0, 1.0],
        "scale_factor": [1 / 76.9],
        "add_offset": [-101 / 76.9],
    }
    source = {"images": [f"gs://scans/{name}/imaging.nii.gz"], "label": f"gs://scans/{name}/segmentation.nii.gz"}
    return PreparedCase(name, name, fold_for_patient(name, FOLDS), source, volume)


def fill_raw(emulator: Emulator, store: Store, volumes: int, shape: Sequence[int]) -> dict[str, int]:
    """Write `volumes` images and labels as .npy and their manifests; return the sizes of the manifests in bytes."""
    codes, label = _volume(shape)
    manifest_bytes = {}
    for name, array in (("image", codes.astype(np.float32)), ("label", label)):
        file = io.BytesIO()
        np.save(file, array)
        model = f"models/{name}.npy"
        emulator.put(BUCKET, model, file.getvalue())
        emulator.fill(BUCKET, volumes, key=RAW + name + "s/case_{:06d}.npy", like=model)
        uri = f"gs://{BUCKET}/{RAW}manifests/{name}s.parquet"
        list_objects(f"gs://{BUCKET}/{RAW}{name}s/", store=store).save(uri, store.config)
        manifest_bytes[name] = store.head(f"{RAW}manifests/{name}s.parquet").size
    return manifest_bytes


def _volume(shape: Sequence[int]) -> tuple[Any, Any]:
    """Return a CT-like volume in Hounsfield units and its label (Z, Y, X): a noisy body with an organ."""
    generator = np.random.default_rng(SEED)
    z, y, x = (np.linspace(-1, 1, n, dtype=np.float32) for n in shape)
    radius = (z[:, None, None] / 2) ** 2 + y[None, :, None] ** 2 + x[None, None, :] ** 2
    label = ((radius < 0.2) & (radius > 0.05)).astype(np.uint8)
    noise = generator.normal(0, 12, tuple(shape)).astype(np.float32)
    image = np.where(radius < 0.8, 30 + 70 * label + noise, -1000)
    return np.clip(np.rint(image), -79, 304).astype(np.int16), label


# -- results -----------------------------------------------------------------------------------------------------------


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each way."""
    rows = []
    for way in dict.fromkeys(s["way"] for s in samples):
        group = [s for s in samples if s["way"] == way]
        row: dict[str, Any] = {"way": way, **WAYS[way]}
        if errors := [s["error"] for s in group if "error" in s]:
            rows.append({**row, "error": errors[0]})
            continue
        for name in ("first_batch_s", "after_imports_s", "server_requests", "server_bytes"):
            row[name] = summarize([s[name] for s in group])
        row["steps_s"] = {name: summarize([s["steps_s"][name] for s in group]) for name in STEPS}
        row["epoch_samples"] = group[0]["epoch_samples"]
        rows.append(row)
    return rows


def _print_sample(sample: dict[str, Any]) -> None:
    result_text = sample.get("error")
    if result_text is None:
        steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in sample["steps_s"].items())
        result_text = f"{sample['first_batch_s']:.2f} s ({steps}), {sample['server_bytes'] / 1e6:.1f} MB"
    print(f"{sample['way']}: {result_text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="use 2,000 small volumes and one round: about a minute")
    parser.add_argument("--rounds", type=int, help="number of measurements of each way")
    parser.add_argument("--volumes", type=int, help=f"number of volumes (default {VOLUMES:,})")
    parser.add_argument("--mode", action="append", choices=["patches", "whole-object"], help="measure only this mode")
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "first_batch.json")
    parsed = parser.parse_args()
    parsed.mode = parsed.mode or ["patches", "whole-object"]
    return parsed


if __name__ == "__main__":
    main()
