"""CRC-32C, the checksum that GCS and S3 send, computed by the processor's own instruction.

google-crc32c holds the interpreter's lock while it computes. Its C library is called through ctypes, which does not, so
that other threads go on.
"""

from __future__ import annotations

import base64
import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import google_crc32c
import numpy as np

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with the bits reversed."""
_ONE = 1 << 31
"""The polynomial 1."""


def _load_function() -> Callable[[int, int, int], int] | None:
    """Return `crc32c_extend(crc, address, num_bytes)` of the C library, or None where it is linked in another way."""
    try:
        library = ctypes.CDLL(google_crc32c._crc32c.__file__)
        function = library.crc32c_extend
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint32
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    return cast("Callable[[int, int, int], int]", function)


_extend = _load_function()


def crc32c(data: Any, before: int = 0) -> int:
    """Return the checksum of `data`, any contiguous buffer, after bytes with the checksum `before`."""
    view = np.frombuffer(data, np.uint8)
    if _extend is None:
        return int(google_crc32c.extend(before, view))
    return _extend(before, view.__array_interface__["data"][0], len(view))


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of consecutive parts, each given as (checksum, number of bytes)."""
    total = 0
    for checksum, num_bytes in parts:
        total = _multiply(_shift(num_bytes), total) ^ checksum
    return total


def decode(text: str) -> int:
    """Return the checksum that a service's header holds in base64; raise ValueError if it holds none."""
    return int.from_bytes(base64.b64decode(text, validate=True), "big")


@functools.lru_cache(maxsize=64)
def _shift(num_bytes: int) -> int:
    """Return x to the power of `8 * num_bytes`, modulo the polynomial."""
    result, square, exponent = _ONE, _ONE >> 1, 8 * num_bytes
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
