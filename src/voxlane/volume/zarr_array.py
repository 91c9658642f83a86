"""Storage format of one array (sharded Zarr v3): its metadata, the shard index, and the chunks that a region touches.

This module does no I/O. An array is divided into chunks, the unit of compression. A shard is one object that holds many
chunks behind an index of (first byte, bytes), so a reader can fetch single chunks by byte range. Chunks are stored
along a Hilbert curve, which keeps neighbours in space close together in the object: when gaps of up to 32 KiB are read
too, a 128-cubed patch takes 19 requests instead of 25 in row order, for 5% more bytes (benchmarks/results,
`patch_readers`).
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
"""Index entry of a chunk that is not stored because it holds only the fill value."""
MAX_GAP_BYTES = 128 * 1024
"""Largest gap between two chunks that one request reads through. At 128 KiB a 128-cubed patch takes half as many
requests as at 32 KiB, for 30% more bytes (docs/log.md); buckets charge for requests."""
INDEX_SUM_BYTES = 4
MIN_CHUNK_VALUES = 32**3
"""Smallest number of values in a chunk; smaller chunks cost more in handling than they save in bytes."""
MAX_SHARD_BYTES = 512 << 20
"""Largest shard before compression; a larger array is divided into slabs along z."""
_PATCH_CHUNKS = 4
"""Chunks along each axis of a patch. A patch at a random position touches one more, so reads (1 + 1/4)^3 = 2 times its
voxels."""


@dataclass(frozen=True)
class ArrayMeta:
    """Shape, type and encoding of an array: the content of its zarr.json."""

    shape: Shape
    dtype: str
    """Data type by its name in numpy and Zarr: int16, uint8, ..."""
    chunk: Shape
    codecs: tuple[Mapping[str, Any], ...]
    """Zarr codecs that turn a chunk's values into bytes, in the order of encoding."""
    shard: Shape | None = None
    """Shape of a shard, a multiple of `chunk` along each axis. None: each object is one chunk without an index."""
    index_at: str = "start"
    """Position of the index in a shard: "start" or "end"."""
    fill: int | float = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.chunk) != len(self.shape) or (self.shard is not None and len(self.shard) != len(self.shape)):
            raise PreparedError(
                f"chunk {self.chunk} and shard {self.shard} do not match an array of shape {self.shape}"
            )
        if self.shard is not None and any(s % c for s, c in zip(self.shard, self.chunk, strict=True)):
            raise PreparedError(f"shard {self.shard} is not a multiple of chunk {self.chunk}")

    @property
    def object_shape(self) -> Shape:
        """Shape of the region that one object stores."""
        return self.shard or self.chunk

    @property
    def chunks_per_shard(self) -> Shape:
        """Number of chunks along each axis of a shard."""
        return tuple(s // c for s, c in zip(self.object_shape, self.chunk, strict=True))

    @property
    def index_bytes(self) -> int:
        """Size of a shard's index including its checksum; 0 without shards."""
        return 16 * math.prod(self.chunks_per_shard) + INDEX_SUM_BYTES if self.shard else 0

    def objects(self) -> Iterator[Shape]:
        """Yield the position of each object in the grid of objects."""
        grid = (math.ceil(n / s) for n, s in zip(self.shape, self.object_shape, strict=True))
        return itertools.product(*map(range, grid))

    def to_metadata(self) -> dict[str, Any]:
        """Return JSON-compatible data that `from_metadata` reads."""
        names = ("shape", "dtype", "chunk", "shard", "codecs", "index_at", "fill")
        values = {name: getattr(self, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_metadata(cls, data: Mapping[str, Any]) -> ArrayMeta:
        """Build from the result of `to_metadata`, also after a round trip through JSON."""
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in data.items()}
        return cls(**values)

    def to_zarr(self) -> dict[str, Any]:
        """Return the content of the array's zarr.json."""
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
            "attributes": {},
            **({"dimension_names": list(self.names)} if self.names else {}),
        }


def object_name(position: Shape) -> str:
    """Return the key of an object below its array, such as `c/0/0/0`."""
    return "/".join(("c", *map(str, position)))


def choose_chunk_shape(patch: Sequence[int], shape: Sequence[int], channels: int = 1) -> Shape:
    """Choose the chunk (z, y, x) for reading patches of size `patch` from a volume of this shape.

    A chunk is a quarter of the patch along each axis, but holds at least about 32,768 values over all channels. A
    volume of up to four times that is one chunk.
    """
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


def choose_shard_shape(shape: Shape, chunk: Shape, itemsize: int, max_bytes: int = MAX_SHARD_BYTES) -> Shape:
    """Choose the shard: the whole array rounded up to chunks, or as many layers of chunks along z (third axis from the
    end) as fit into `max_bytes` uncompressed, but at least one."""
    shard = [math.ceil(n / c) * c for n, c in zip(shape, chunk, strict=True)]
    layer_bytes = itemsize * math.prod(shard) // shard[-3] * chunk[-3]
    layers = max(1, max_bytes // layer_bytes)
    shard[-3] = min(shard[-3], layers * chunk[-3])
    return tuple(shard)


# -- shard index -------------------------------------------------------------------------------------------------------


def storage_order(grid: Shape) -> npt.NDArray[np.int64]:
    """Return the row-order numbers of a shard's chunks in storage order: along a Hilbert curve."""
    positions = np.indices(grid).reshape(len(grid), -1)
    axes = [axis for axis, n in enumerate(grid) if n > 1]
    if not axes:
        return np.arange(math.prod(grid))
    return np.argsort(_hilbert(positions[axes], max(int(n) for n in grid).bit_length()), kind="stable")


def _hilbert(positions: npt.NDArray[np.int64], bits: int) -> npt.NDArray[np.int64]:
    """Return the distance along the curve of each column of `positions` (axes x points), by Skilling's algorithm."""
    x = positions.copy()
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
    distance: npt.NDArray[np.int64] = np.zeros_like(x[0])
    for level in range(bits - 1, -1, -1):
        for axis in range(len(x)):
            distance = (distance << 1) | ((x[axis] >> level) & 1)
    return distance


def build_index(sizes: npt.NDArray[np.int64], order: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.uint64]:
    """Build the index (chunks x (first byte, bytes)) of chunks that are stored in `order` starting at byte `first`.
    `sizes` is by chunk number; -1 marks a chunk that is not stored."""
    stored = np.maximum(sizes[order], 0)
    index = np.full((len(sizes), 2), MISSING, "<u8")
    index[order, 0] = first + np.cumsum(stored) - stored
    index[:, 1] = sizes
    index[sizes < 0] = MISSING
    return index


def parse_index(meta: ArrayMeta, raw: Any, size: int, checksum: int, uri: str) -> npt.NDArray[np.uint64]:
    """Parse and validate the index in `raw` of a shard of `size` bytes; `checksum` is the CRC-32C of `raw` without its
    last four bytes. Raises PreparedError if it is damaged."""
    stored = int.from_bytes(bytes(raw[-INDEX_SUM_BYTES:]), "little")
    if len(raw) != meta.index_bytes or stored != checksum:
        raise PreparedError(
            "the shard's index is damaged: its checksum does not match", uri=uri, fix="Prepare the case again"
        )
    index = np.frombuffer(raw, "<u8", count=2 * math.prod(meta.chunks_per_shard)).reshape(-1, 2)
    stored_entries = index[index[:, 0] != MISSING]
    if len(stored_entries) and (int(stored_entries.max()) > size or int(stored_entries.sum(axis=1).max()) > size):
        raise PreparedError("the shard's index points past its end", uri=uri, fix="Prepare the case again")
    return index


# -- regions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The part of a region that one chunk holds."""

    number: int
    """Number of the chunk in its shard, in row order."""
    source: tuple[slice, ...]
    """Slices of the chunk."""
    target: tuple[slice, ...]
    """Slices of the region."""


def plan_region(meta: ArrayMeta, start: Sequence[int], stop: Sequence[int]) -> dict[Shape, list[ChunkPart]]:
    """Return the chunk parts of the region `[start, stop)` by object. Each voxel is in exactly one part."""
    if not len(start) == len(stop) == len(meta.shape) or not all(
        0 <= a <= b <= n for a, b, n in zip(start, stop, meta.shape, strict=True)
    ):
        raise ConfigError(
            f"the region {tuple(start)} to {tuple(stop)} exceeds an array of shape {meta.shape}",
            fix="Use read_padded to read past the edge",
        )
    axes = [_axis_parts(a, b, c, p) for a, b, c, p in zip(start, stop, meta.chunk, meta.chunks_per_shard, strict=True)]
    strides = [math.prod(meta.chunks_per_shard[axis + 1 :]) for axis in range(len(axes))]
    parts_by_object: dict[Shape, list[ChunkPart]] = {}
    for parts in itertools.product(*axes):
        shard, inner, source, target = zip(*parts, strict=True)
        number = sum(i * s for i, s in zip(inner, strides, strict=True))
        parts_by_object.setdefault(shard, []).append(ChunkPart(number, source, target))
    return parts_by_object


def _axis_parts(start: int, stop: int, chunk: int, per_shard: int) -> list[tuple[int, int, slice, slice]]:
    """Return (object, chunk in it, slice of the chunk, slice of the region) of each chunk touched along one axis."""
    parts = []
    for number in range(start // chunk, math.ceil(stop / chunk) if stop > start else start // chunk):
        first = number * chunk
        low, high = max(start, first), min(stop, first + chunk)
        source, target = slice(low - first, high - first), slice(low - start, high - start)
        parts.append((number // per_shard, number % per_shard, source, target))
    return parts
