"""Writing of one case to a bucket, as a Zarr v3 group that any Zarr library can read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import ConfigError
from voxlane.store import Store
from voxlane.store.content import checksum_content
from voxlane.volume import zarr_array
from voxlane.volume.codec import ChunkCodec, checksum, image_codecs, label_codecs
from voxlane.volume.zarr_array import ArrayMeta, Shape

PATCH = (128, 128, 128)
"""Default patch size that chunks are chosen for."""
LABEL_CHUNKS = 2
"""Image chunks along each axis of a label chunk; labels are nearly constant, so larger chunks cost few bytes."""


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
    """Write a case below `key_prefix` (such as `cases/a.zarr`) and return its metadata.

    With this metadata a `VolumeReader` needs no further request to locate the arrays. It is JSON-compatible:
    `{"image": {...}, "label": {...}, "foreground": {...}, "objects": [...], "documents": [...]}`, without "label" if
    there is none. `objects` and `documents` (the zarr.json files) hold the fields of `StoredObject`, with names below
    `key_prefix`.

    image: (C, Z, Y, X).
    label: (Z, Y, X).
    foreground: N x 4 (label value, z, y, x).
    attributes: JSON-compatible attributes of the group.
    patch: voxels (z, y, x) that training will read at once; chunks are about a quarter of it along each axis.

    The group's zarr.json is written last; a case without it is incomplete. Memory: the arrays, and at most two
    compressed shards.
    """
    _check(image, label, foreground)
    volume, channels = image.shape[1:], image.shape[0]
    chunk = zarr_array.choose_chunk_shape(patch, volume, channels)
    metas = {
        "image": _sharded_meta(image, (channels, *chunk), image_codecs(str(image.dtype), (channels, *chunk)), "czyx")
    }
    arrays: dict[str, npt.NDArray[Any]] = {"image": image, "foreground": np.asarray(foreground, np.int32)}
    if label is not None:
        label_chunk = tuple(min(n, LABEL_CHUNKS * c) for n, c in zip(volume, chunk, strict=True))
        metas["label"] = _sharded_meta(label, label_chunk, label_codecs("uint8"), "zyx")
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
    """Write arrays as one group, each encoded as its entry in `metas` says; return what `write_case` returns."""
    objects: list[list[Any]] = []
    uploads: list[Future[list[Any]]] = []

    def put(name: str, body: bytes, index_checksum: int | None = None) -> list[Any]:
        etag = store.put(f"{key_prefix}/{name}", body).etag
        return [name, len(body), checksum_content(body), index_checksum, etag]

    for name, meta in metas.items():
        codec = ChunkCodec(meta.codecs, meta.dtype)
        for position in meta.objects():
            body, index_checksum = _encode_object(arrays[name], meta, codec, position)
            uploads.append(store.submit(put, f"{name}/{zarr_array.object_name(position)}", body, index_checksum))
            if len(uploads) > 1:
                objects.append(uploads.pop(0).result())
    objects += [future.result() for future in uploads]
    descriptions = {name: meta.to_zarr() for name, meta in metas.items()}
    uploads = [store.submit(put, f"{name}/zarr.json", _json(value)) for name, value in descriptions.items()]
    documents = [future.result() for future in uploads]
    # The group repeats its arrays' metadata, which saves readers a request per array (zarr-python's consolidation).
    inline = {"kind": "inline", "must_understand": False, "metadata": descriptions}
    group = {"zarr_format": 3, "node_type": "group", "attributes": attributes, "consolidated_metadata": inline}
    documents.append(put("zarr.json", _json(group)))
    return {
        **{name: meta.to_metadata() for name, meta in metas.items()},
        "objects": sorted(objects),
        "documents": sorted(documents),
    }


def _sharded_meta(
    array: npt.NDArray[Any], chunk: Shape, codecs: tuple[Mapping[str, Any], ...], names: str
) -> ArrayMeta:
    shard = zarr_array.choose_shard_shape(array.shape, chunk, array.itemsize)
    # The first voxel is air in nearly every scan; chunks that hold only the fill value are not stored.
    corner = array.flat[0].item()
    fill = corner if math.isfinite(corner) else 0
    return ArrayMeta(array.shape, str(array.dtype), chunk, codecs, shard, fill=fill, names=tuple(names))


def _encode_object(
    array: npt.NDArray[Any], meta: ArrayMeta, codec: ChunkCodec, position: Shape
) -> tuple[bytes, int | None]:
    """Return the bytes of one object and the checksum of its index: a shard, or a single chunk without an index."""
    start = [p * s for p, s in zip(position, meta.object_shape, strict=True)]
    stop = [min(a + s, n) for a, s, n in zip(start, meta.object_shape, meta.shape, strict=True)]
    region = array[tuple(map(slice, start, stop))]
    parts = {part.number: part for part in zarr_array.plan_region(meta, start, stop)[position]}
    chunks: dict[int, bytes] = {}
    for number, part in parts.items():
        values = region[part.target]
        if meta.shard and not np.any(values != meta.fill):
            continue
        if values.shape != meta.chunk:  # at the far edge
            padded = np.full(meta.chunk, meta.fill, array.dtype)
            padded[part.source] = values
            values = padded
        chunks[number] = codec.encode(values)
    if not meta.shard:
        return chunks[0], None
    order = zarr_array.storage_order(meta.chunks_per_shard)
    sizes = np.array([len(chunks[n]) if n in chunks else -1 for n in range(len(order))], np.int64)
    at_start = meta.index_at == "start"
    index = zarr_array.build_index(sizes, order, meta.index_bytes if at_start else 0).tobytes()
    index_checksum = checksum(index)
    index += index_checksum.to_bytes(4, "little")
    body = [chunks[n] for n in order.tolist() if n in chunks]
    return b"".join([index, *body] if at_start else [*body, index]), index_checksum


def _check(image: npt.NDArray[Any], label: npt.NDArray[Any] | None, foreground: npt.NDArray[Any]) -> None:
    if image.ndim != 4 or 0 in image.shape:
        raise ConfigError(f"image: unexpected shape {image.shape}", fix="Pass an array of shape (C, Z, Y, X)")
    if label is not None and (label.shape != image.shape[1:] or label.dtype != np.uint8):
        raise ConfigError(
            f"label: shape {label.shape} and type {label.dtype} do not match an image of shape {image.shape}",
            fix="Pass a uint8 label of the image's (Z, Y, X)",
        )
    if foreground.ndim != 2 or foreground.shape[1] != 4:
        raise ConfigError(f"foreground: unexpected shape {foreground.shape}", fix="Pass N x 4: label value, z, y, x")


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
