"""Chunks of values to bytes and back: the Zarr codecs bytes, blosc, zstd and crc32c, and which of them we write with.

Measured on CT clipped to a training window, 32-cubed chunks (benchmarks/results, `patch_readers`): Blosc with byte
shuffle and zstd at level 3 takes 12% fewer bytes than with bit shuffle, and 3% more than level 5, which takes more than
twice as long to encode. lz4 decodes almost twice as fast and takes half as many bytes again. Labels are nearly
constant: there plain zstd decodes fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import MissingExtraError, PreparedError

try:
    import google_crc32c
    import numcodecs
    from numcodecs import blosc
except ImportError:
    raise MissingExtraError.of("train", "Reading and writing prepared volumes") from None

# Blosc's own threads are shared by the process and do not survive a fork; chunks are small, and our callers have
# threads of their own.
blosc.use_threads = False

_SHUFFLES = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE, "bitshuffle": blosc.BITSHUFFLE}
_SUM_BYTES = 4


def image_codecs(
    dtype: str, chunk: Sequence[int], *, cname: str = "zstd", level: int = 3, shuffle: str = "shuffle"
) -> tuple[dict[str, Any], ...]:
    """Blosc, one block a chunk, then a checksum."""
    itemsize = np.dtype(dtype).itemsize
    settings = {
        "typesize": itemsize,
        "cname": cname,
        "clevel": level,
        "shuffle": shuffle,
        "blocksize": itemsize * math.prod(chunk),
    }
    return (_bytes_codec(dtype), {"name": "blosc", "configuration": settings}, {"name": "crc32c"})


def label_codecs(dtype: str, *, level: int = 3) -> tuple[dict[str, Any], ...]:
    """zstd, then a checksum."""
    settings = {"level": level, "checksum": False}
    return (_bytes_codec(dtype), {"name": "zstd", "configuration": settings}, {"name": "crc32c"})


def _bytes_codec(dtype: str) -> dict[str, Any]:
    return (
        {"name": "bytes", "configuration": {"endian": "little"}} if np.dtype(dtype).itemsize > 1 else {"name": "bytes"}
    )


class ChunkCodec:
    """Encodes and decodes chunks of one array. Safe to use from many threads, which then work side by side: the
    compressors let go of the interpreter's lock."""

    def __init__(self, codecs: Sequence[Mapping[str, Any]], dtype: str) -> None:
        names = [str(codec["name"]) for codec in codecs]
        self._sum = names[-1:] == ["crc32c"]
        body = names[1:-1] if self._sum else names[1:]
        if names[:1] != ["bytes"] or len(body) > 1 or (body and body[0] not in ("blosc", "zstd")):
            raise PreparedError(
                f"an array is coded with {', '.join(names)}, which this reader does not know",
                fix="Read it with another Zarr library, or prepare the dataset again",
            )
        endian = codecs[0].get("configuration", {}).get("endian", "little")
        self._dtype = np.dtype(dtype).newbyteorder("<" if endian == "little" else ">")
        settings = codecs[1].get("configuration", {}) if body else {}
        self._compressor: Any = None
        self._decompress: Any = None
        if body == ["zstd"]:
            self._compressor = numcodecs.Zstd(level=settings.get("level", 0), checksum=settings.get("checksum", False))
            self._decompress = self._compressor.decode
        elif body == ["blosc"]:
            shuffle = _SHUFFLES[settings["shuffle"]]
            self._compressor = blosc.Blosc(settings["cname"], settings["clevel"], shuffle, settings["blocksize"])
            self._decompress = blosc.decompress  # the compressor's own method looks at its arguments once more: 10 us

    def encode(self, chunk: npt.NDArray[Any]) -> bytes:
        """The chunk's bytes."""
        values = np.ascontiguousarray(chunk, self._dtype)
        body = bytes(self._compressor.encode(values)) if self._compressor else values.tobytes()
        return body + checksum(body).to_bytes(_SUM_BYTES, "little") if self._sum else body

    def empty(self, shape: Sequence[int]) -> npt.NDArray[Any]:
        """Memory for `decode`."""
        return np.empty(tuple(shape), self._dtype)

    def decode(self, stored: memoryview, into: npt.NDArray[Any]) -> None:
        """Fill `into`, a chunk from `empty`, from what `encode` gave; ValueError when the bytes are damaged."""
        body = stored
        if self._sum:
            body = stored[:-_SUM_BYTES]
            if checksum(body) != int.from_bytes(stored[-_SUM_BYTES:], "little"):
                raise ValueError("its checksum is wrong")
        if self._compressor is None:
            into.reshape(-1).view(np.uint8)[:] = np.frombuffer(body, np.uint8)
            return
        try:
            self._decompress(body, into)
        except RuntimeError as error:
            raise ValueError(str(error)) from None


def checksum(data: Any) -> int:
    """CRC-32C."""
    return int(google_crc32c.value(bytes(data)))
