"""Load one batch as a user's process does and record the time of each step; started by compare_first_batch.py.

The argument is a JSON object. The output is one, too: `marks`, a list of [name, time.monotonic()], and a description of
the batch. Imports are inside functions because they are timed.
"""

# ruff: noqa: E402
from __future__ import annotations

import time

_INTERPRETER = time.monotonic()

import json
import sys
from typing import Any

marks: list[tuple[str, float]] = [("interpreter", _INTERPRETER)]


def main() -> None:
    """Load one batch and print the times of all steps."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    import torch.utils.data

    _mark("torch")
    loader = _patches(order) if order["mode"] == "patches" else _whole_objects(order)
    _mark("dataset")
    batch = next(iter(loader))
    _mark("first batch")
    image: torch.Tensor = batch["image"]
    result = {"marks": marks, "shape": list(image.shape), "std": float(image.std()), "samples": loader.dataset_length}
    print(json.dumps(result), flush=True)
    sys.stdout.close()
    import os

    os._exit(0)  # prefetched batches are not needed


def _mark(name: str) -> None:
    marks.append((name, time.monotonic()))


def _patches(order: dict[str, Any]) -> Any:
    from voxlane import DataLoader, PatchStream, Prepared, StoreConfig

    _mark("voxlane")
    prepared = Prepared.load(order["uri"], StoreConfig(endpoint=order["endpoint"]))
    _mark("listing")
    rows, _ = prepared.split(order["fold"])
    patches = PatchStream(prepared, rows, samples=len(rows), patch=tuple(order["patch"]), seed=order["seed"])
    loader = DataLoader(patches, batch_size=order["batch"], num_workers=order["workers"])
    loader.dataset_length = patches.num_samples()  # type: ignore[attr-defined]
    return loader


def _whole_objects(order: dict[str, Any]) -> Any:
    from voxlane import DataLoader, Manifest, MapDataset, StoreConfig, list_objects

    _mark("voxlane")
    config = StoreConfig(endpoint=order["endpoint"])
    named = {name: order["uri"] + f"/{name}s/" for name in ("image", "label")}
    if order["manifest"]:
        listed = {name: Manifest.load(f"{order['uri']}/manifests/{name}s.parquet", config) for name in named}
    else:
        listed = {name: list_objects(uri, config=config) for name, uri in named.items()}
    _mark("listing")
    crop = _Crop(tuple(order["patch"]), order["seed"])
    parts = {
        name: MapDataset(manifest, decode=crop, config=config, shuffle=True, seed=order["seed"])
        for name, manifest in listed.items()
    }
    pairs = MapDataset.zip(**parts)
    loader = DataLoader(pairs, batch_size=order["batch"], num_workers=order["workers"])
    loader.dataset_length = len(pairs)  # type: ignore[attr-defined]
    return loader


class _Crop:
    """Decodes a .npy file to a crop at a position that depends on its size and a seed."""

    def __init__(self, patch: tuple[int, ...], seed: int) -> None:
        self._patch, self._seed = patch, seed

    def __call__(self, body: bytes) -> Any:
        import io

        import numpy as np
        import torch

        volume = np.load(io.BytesIO(body))
        random = np.random.default_rng(self._seed)
        start = [int(random.integers(0, n - p + 1)) for n, p in zip(volume.shape, self._patch, strict=True)]
        cut = tuple(slice(a, a + p) for a, p in zip(start, self._patch, strict=True))
        return torch.from_numpy(np.ascontiguousarray(volume[cut]))


if __name__ == "__main__":
    main()
