"""Readers of training patches: ours and other Zarr libraries on the same objects, and whole files.

Each function of `CONTENDERS` takes the location of the cases and returns one that reads patches (image, label) in
the requested order, several in flight. Contenders without "cache" in their name keep no voxels between patches. What a
library always keeps (open arrays, connections, our shard indexes) is kept.
"""

from __future__ import annotations

import functools
import gzip
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from isolated_runs import Sample, Stopwatch

Corner = tuple[int, int, int]
Patch = tuple[Any, Any]
IN_FLIGHT = 8
"""Patches that every contender reads concurrently."""
THREADS = 2
"""Threads that decode for our reader: the cores of the machine of the published figures. Others use their own."""


def read_patches(
    contender: str,
    root: str,
    endpoint: str,
    cases: Sequence[str],
    metadata: Sequence[dict[str, Any]],
    corners: Sequence[tuple[int, Corner]],
    side: int,
    expected: Sequence[int],
) -> Sample:
    """Read the patch of `side` cubed at each (case, corner).

    The first patches, one for each voxel sum in `expected`, are a warm-up: they are not measured, and their sums are
    compared with `expected`.
    """
    stream = CONTENDERS[contender](root, endpoint, cases, metadata)
    warm, measured = corners[: len(expected)], corners[len(expected) :]
    for (image, label), expected_sum in zip(stream(warm, side), expected, strict=True):
        voxel_sum = int(np.asarray(image, np.int64).sum() + np.asarray(label, np.int64).sum())
        if voxel_sum != expected_sum or image.shape[-3:] != (side,) * 3:
            raise AssertionError(f"{contender} read voxels that differ from the written ones")
    watch = Stopwatch()
    count = sum(1 for _ in stream(measured, side))
    return {"total_s": watch.elapsed_s(), "client_cpu_s": watch.cpu_s(), "patches": count}


Stream = Callable[[Sequence[tuple[int, Corner]], int], Iterator[Patch]]


def _box(corner: Corner, side: int) -> tuple[slice, ...]:
    return tuple(slice(a, a + side) for a in corner)


def _threaded(read: Callable[[int, Corner, int], Patch]) -> Stream:
    """Read with `IN_FLIGHT` threads, one patch each, and yield results in order."""

    def stream(corners: Sequence[tuple[int, Corner]], side: int) -> Iterator[Patch]:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            waiting: deque[Any] = deque()
            for case, corner in corners:
                waiting.append(pool.submit(read, case, corner, side))
                if len(waiting) > IN_FLIGHT:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    return stream


def _store(root: str, endpoint: str) -> tuple[Any, str]:
    """Return our store and the key of `root` in it."""
    from voxlane import Store, StoreConfig
    from voxlane.uri import parse

    config = StoreConfig(endpoint=endpoint or None, access_key_id="k", secret_access_key="s")
    return Store(root, config), parse(root).key.rstrip("/")


def _voxlane(
    root: str, endpoint: str, cases: Sequence[str], metadata: Sequence[dict[str, Any]], cache_bytes: int = 0
) -> Stream:
    from voxlane.volume.volume_reader import VolumeCache

    store, key = _store(root, endpoint)
    volumes = VolumeCache(store, memory_bytes=cache_bytes)
    readers = [volumes.open(f"{key}/{c}.zarr", m) for c, m in zip(cases, metadata, strict=True)]

    def stream(corners: Sequence[tuple[int, Corner]], side: int) -> Iterator[Patch]:
        with ThreadPoolExecutor(THREADS) as pool:
            waiting: deque[Any] = deque()
            for case, corner in corners:
                stop = [a + side for a in corner]
                image, label = (readers[case].start(n, corner, stop) for n in ("image", "label"))
                waiting.append(pool.submit(lambda i=image, m=label: (i.result(), m.result())))
                if len(waiting) > IN_FLIGHT:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    return stream


def _zarr(root: str, endpoint: str, cases: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Stream:
    import zarr
    from obstore.store import LocalStore, S3Store
    from zarr.storage import ObjectStore

    key = root.partition("://")[2]
    if endpoint:
        bucket, _, prefix = key.partition("/")
        native: Any = S3Store(
            bucket,
            prefix=prefix,
            endpoint=endpoint,
            access_key_id="k",
            secret_access_key="s",
            region="us-east-1",
            client_options={"allow_http": True},
        )
    else:
        native = LocalStore(key)
    groups = [zarr.open_group(ObjectStore(native, read_only=True), path=f"{c}.zarr", mode="r") for c in cases]
    arrays = [(g["image"], g["label"]) for g in groups]

    def read(case: int, corner: Corner, side: int) -> Patch:
        image, label = arrays[case]
        box = _box(corner, side)
        return image[(slice(None), *box)], label[box]

    return _threaded(read)


def _zarrs(root: str, endpoint: str, cases: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Stream:
    import warnings

    import zarr

    warnings.simplefilter("ignore", RuntimeWarning)  # it warns that it opens the store a second time
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    return _zarr(root, endpoint, cases, metadata)


def _tensorstore(cache_bytes: int) -> Callable[..., Stream]:
    def make(root: str, endpoint: str, cases: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Stream:
        import tensorstore

        os.environ.update(AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s")
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
        bucket, _, key = root.partition("://")[2].partition("/")

        def opened(case: str, array: str) -> Any:
            path = f"{key}/{case}.zarr/{array}/"
            kvstore: dict[str, Any] = {"driver": "file", "path": f"/{path}"}
            if endpoint:
                kvstore = {"driver": "s3", "bucket": bucket, "endpoint": endpoint, "path": path}
                kvstore["aws_region"] = "us-east-1"
            # Data that was read once is not revalidated, as in our reader of a finished dataset.
            spec = {"driver": "zarr3", "kvstore": kvstore, "recheck_cached_data": "open"}
            return tensorstore.open(spec, context=context, read=True).result()

        arrays = [(opened(c, "image"), opened(c, "label")) for c in cases]

        def stream(corners: Sequence[tuple[int, Corner]], side: int) -> Iterator[Patch]:
            waiting: deque[Any] = deque()
            for case, corner in corners:
                image, label = arrays[case]
                box = _box(corner, side)
                waiting.append((image[(slice(None), *box)].read(), label[box].read()))
                if len(waiting) > IN_FLIGHT:
                    yield tuple(f.result() for f in waiting.popleft())  # type: ignore[misc]
            while waiting:
                yield tuple(f.result() for f in waiting.popleft())  # type: ignore[misc]

        return stream

    return make


def _whole(root: str, endpoint: str, cases: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Stream:
    """Download and unpack the NIfTI files of scan and label for every patch, two at a time, because each needs the
    memory of a volume."""
    store, key = _store(root, endpoint)
    header_bytes = 352

    def read(case: int, corner: Corner, side: int) -> Patch:
        patch_pair = []
        for name, dtype in (("imaging", "<i2"), ("segmentation", "u1")):
            body = gzip.decompress(store.get(f"{key}/{cases[case]}/{name}.nii.gz"))
            shape = np.frombuffer(body, "<i2", 8, 40)[3:0:-1]
            volume = np.frombuffer(body, dtype, offset=header_bytes).reshape(shape)
            patch_pair.append(volume[_box(corner, side)].copy())
        return patch_pair[0], patch_pair[1]

    def stream(corners: Sequence[tuple[int, Corner]], side: int) -> Iterator[Patch]:
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(lambda each: read(*each, side), corners)

    return stream


CONTENDERS: dict[str, Callable[..., Stream]] = {
    "voxlane": _voxlane,
    "voxlane, 256 MB cache": functools.partial(_voxlane, cache_bytes=256_000_000),
    "zarr-python + obstore": _zarr,
    "zarrs": _zarrs,
    "tensorstore": _tensorstore(0),
    "tensorstore, 256 MB cache": _tensorstore(256_000_000),
    "whole .nii.gz": _whole,
}
