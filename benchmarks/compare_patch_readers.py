"""Compare our reader of patches from prepared volumes with other Zarr libraries and with reading whole files.

`python benchmarks/compare_patch_readers.py [--quick] [--ct SCAN.nii.gz] [--label LABEL.nii.gz]` writes
results/patch_readers.json. Patches of 128 cubed, image and label, are read at random positions of volumes of
512x512x300: from disk, and from our emulator with 0 and 20 ms added to every request, where the server counts bytes and
requests. The volumes are a real CT and label repeated to that size if they are given, otherwise synthetic shapes. Noise
of 5 HU keeps compressors from exploiting the repetition, and intensities are clipped to KiTS19's window. A second part
measures chunk sizes, codecs and the order of chunks; the defaults were chosen from its results.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt

import isolated_runs
import servers
from patch_contenders import CONTENDERS, IN_FLIGHT, THREADS, Corner, read_patches
from voxlane import Store, StoreConfig
from voxlane.bench.report import summarize
from voxlane.store.ranges import Span, coalesce
from voxlane.testing import Faults
from voxlane.volume.case_writer import write_arrays, write_case
from voxlane.volume.codec import ChunkCodec, image_codecs, label_codecs
from voxlane.volume.zarr_array import ArrayMeta, choose_shard_shape, plan_region, storage_order

SIDE = 128
SHAPE = (300, 512, 512)
WINDOW_HU = (-79, 304)
NOISE_HU = 5.0
BUCKET = "patch-bench"
LIMIT_S = 240.0
WARM_UP = 2
FEWER = {"zarr-python + obstore": 20, "zarrs": 8, "whole .nii.gz": 4}
"""Number of patches of slow contenders."""
LATENCIES_S = (0.0, 0.02)
GAPS_BYTES = (0, 32 * 1024, 128 * 1024)
Volume = npt.NDArray[np.int16]
Label = npt.NDArray[np.uint8]
SWEEP = [(side, "zstd", 3, "shuffle") for side in (32, 48, 64, 96)]
SWEEP += [(32, "zstd", 5, "shuffle"), (32, "zstd", 3, "bitshuffle"), (32, "lz4", 5, "shuffle")]
LIBRARIES = ["voxlane", "obstore", "zarr", "zarrs", "tensorstore", "numcodecs", "numpy"]


def main() -> None:
    """Measure all contenders and layouts and write the result file."""
    arguments = _arguments()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    patches = 6 if arguments.quick else 40
    facts = isolated_runs.facts(LIBRARIES)
    image, label = make_volume(arguments.ct, arguments.label)
    corners = draw_corners(patches + WARM_UP)
    own_bytes = [_own_bytes(image, label, corner) for _, corner in corners[WARM_UP:]]
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="voxlane-bench-") as folder, servers.emulator(latency_s=0) as server:
        assert server.emulator is not None
        server.emulator.create_bucket(BUCKET)
        places = {"disk": (f"file://{folder}", ""), "bucket": (f"s3://{BUCKET}/prepared", server.url)}
        metadata = {name: _fill(root, endpoint, image, label) for name, (root, endpoint) in places.items()}
        expected = [_sum(image, label, corner) for _, corner in corners[:WARM_UP]]
        for place, latency_s in [("disk", 0.0), *(("bucket", s) for s in LATENCIES_S)]:
            server.emulator.set_faults(Faults(latency_s=latency_s))
            for turn, contender in isolated_runs.interleaved(arguments.contender or list(CONTENDERS), rounds):
                num_patches = min(patches, FEWER.get(contender, patches))
                work = {
                    "contender": contender,
                    "root": places[place][0],
                    "endpoint": places[place][1],
                    "cases": ["a", "b"],
                    "metadata": metadata[place],
                    "corners": corners[: WARM_UP + num_patches],
                    "side": SIDE,
                    "expected": expected,
                }
                place_key = (place, latency_s, contender)
                before = [s for s in samples if (s["place"], s["latency_s"], s["contender"]) == place_key]
                if any("error" in s for s in before):
                    continue  # a failed contender is not measured again
                samples.append(
                    {
                        "place": place,
                        "latency_s": latency_s,
                        "contender": contender,
                        "round": turn,
                        **_measured(work, server, float(np.mean(own_bytes[:num_patches]))),
                    }
                )
                _print_sample(samples[-1])
        layouts = [] if arguments.no_sweep else SWEEP[:2] if arguments.quick else SWEEP
        sweep = [_layout(image, label, *layout, server.url, corners, own_bytes) for layout in layouts]
        server.emulator.set_faults(Faults(latency_s=LATENCIES_S[-1]))
        for _, name in isolated_runs.interleaved([row["name"] for row in sweep], rounds if sweep else 0):
            row = next(r for r in sweep if r["name"] == name)
            work = {
                "contender": "voxlane",
                "root": f"s3://{BUCKET}/sweep",
                "endpoint": server.url,
                "cases": [name],
                "metadata": [row["metadata"]],
                "corners": [(0, corner) for _, corner in corners],
                "side": SIDE,
                "expected": expected,
            }
            row["samples"].append(_measured(work, server, float(np.mean(own_bytes))))
        sweep = [_layout_summary(row) for row in sweep]
    settings = {
        "shape": SHAPE,
        "patch": SIDE,
        "patches": patches,
        "fewer_patches": FEWER,
        "in_flight": IN_FLIGHT,
        "threads": THREADS,
        "rounds": rounds,
        "quick": arguments.quick,
        "volume": "a real CT, repeated" if arguments.ct else "synthetic",
        "label": "a real label, repeated" if arguments.label else "synthetic",
        "own_bytes": int(np.mean(own_bytes)),
        "object_bytes": {name: size for name, size, *_ in metadata["disk"][0]["objects"]},
    }
    document = {**facts, "settings": settings, "summary": summary(samples), "sweep": sweep, "samples": samples}
    isolated_runs.save(arguments.out, document)
    if failed := [s for s in samples if s["contender"] == "voxlane" and "error" in s]:
        sys.exit(f"{len(failed)} of our own measurements failed; first: {failed[0]['error']}")


def make_volume(ct: Path | None, label: Path | None) -> tuple[Volume, Label]:
    """Return a scan clipped to the window and its label, both (Z, Y, X) of `SHAPE`."""
    random = np.random.default_rng(0)
    if ct is not None:
        scan = _nifti(ct).astype(np.float32).transpose(2, 1, 0)
    else:
        grid = np.ogrid[:128, :128, :128]
        scan = np.full((128, 128, 128), -1000, np.float32)
        for value, radius in ((-90, 58), (50, 52), (20, 30), (120, 20), (300, 6)):
            scan[sum((g - 64.0) ** 2 for g in grid[1:]) + 0 * grid[0] < radius**2] = value
    image = _repeated(scan) + NOISE_HU * random.standard_normal(SHAPE, np.float32)
    image = np.clip(np.rint(image), *WINDOW_HU).astype(np.int16)
    if label is not None:
        return image, _repeated(_nifti(label).astype(np.uint8))
    label_volume = np.zeros(SHAPE, np.uint8)
    grid = np.ogrid[tuple(map(slice, SHAPE))]
    for value, centre, radius in ((1, (150, 256, 150), 50), (1, (150, 256, 360), 48), (2, (140, 240, 170), 18)):
        label_volume[sum((g - c) ** 2 for g, c in zip(grid, centre, strict=True)) < radius**2] = value
    return image, label_volume


def _nifti(path: Path) -> npt.NDArray[Any]:
    import nibabel

    return np.asanyarray(nibabel.load(path).dataobj)


def _repeated(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    inside = array[tuple(map(slice, SHAPE))]
    return np.pad(inside, [(0, n - m) for n, m in zip(SHAPE, inside.shape, strict=True)], mode="wrap")


def draw_corners(count: int) -> list[tuple[int, Corner]]:
    """Draw (case, first voxel) of patches that lie inside the volume, uniformly."""
    random = np.random.default_rng(1)
    low = [tuple(int(random.integers(0, n - SIDE + 1)) for n in SHAPE) for _ in range(count)]
    return [(i % 2, (z, y, x)) for i, (z, y, x) in enumerate(low)]


def _cut(array: npt.NDArray[Any], corner: Corner, side: int = SIDE) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array[tuple(slice(a, a + side) for a in corner)])


def _sum(image: Volume, label: Label, corner: Corner) -> int:
    return int(_cut(image, corner).sum(dtype=np.int64) + _cut(label, corner).sum(dtype=np.int64))


def _own_bytes(image: Volume, label: Label, corner: Corner) -> int:
    """Return the bytes of the patch alone in our format, without index: what a reader would fetch if the volume's
    chunks started at the patch's corner."""
    pair = ((image, 32, image_codecs("int16", (32,) * 3)), (label, 64, label_codecs("uint8")))
    total = 0
    for array, side, codecs in pair:
        codec = ChunkCodec(codecs, str(array.dtype))
        meta = ArrayMeta((SIDE,) * 3, str(array.dtype), (side,) * 3, codecs, (SIDE,) * 3)
        patch = _cut(array, corner)
        pieces = plan_region(meta, (0,) * 3, (SIDE,) * 3)[0, 0, 0]
        total += sum(len(codec.encode(patch[p.target])) for p in pieces if np.any(patch[p.target] != array.flat[0]))
    return total


def _fill(root: str, endpoint: str, image: Volume, label: Label) -> list[dict[str, Any]]:
    """Write two cases as `prepare` does, and their NIfTI files; return the cases' metadata."""
    store = Store(root, StoreConfig(endpoint=endpoint or None, access_key_id="k", secret_access_key="s"))
    key = root.removeprefix(store.root)
    foreground = np.zeros((1, 4), np.int32)
    files = {"imaging": _gzipped(image), "segmentation": _gzipped(label)}
    metadata = []
    for case in ("a", "b"):
        for name, body in files.items():
            store.put(f"{key}/{case}/{name}.nii.gz", body)
        metadata.append(
            write_case(
                store,
                f"{key}/{case}.zarr",
                image=image[None],
                label=label,
                foreground=foreground,
                attributes={},
            )
        )
    return metadata


def _gzipped(array: npt.NDArray[Any]) -> bytes:
    import nibabel

    file = nibabel.Nifti1Image(array.transpose(2, 1, 0), np.eye(4))
    return gzip.compress(file.to_bytes(), compresslevel=6)


def _measured(work: dict[str, Any], server: servers.Server, own_bytes: float) -> dict[str, Any]:
    """Measure once, with the server's bytes and requests per patch; patches of the warm-up count as well."""
    assert server.emulator is not None
    server.emulator.reset_counters()
    sample = isolated_runs.measure(read_patches, work, server, limit_s=LIMIT_S)
    counted = server.emulator.counters()
    if "error" not in sample and work["endpoint"]:
        patches = sample["patches"] + WARM_UP
        sample["bytes_per_patch"] = counted.bytes_out / patches
        sample["requests_per_patch"] = counted.requests / patches
        sample["times_own_bytes"] = sample["bytes_per_patch"] / own_bytes
    return sample


def _layout(
    image: Volume,
    label: Label,
    side: int,
    cname: str,
    level: int,
    shuffle: str,
    endpoint: str,
    corners: Sequence[tuple[int, Corner]],
    own_bytes: Sequence[int],
) -> dict[str, Any]:
    """Write one chunk size and codec; return its size, its codec speed, and the cost of patches by plan."""
    shape, chunk = (1, *SHAPE), (1, side, side, side)
    codecs = image_codecs("int16", chunk, cname=cname, level=level, shuffle=shuffle)
    wide = (2 * side,) * 3 if side < 64 else (side,) * 3
    metas = {
        "image": ArrayMeta(shape, "int16", chunk, codecs, choose_shard_shape(shape, chunk, 2), fill=int(image.flat[0])),
        "label": ArrayMeta(SHAPE, "uint8", wide, label_codecs("uint8"), choose_shard_shape(SHAPE, wide, 1)),
    }
    store = Store(f"s3://{BUCKET}", StoreConfig(endpoint=endpoint, access_key_id="k", secret_access_key="s"))
    name = f"{side}-{cname}-{level}-{shuffle}"
    metadata = write_arrays(store, f"sweep/{name}.zarr", {"image": image[None], "label": label}, metas, {})
    raw = store.get(f"sweep/{name}.zarr/image/c/0/0/0/0", 0, metas["image"].index_bytes - 4)
    cells = np.frombuffer(raw, "<u8").reshape(-1, 2)
    sizes = np.where(cells[:, 0] == 2**64 - 1, 0, cells[:, 1]).astype(np.int64)
    return {
        "name": name,
        "chunk": side,
        "codec": f"{cname} {level}, {shuffle}",
        "metadata": metadata,
        "object_bytes": {key: size for key, size, *_ in metadata["objects"]},
        **_codec_speed(image, side, ChunkCodec(codecs, "int16")),
        "by_plan": _by_plan(metas["image"], sizes, [corner for _, corner in corners[WARM_UP:]], own_bytes),
        "samples": [],
    }


def _codec_speed(image: Volume, side: int, codec: ChunkCodec) -> dict[str, float]:
    """Return megabytes of voxels per second of CPU time, measured in the middle of the volume."""
    starts = [range(side, min(n - side, 220), side) for n in SHAPE]
    chunks = [_cut(image, (z, y, x), side) for z in starts[0] for y in starts[1] for x in starts[2]]
    started = process_time()
    encoded = [memoryview(codec.encode(values)) for values in chunks]
    encode_s = process_time() - started
    into = codec.empty((side, side, side))
    started = process_time()
    for stored in encoded:
        codec.decode(stored, into)
    decode_s = process_time() - started
    megabytes = sum(values.nbytes for values in chunks) / 1e6
    return {"encode_mb_per_cpu_s": megabytes / encode_s, "decode_mb_per_cpu_s": megabytes / decode_s}


def _layout_summary(row: dict[str, Any]) -> dict[str, Any]:
    """Return a layout with its measurements as median and spread."""
    samples = row.pop("samples")
    del row["metadata"]
    row["patches_per_s"] = summarize([s["patches"] / s["total_s"] for s in samples])
    row["client_cpu_s_per_patch"] = summarize([s["client_cpu_s"] / s["patches"] for s in samples])
    row["times_own_bytes"] = samples[0]["times_own_bytes"]
    row["requests_per_patch"] = samples[0]["requests_per_patch"]
    return row


def _by_plan(
    meta: ArrayMeta, sizes: npt.NDArray[np.int64], corners: Sequence[Corner], own_bytes: Sequence[int]
) -> list[dict[str, Any]]:
    """Compute requests and bytes of the image's patches without I/O, by order of chunks and largest gap to read."""
    rows = []
    for name, order in (("row", np.arange(len(sizes))), ("hilbert", storage_order(meta.chunks_per_shard))):
        first = np.zeros(len(sizes), np.int64)
        first[order] = np.cumsum(sizes[order]) - sizes[order]
        for gap in GAPS_BYTES:
            groups = []
            for corner in corners:
                plan = plan_region(meta, (0, *corner), (1, *(a + SIDE for a in corner)))
                numbers = [p.number for p in plan[0, 0, 0, 0] if sizes[p.number]]
                spans = [Span(int(first[n]), int(first[n] + sizes[n])) for n in numbers]
                groups.append(coalesce(spans, max_gap_bytes=gap).groups)
            read = np.array([sum(span.size for span in g) for g in groups])
            rows.append(
                {
                    "order": name,
                    "gap_bytes": gap,
                    "requests": float(np.mean([len(g) for g in groups])),
                    "times_own_bytes": float(np.sum(read) / np.sum(own_bytes)),
                    "worst_times_own_bytes": float(np.max(read / np.array(own_bytes))),
                }
            )
    return rows


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median and spread of each contender at each place."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["place"], sample["latency_s"], sample["contender"]), []).append(sample)
    rows = []
    for (place, latency_s, contender), group in groups.items():
        row: dict[str, Any] = {"place": place, "latency_s": latency_s, "contender": contender}
        if errors := [s["error"] for s in group if "error" in s]:
            rows.append({**row, "error": errors[0]})
            continue
        row["patches_per_s"] = summarize([s["patches"] / s["total_s"] for s in group])
        row["client_cpu_s_per_patch"] = summarize([s["client_cpu_s"] / s["patches"] for s in group])
        row["peak_rss_bytes"] = summarize([s["peak_rss_bytes"] for s in group])
        for name in ("bytes_per_patch", "requests_per_patch", "times_own_bytes"):
            if name in group[0]:
                row[name] = summarize([s[name] for s in group])
        rows.append(row)
    return rows


def _print_sample(sample: dict[str, Any]) -> None:
    result_text = sample.get("error")
    if result_text is None:
        result_text = f"{sample['patches'] / sample['total_s']:.1f} patches/s, cpu {sample['client_cpu_s']:.2f} s"
        if "bytes_per_patch" in sample:
            result_text += (
                f", {sample['bytes_per_patch'] / 1e6:.2f} MB ({sample['times_own_bytes']:.2f} x own) and "
                f"{sample['requests_per_patch']:.1f} requests a patch"
            )
    print(f"{sample['place']} {sample['latency_s'] * 1000:.0f} ms {sample['contender']}: {result_text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="read few patches in one round: about a minute")
    parser.add_argument("--rounds", type=int, help="number of measurements of each contender at each place")
    parser.add_argument(
        "--contender", action="append", choices=list(CONTENDERS), help="measure only this contender (repeatable)"
    )
    parser.add_argument("--no-sweep", action="store_true", help="skip the measurements of chunk sizes and codecs")
    parser.add_argument("--ct", type=Path, help="CT scan (NIfTI) to build the volumes from")
    parser.add_argument("--label", type=Path, help="label (NIfTI, slices first) to build the labels from")
    parser.add_argument("--out", type=Path, default=isolated_runs.RESULTS / "patch_readers.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
