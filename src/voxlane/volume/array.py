"""The format of one stored array: Zarr v3, sharded. Metadata, the shard's index, and which chunks a region touches.

Pure: nothing here reads or writes. An array is cut into chunks, the unit of compression; a shard is one object that
holds many chunks behind an index of (first byte, bytes), so that a reader gets the chunks it wants by byte ranges.
Chunks lie in a shard along a Hilbert curve, which keeps neighbours in space near each other in the object: with gaps of
up to 32 KiB bridged, a 128-cubed patch is 19 requests instead of 25 in row order, for 5% more bytes
(benchmarks/results, `patch_readers`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import ConfigError, PreparedError

Shape = tuple[int, ...]
MISSING = np.uint64(2**64 - 1)
"""What the index says of a chunk that holds nothing but the fill value: it is not stored."""
MAX_GAP_BYTES = 128 * 1024
"""What a request fetches for nothing, at most, between two chunks that it is for. A patch of 128 cubed then takes half
the requests of 32 KiB, for three tenths more bytes (docs/log.md); buckets charge for requests."""
INDEX_SUM_BYTES = 4
CHUNK_SIDE = 32
"""Default chunk along each of z, y, x: a quarter of a 128-cubed patch."""
MIN_CHUNK_VALUES = CHUNK_SIDE**3
"""A chunk of fewer values costs more in handling than it saves in bytes."""
MAX_SHARD_BYTES = 512 << 20
"""A shard is the whole array, or slabs of it along z of at most this size before compression."""
_PATCH_CHUNKS = 4
"""Chunks along a patch. At a random place a patch touches one more, so (1 + 1/4)^3 = 2 times its voxels are read."""


@dataclass(frozen=True)
class ArrayMeta:
    """What a reader must know of an array; the same facts as its zarr.json."""

    shape: Shape
    dtype: str
    """numpy's name, which is Zarr's too: int16, uint8, ..."""
    chunk: Shape
    codecs: tuple[Mapping[str, Any], ...]
    """How one chunk's values become bytes: the Zarr codecs, in order of encoding."""
    shard: Shape | None = None
    """Shape of what one object holds; a whole number of chunks. None: every object is one chunk, without an index."""
    index_at: str = "start"
    """Where in a shard the index lies: "start" or "end"."""
    fill: int | float = 0
    names: tuple[str, ...] = ()
    """Names of the axes."""

    def __post_init__(self) -> None:
        if len(self.chunk) != len(self.shape) or (self.shard is not None and len(self.shard) != len(self.shape)):
            raise PreparedError(f"chunk {self.chunk} and shard {self.shard} do not fit an array of shape {self.shape}")
        if self.shard is not None and any(s % c for s, c in zip(self.shard, self.chunk, strict=True)):
            raise PreparedError(f"a shard of {self.shard} is no whole number of chunks of {self.chunk}")

    @property
    def object_shape(self) -> Shape:
        """Shape of what one object holds."""
        return self.shard or self.chunk

    @property
    def chunks_per_shard(self) -> Shape:
        """Chunks along each axis of a shard."""
        return tuple(s // c for s, c in zip(self.object_shape, self.chunk, strict=True))

    @property
    def index_bytes(self) -> int:
        """Size of a shard's index with its checksum; 0 without shards."""
        return 16 * math.prod(self.chunks_per_shard) + INDEX_SUM_BYTES if self.shard else 0

    def objects(self) -> Iterator[Shape]:
        """Places of the objects in the grid of objects."""
        grid = (math.ceil(n / s) for n, s in zip(self.shape, self.object_shape, strict=True))
        return itertools.product(*map(range, grid))

    def to_metadata(self) -> dict[str, Any]:
        """Plain data for a manifest; `from_metadata` is the inverse."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "chunk": list(self.chunk),
            "shard": list(self.shard) if self.shard else None,
            "codecs": [dict(codec) for codec in self.codecs],
            "index_at": self.index_at,
            "fill": self.fill,
        }

    @classmethod
    def from_metadata(cls, data: Mapping[str, Any]) -> ArrayMeta:
        """From what `to_metadata` gave, perhaps by way of JSON."""
        return cls(
            tuple(data["shape"]),
            data["dtype"],
            tuple(data["chunk"]),
            tuple(data["codecs"]),
            tuple(data["shard"]) if data["shard"] else None,
            data["index_at"],
            data["fill"],
        )

    def to_zarr(self, attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The array's zarr.json."""
        codecs: list[Mapping[str, Any]] = list(self.codecs)
        if self.shard:
            settings = {
                "chunk_shape": list(self.chunk),
                "codecs": codecs,
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                "index_location": self.index_at,
            }
            codecs = [{"name": "sharding_indexed", "configuration": settings}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.object_shape)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": self.fill,
            "codecs": codecs,
            "attributes": dict(attributes or {}),
            **({"dimension_names": list(self.names)} if self.names else {}),
        }

    @classmethod
    def from_zarr(cls, document: Mapping[str, Any], uri: str) -> ArrayMeta:
        """From a zarr.json of the kind that we write; PreparedError for what this reader does not know."""
        try:
            if document["zarr_format"] != 3 or document["node_type"] != "array":
                raise PreparedError("this is no Zarr v3 array", uri=uri, fix="Prepare the dataset again")
            objects = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
            codecs = tuple(document["codecs"])
            common = (tuple(document["shape"]), document["data_type"])
            names = tuple(document.get("dimension_names") or ())
            if codecs[0]["name"] != "sharding_indexed":
                return cls(*common, objects, codecs, fill=document["fill_value"], names=names)
            inner = codecs[0]["configuration"]
            chunk, place = tuple(inner["chunk_shape"]), inner.get("index_location", "end")
            return cls(*common, chunk, tuple(inner["codecs"]), objects, place, document["fill_value"], names)
        except (KeyError, TypeError, IndexError) as error:
            raise PreparedError(
                f"zarr.json lacks or misstates {error}", uri=uri, fix="Prepare the dataset again"
            ) from None


def object_name(place: Shape) -> str:
    """Key of an object below its array: `c/0/0/0`."""
    return "/".join(("c", *map(str, place)))


def chunk_for(patch: Sequence[int], shape: Sequence[int], channels: int = 1) -> Shape:
    """The chunk (z, y, x) for patches of that size from a volume of that shape: a quarter of the patch along each axis,
    but at least about 32,768 values with all channels; a volume of up to four times that is one chunk."""
    if channels * math.prod(shape) <= 4 * MIN_CHUNK_VALUES:
        return tuple(shape)
    chunk = [min(n, math.ceil(p / _PATCH_CHUNKS / 4) * 4) for p, n in zip(patch, shape, strict=True)]
    while channels * math.prod(chunk) < MIN_CHUNK_VALUES:
        growing = [axis for axis in range(len(chunk)) if chunk[axis] < shape[axis]]
        if not growing:
            break
        axis = min(growing, key=lambda a: chunk[a] / patch[a])
        chunk[axis] = min(shape[axis], 2 * chunk[axis])
    return tuple(chunk)


def shard_for(shape: Shape, chunk: Shape, itemsize: int, max_bytes: int = MAX_SHARD_BYTES) -> Shape:
    """The whole array rounded up to chunks, or as many layers of chunks along z (third axis from the end) as fit
    `max_bytes` uncompressed; at least one."""
    whole = [math.ceil(n / c) * c for n, c in zip(shape, chunk, strict=True)]
    layer_bytes = itemsize * math.prod(whole) // whole[-3] * chunk[-3]
    layers = max(1, max_bytes // layer_bytes)
    whole[-3] = min(whole[-3], layers * chunk[-3])
    return tuple(whole)


# -- the index ---------------------------------------------------------------------------------------------------------


def storage_order(grid: Shape) -> npt.NDArray[np.int64]:
    """Numbers (row order) of a shard's chunks in the order in which they are stored: along a Hilbert curve."""
    places = np.indices(grid).reshape(len(grid), -1)
    axes = [axis for axis, n in enumerate(grid) if n > 1]
    if not axes:
        return np.arange(math.prod(grid))
    return np.argsort(_hilbert(places[axes], max(int(n) for n in grid).bit_length()), kind="stable")


def _hilbert(places: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.int64]:
    """Position along the curve of each column of `places` (axes x points); Skilling's transposition algorithm."""
    x = places.copy()
    for level in range(bits - 1, 0, -1):
        bit, below = 1 << level, (1 << level) - 1
        for axis in range(len(x)):
            is_set = (x[axis] & bit) != 0
            swap = np.where(is_set, 0, (x[0] ^ x[axis]) & below)
            x[0] ^= np.where(is_set, below, swap)
            x[axis] ^= swap
    for axis in range(1, len(x)):
        x[axis] ^= x[axis - 1]
    turn = np.zeros_like(x[0])
    for level in range(bits - 1, 0, -1):
        turn ^= np.where((x[-1] >> level) & 1, (1 << level) - 1, 0)
    x ^= turn
    position: npt.NDArray[np.int64] = np.zeros_like(x[0])
    for level in range(bits - 1, -1, -1):
        for axis in range(len(x)):
            position = (position << 1) | ((x[axis] >> level) & 1)
    return position


def build_index(sizes: npt.NDArray[np.int64], order: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.uint64]:
    """The index (chunks x (first byte, bytes)) of chunks of those sizes, by number, stored in `order` from byte `first`
    on; a size of -1 is a chunk that is not stored."""
    stored = np.maximum(sizes[order], 0)
    index = np.full((len(sizes), 2), MISSING, "<u8")
    index[order, 0] = first + np.cumsum(stored) - stored
    index[:, 1] = sizes
    index[sizes < 0] = MISSING
    return index


def read_index(meta: ArrayMeta, raw: Any, size: int, checksum: int, uri: str) -> npt.NDArray[np.uint64]:
    """The index in `raw`, whose CRC-32C (less the stored sum) is `checksum`, of a shard of `size` bytes. PreparedError
    when it is damaged."""
    stored = int.from_bytes(bytes(raw[-INDEX_SUM_BYTES:]), "little")
    if len(raw) != meta.index_bytes or stored != checksum:
        raise PreparedError(
            "the shard's index is damaged: its checksum is wrong", uri=uri, fix="Prepare the case again"
        )
    index = np.frombuffer(raw, "<u8", count=2 * math.prod(meta.chunks_per_shard)).reshape(-1, 2)
    there = index[index[:, 0] != MISSING]
    if len(there) and (int(there.max()) > size or int(there.sum(axis=1).max()) > size):
        raise PreparedError("the shard's index points past its end", uri=uri, fix="Prepare the case again")
    return index


# -- regions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """What one chunk gives to a region."""

    shard: Shape
    """Place of its object."""
    number: int
    """Of the chunk in its shard, in row order."""
    source: tuple[slice, ...]
    """In the chunk."""
    target: tuple[slice, ...]
    """In the region."""


def plan_region(meta: ArrayMeta, start: Sequence[int], stop: Sequence[int]) -> dict[Shape, list[Piece]]:
    """The pieces of the region `[start, stop)`, by the object that holds them. Every voxel of the region is in exactly
    one piece."""
    if not len(start) == len(stop) == len(meta.shape) or not all(
        0 <= a <= b <= n for a, b, n in zip(start, stop, meta.shape, strict=True)
    ):
        raise ConfigError(
            f"the region {tuple(start)} to {tuple(stop)} lies outside an array of shape {meta.shape}",
            fix="Use read_padded to read past the edge",
        )
    axes = [_axis_parts(a, b, c, p) for a, b, c, p in zip(start, stop, meta.chunk, meta.chunks_per_shard, strict=True)]
    strides = [math.prod(meta.chunks_per_shard[axis + 1 :]) for axis in range(len(axes))]
    found: dict[Shape, list[Piece]] = {}
    for parts in itertools.product(*axes):
        shard, inner, source, target = zip(*parts, strict=True)
        number = sum(i * s for i, s in zip(inner, strides, strict=True))
        found.setdefault(shard, []).append(Piece(shard, number, source, target))
    return found


def _axis_parts(start: int, stop: int, chunk: int, per_shard: int) -> list[tuple[int, int, slice, slice]]:
    """Along one axis: (object, chunk inside it, slice of the chunk, slice of the region) of each chunk touched."""
    parts = []
    for number in range(start // chunk, math.ceil(stop / chunk) if stop > start else start // chunk):
        first = number * chunk
        low, high = max(start, first), min(stop, first + chunk)
        parts.append(
            (
                number // per_shard,
                number % per_shard,
                slice(low - first, high - first),
                slice(low - start, high - start),
            )
        )
    return parts
