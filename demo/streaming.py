"""Stream whole objects as a PyTorch dataset, for data that needs no preparation, such as small scans.

The demo starts the local GCS emulator with 20 ms added to each request, uploads small scans with labels, lists them,
streams them through a DataLoader with and without voxlane, stops in mid-epoch, resumes from a checkpoint in the bucket
with another number of workers, and draws a batch.
"""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import time
from pathlib import Path
from typing import Any

import matplotlib
import nibabel as nib
import numpy as np
import torch
import torch.utils.data
from tqdm import tqdm

from voxlane import Checkpoint, DataLoader, IterableDataset, Manifest, MapDataset, Store, StoreConfig, list_objects
from voxlane.checkpoint import latest
from voxlane.testing import Emulator, Faults

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LATENCY_S = 0.02


def synthetic_scan(case: int, shape: tuple[int, int, int] = (48, 48, 32)) -> tuple[bytes, bytes]:
    """Return a scan with two bright ellipsoids in noise, and its label, as compressed NIfTI."""
    rng = np.random.default_rng(case)
    grid = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij"))
    label = np.zeros(shape, np.uint8)
    for value in (1, 2):
        centre = rng.uniform(-0.45, 0.45, 3)[:, None, None, None]
        radii = rng.uniform(0.18, 0.4, 3)[:, None, None, None]
        label[(((grid - centre) / radii) ** 2).sum(0) < 1] = value
    image = (100 * label + 40 * grid[0] + rng.normal(0, 15, shape)).astype(np.int16)
    return to_nifti(image), to_nifti(label)


def to_nifti(volume: np.ndarray[Any, Any]) -> bytes:
    """Return a volume as the bytes of a .nii.gz file with voxels of 1 x 1 x 2 mm."""
    return gzip.compress(nib.Nifti1Image(volume, np.diag([1.0, 1.0, 2.0, 1.0])).to_bytes(), 1)


def from_nifti(body: bytes) -> torch.Tensor:
    """Decode the bytes of a .nii.gz object to a tensor (width, height, depth)."""
    image = nib.Nifti1Image.from_stream(io.BytesIO(gzip.decompress(body)))
    return torch.from_numpy(np.asarray(image.dataobj, dtype=np.float32))


def upload(config: StoreConfig, cases: int) -> None:
    """Write the scans to the bucket, concurrently."""
    store = Store("gs://demo", config)
    futures = []
    for case in tqdm(range(cases), desc="making and uploading scans", unit="case"):
        image, label = synthetic_scan(case)
        futures.append(store.submit(store.put, f"scans/images/case_{case:04d}.nii.gz", image))
        futures.append(store.submit(store.put, f"scans/labels/case_{case:04d}.nii.gz", label))
    for future in futures:
        future.result()


def pairs(style: type[Any], config: StoreConfig, manifests: dict[str, Manifest], **options: Any) -> Any:
    """Return a dataset of images and labels, matched by name."""
    parts = {name: style(manifest, decode=from_nifti, config=config, **options) for name, manifest in manifests.items()}
    return style.zip(**parts)


class OneByOne(torch.utils.data.Dataset[Any]):
    """A dataset without a connector: each sample reads its two objects one after the other."""

    def __init__(self, config: StoreConfig, manifests: dict[str, Manifest]) -> None:
        self.store = Store("gs://demo", config)
        self.manifests = manifests

    def __len__(self) -> int:
        return len(self.manifests["image"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: from_nifti(bytes(self.store.get(m[index].key))) for name, m in self.manifests.items()}


def epoch_seconds(loader: Any, expected: int, description: str) -> float:
    """Run one epoch, check that it yields every sample, and return its seconds."""
    start = time.monotonic()
    received = sum(
        len(batch["image"]) for batch in tqdm(loader, desc=description, unit="batch", total=-(-expected // 8))
    )
    assert received == expected, f"{description}: {received} of {expected} samples"
    return time.monotonic() - start


def draw(batch: dict[str, torch.Tensor], path: Path) -> None:
    """Draw a row of scans and a row of scans with labels, at the slices with the most labelled voxels."""
    count = min(6, len(batch["image"]))
    figure, axes = plt.subplots(2, count, figsize=(2 * count, 4.8), squeeze=False, layout="constrained")
    for column in range(count):
        depth = int((batch["label"][column] > 0).sum((0, 1)).argmax())
        image, label = (batch[k][column][:, :, depth] for k in ("image", "label"))
        for row in range(2):
            axes[row][column].imshow(image.T, cmap="gray", origin="lower")
            axes[row][column].axis("off")
        overlay = np.ma.masked_equal(label.T.numpy(), 0)
        axes[1][column].imshow(overlay, cmap="autumn", origin="lower", alpha=0.6, vmin=1, vmax=2)
    axes[0][0].set_title("scan", loc="left")
    axes[1][0].set_title("scan and label", loc="left")
    figure.suptitle("A batch streamed from gs://demo/scans (shuffled)")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the demo and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=240, help="scans to make (default 240)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out/streaming"), help="folder for the picture and the manifest"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    with Emulator() as server:
        server.create_bucket("demo")
        config = StoreConfig(endpoint=server.url)
        upload(config, options.cases)
        run(server, config, options.cases, options.out)


def run(server: Emulator, config: StoreConfig, cases: int, out: Path) -> None:
    """List the scans, stream them, resume from a checkpoint and draw a batch."""
    server.set_faults(Faults(latency_s=LATENCY_S))
    print(f"\n1. list: the bucket answers after {LATENCY_S * 1000:.0f} ms, like a bucket in the cloud")
    manifests = {
        name: list_objects(f"gs://demo/scans/{name}s/", match="*.nii.gz", config=config) for name in ("image", "label")
    }
    manifests["image"].save(str(out / "images.parquet"))
    print(f"   {manifests['image']}\n   saved to {out / 'images.parquet'}")

    print("\n2. stream: one epoch over image and label pairs, two workers, batches of 8")
    slow = torch.utils.data.DataLoader(OneByOne(config, manifests), batch_size=8, num_workers=2)
    slow_s = epoch_seconds(slow, cases, "   object by object")
    dataset = pairs(MapDataset, config, manifests, shuffle=True, seed=1)
    map_s = epoch_seconds(DataLoader(dataset, 8, num_workers=2), cases, "   MapDataset      ")
    stream = pairs(IterableDataset, config, manifests, shuffle=True, seed=1)
    stream_s = epoch_seconds(DataLoader(stream, 8, num_workers=2), cases, "   IterableDataset ")
    print(f"   object by object {slow_s:.2f} s, map-style {map_s:.2f} s ({slow_s / map_s:.1f}x), ", end="")
    print(f"iterable-style {stream_s:.2f} s ({slow_s / stream_s:.1f}x)")
    print(f"   traffic: {dataset.traffic()}")

    print("\n3. resume: stop after 7 batches with 2 workers, go on from a checkpoint in the bucket with 1 worker")
    first = DataLoader(pairs(MapDataset, config, manifests, shuffle=True, seed=2), 8, num_workers=2)
    before = sum(len(batch["image"]) for batch in itertools.islice(first, 7))
    model = torch.nn.Conv3d(1, 3, 3)
    checkpoints = Checkpoint("gs://demo/runs/first", config)
    checkpoints.save({"model": model.state_dict(), "loader": first.state_dict()}, "step-7.ckpt")
    try:
        with checkpoints.writer("step-8.ckpt") as file:
            torch.save(model.state_dict(), file)
            raise InterruptedError("the job is stopped while it saves")
    except InterruptedError as error:
        print(f"   {error}: step-8.ckpt is not published")
    newest = latest("gs://demo/runs/first", config)
    print(f"   resuming from {newest.uri}")
    saved = checkpoints.load(newest.name)
    model.load_state_dict(saved["model"])
    second = DataLoader(pairs(MapDataset, config, manifests, shuffle=True, seed=2), 5, num_workers=1)
    second.load_state_dict(saved["loader"])
    rest = sum(len(batch["image"]) for batch in second)
    print(f"   {before} samples before, {rest} after, {cases} in all")
    assert before + rest == cases

    print("\n4. draw a batch")
    batch = next(iter(DataLoader(pairs(MapDataset, config, manifests, shuffle=True, seed=3), 6)))
    draw(batch, out / "batch.png")
    print(f"   {out / 'batch.png'}")


if __name__ == "__main__":
    main()
