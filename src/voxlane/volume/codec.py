"""Encoding of chunks with the Zarr codecs bytes, blosc, zstd and crc32c, and our choice among them.

Measured on CT clipped to a training window, in 32-cubed chunks (benchmarks/results, `patch_readers`): Blosc with byte
shuffle and zstd at level 3 needs 12% fewer bytes than with bit shuffle, and 3% more than at level 5, which takes more
than twice as long to encode. lz4 decodes almost twice as fast but needs 50% more bytes. For labels, which are nearly
constant, plain zstd decodes fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.errors import MissingExtraError, PreparedError
from voxlane.store.crc32c import crc32c

try:
    import numcodecs
    from numcodecs import blosc
except ImportError:
    raise MissingExtraError.of("train", "Reading and writing prepared volumes") from None

# Blosc's own threads are shared by the process and do not survive a fork. Chunks are small, and callers use threads.
blosc.use_threads = False

_SHUFFLES = {"noshuffle": blosc.NOSHUFFLE, "shuffle": blosc.SHUFFLE, "bitshuffle": blosc.BITSHUFFLE}
_CHECKSUM_BYTES = 4


def image_codecs(
    dtype: str, chunk: Sequence[int], *, cname: str = "zstd", level: int = 3, shuffle: str = "shuffle"
) -> tuple[dict[str, Any], ...]:
    """Return the codecs for images: Blosc with one block per chunk, then a checksum."""
    itemsize = np.dtype(dtype).itemsize
    settings = {"typesize": itemsize, "cname": cname, "clevel": level, "shuffle": shuffle}
    settings |= {"blocksize": itemsize * math.prod(chunk)}
    return (_bytes_codec(dtype), {"name": "blosc", "configuration": settings}, {"name": "crc32c"})


def label_codecs(dtype: str, *, level: int = 3) -> tuple[dict[str, Any], ...]:
    """Return the codecs for labels: zstd, then a checksum."""
    settings = {"level": level, "checksum": False}
    return (_bytes_codec(dtype), {"name": "zstd", "configuration": settings}, {"name": "crc32c"})


def _bytes_codec(dtype: str) -> dict[str, Any]:
    configuration = {"configuration": {"endian": "little"}} if np.dtype(dtype).itemsize > 1 else {}
    return {"name": "bytes", **configuration}


class ChunkCodec:
    """Encodes and decodes chunks of one array. Threads run in parallel, because compressors release the GIL."""

    def __init__(self, codecs: Sequence[Mapping[str, Any]], dtype: str) -> None:
        names = [str(codec["name"]) for codec in codecs]
        self._has_checksum = names[-1:] == ["crc32c"]
        body = names[1:-1] if self._has_checksum else names[1:]
        if names[:1] != ["bytes"] or len(body) > 1 or (body and body[0] not in ("blosc", "zstd")):
            raise PreparedError(
                f"an array uses the codecs {', '.join(names)}, which this reader does not support",
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
            self._decompress = blosc.decompress  # the compressor's method checks its arguments again, which takes 10 us

    def encode(self, chunk: npt.NDArray[Any]) -> bytes:
        """Encode a chunk."""
        values = np.ascontiguousarray(chunk, self._dtype)
        body = bytes(self._compressor.encode(values)) if self._compressor else values.tobytes()
        return body + checksum(body).to_bytes(_CHECKSUM_BYTES, "little") if self._has_checksum else body

    def empty(self, shape: Sequence[int]) -> npt.NDArray[Any]:
        """Allocate an array for `decode`."""
        return np.empty(tuple(shape), self._dtype)

    def decode(self, encoded: memoryview, output: npt.NDArray[Any]) -> None:
        """Decode a chunk into `output`, which comes from `empty`; raise ValueError if the bytes are damaged."""
        body = encoded
        if self._has_checksum:
            body = encoded[:-_CHECKSUM_BYTES]
            if checksum(body) != int.from_bytes(encoded[-_CHECKSUM_BYTES:], "little"):
                raise ValueError("its checksum does not match")
        if self._compressor is None:
            output.reshape(-1).view(np.uint8)[:] = np.frombuffer(body, np.uint8)
            return
        try:
            self._decompress(body, output)
        except RuntimeError as error:
            raise ValueError(str(error)) from None


def checksum(data: Any) -> int:
    """Return the CRC-32C of `data`."""
    return crc32c(data)
