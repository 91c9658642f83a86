"""One case into a bucket, as a Zarr v3 group that any Zarr library reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import ConfigError
from voxlane.store import Store
from voxlane.store.bucket import ObjectInfo
from voxlane.volume.array import (
    ArrayMeta,
    Shape,
    build_index,
    chunk_for,
    object_name,
    plan_region,
    shard_for,
    storage_order,
)
from voxlane.volume.codec import ChunkCodec, checksum, image_codecs, label_codecs

PATCH = (128, 128, 128)
"""The patch that chunks are made for when none is given."""
LABEL_CHUNKS = 2
"""A label's chunk is this many image chunks along each axis: labels are nearly constant, bytes hardly count."""


def write_case(
    store: Store,
    key_prefix: str,
    *,
    image: npt.NDArray[Any],
    label: npt.NDArray[np.uint8] | None,
    foreground: npt.NDArray[np.int32],
    attributes: Mapping[str, Any],
    patch: Sequence[int] = PATCH,
) -> dict[str, Any]:
    """Write one case below `key_prefix` (such as `cases/a.zarr`) and return its metadata: plain data from which a
    `VolumeReader` reads without asking the bucket what is there.

    `image` is (C, Z, Y, X), `label` (Z, Y, X) or None, `foreground` N x 4 (label value, z, y, x), `attributes` plain
    data for the group. `patch` (z, y, x) is the size that training will read; chunks are about a quarter of it. The
    group's zarr.json goes last: before it is there, no case is there. Memory: the arrays given, and their compressed
    shards (at most two in flight).

    Metadata: `{"image": {...}, "label": {...}, "foreground": {...}, "objects": [[name, bytes, etag], ...]}`, names
    below `key_prefix`; without a label there is no "label".
    """
    _check(image, label, foreground)
    volume, channels = image.shape[1:], image.shape[0]
    chunk = chunk_for(patch, volume, channels)
    metas = {"image": _sharded(image, (channels, *chunk), image_codecs(str(image.dtype), (channels, *chunk)), "czyx")}
    arrays: dict[str, npt.NDArray[Any]] = {"image": image, "foreground": np.asarray(foreground, np.int32)}
    if label is not None:
        wide = tuple(min(n, LABEL_CHUNKS * c) for n, c in zip(volume, chunk, strict=True))
        metas["label"] = _sharded(label, wide, label_codecs("uint8"), "zyx")
        arrays["label"] = label
    rows = max(1, len(foreground))
    metas["foreground"] = ArrayMeta((len(foreground), 4), "int32", (rows, 4), label_codecs("int32"))
    return write_arrays(store, key_prefix, arrays, metas, attributes)


def write_arrays(
    store: Store,
    key_prefix: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    metas: Mapping[str, ArrayMeta],
    attributes: Mapping[str, Any],
) -> dict[str, Any]:
    """Write arrays in the forms that `metas` give them, as one group; returns what `write_case` does."""
    written: list[ObjectInfo] = []
    pending = []
    for name, meta in metas.items():
        codec = ChunkCodec(meta.codecs, meta.dtype)
        for place in meta.objects():
            body = _encode_object(arrays[name], meta, codec, place)
            pending.append(store.submit(store.put, f"{key_prefix}/{name}/{object_name(place)}", body))
            if len(pending) > 1:
                written.append(pending.pop(0).result())
    documents = {name: meta.to_zarr() for name, meta in metas.items()}
    pending += [
        store.submit(store.put, f"{key_prefix}/{name}/zarr.json", _json(document))
        for name, document in documents.items()
    ]
    written += [future.result() for future in pending]
    # The arrays' metadata inside the group's saves others a request for each, as zarr-python's consolidation does.
    inline = {"kind": "inline", "must_understand": False, "metadata": documents}
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes, "consolidated_metadata": inline}
    store.put(f"{key_prefix}/zarr.json", _json(group))
    below = len(key_prefix) + 1
    objects = [[o.key[below:], o.size, o.etag] for o in written if not o.key.endswith("zarr.json")]
    return {**{name: meta.to_metadata() for name, meta in metas.items()}, "objects": sorted(objects)}


def _sharded(array: npt.NDArray[Any], chunk: Shape, codecs: tuple[Mapping[str, Any], ...], names: str) -> ArrayMeta:
    shard = shard_for(array.shape, chunk, array.itemsize)
    # The first voxel is air in nearly every scan; chunks of nothing but the fill value are neither stored nor read.
    corner = array.flat[0].item()
    fill = corner if math.isfinite(corner) else 0
    return ArrayMeta(array.shape, str(array.dtype), chunk, codecs, shard, fill=fill, names=tuple(names))


def _encode_object(array: npt.NDArray[Any], meta: ArrayMeta, codec: ChunkCodec, place: Shape) -> bytes:
    """The bytes of one object: a shard with its index, or one chunk."""
    start = [p * s for p, s in zip(place, meta.object_shape, strict=True)]
    stop = [min(a + s, n) for a, s, n in zip(start, meta.object_shape, meta.shape, strict=True)]
    region = array[tuple(map(slice, start, stop))]
    pieces = {piece.number: piece for piece in plan_region(meta, start, stop)[place]}
    chunks: dict[int, bytes] = {}
    for number, piece in pieces.items():
        values = region[piece.target]
        if meta.shard and not np.any(values != meta.fill):
            continue
        if values.shape != meta.chunk:  # at the far edge
            padded = np.full(meta.chunk, meta.fill, array.dtype)
            padded[piece.source] = values
            values = padded
        chunks[number] = codec.encode(values)
    if not meta.shard:
        return chunks[0]
    order = storage_order(meta.chunks_per_shard)
    sizes = np.array([len(chunks[n]) if n in chunks else -1 for n in range(len(order))], np.int64)
    at_start = meta.index_at == "start"
    index = build_index(sizes, order, meta.index_bytes if at_start else 0).tobytes()
    index += checksum(index).to_bytes(4, "little")
    body = [chunks[n] for n in order.tolist() if n in chunks]
    return b"".join([index, *body] if at_start else [*body, index])


def _check(image: npt.NDArray[Any], label: npt.NDArray[Any] | None, foreground: npt.NDArray[Any]) -> None:
    if image.ndim != 4 or 0 in image.shape:
        raise ConfigError(f"an image of shape {image.shape}", fix="Give (C, Z, Y, X)")
    if label is not None and (label.shape != image.shape[1:] or label.dtype != np.uint8):
        raise ConfigError(
            f"a label of shape {label.shape} and type {label.dtype} for an image of shape {image.shape}",
            fix="Give a uint8 label of the image's (Z, Y, X)",
        )
    if foreground.ndim != 2 or foreground.shape[1] != 4:
        raise ConfigError(f"a foreground index of shape {foreground.shape}", fix="Give N x 4: label value, z, y, x")


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
