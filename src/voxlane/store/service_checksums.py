"""Checksums that services send with an object, to check the bytes that arrive.

Nothing else notices a byte that a proxy, a network card or a memory module changed on the way: TCP's own checksum is
weak, and TLS protects only the connection.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from voxlane.errors import DamagedError, StoreError
from voxlane.store.crc32c import crc32c
from voxlane.store.translate import WrongBytesError

_MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')
_GOOG_HASH = re.compile(r"(crc32c|md5)=([A-Za-z0-9+/]+=*)")


class Hasher(Protocol):
    """Computes a checksum from chunks."""

    def update(self, data: Any, /) -> None:
        """Add the next chunk."""
        ...

    def digest(self) -> bytes:
        """Return the checksum of all chunks."""
        ...


class Crc32c:
    """CRC-32C with the interface of hashlib's hashes."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: Any, /) -> None:
        """Add the next chunk."""
        self.value = crc32c(data, self.value)

    def digest(self) -> bytes:
        """Return the checksum of all chunks."""
        return self.value.to_bytes(4, "big")


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


class _Crc64Nvme:
    def __init__(self) -> None:
        from awscrt.checksums import crc64nvme  # takes 25 ms to import

        self._value = 0
        self._extend = crc64nvme

    def update(self, data: Any, /) -> None:
        self._value = self._extend(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(8, "big")


_HASHERS: Mapping[str, Callable[[], Hasher]] = {
    "crc32c": Crc32c,
    "crc64nvme": _Crc64Nvme,
    "crc32": _Crc32,
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha256": hashlib.sha256,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
}
"""By the names in the services' headers, fastest first."""


@dataclass(frozen=True)
class ServiceChecksum:
    """The checksum of a whole object, as its service states it."""

    algorithm: str
    value: bytes
    header: str
    """Header that states it."""

    def new_hasher(self) -> Hasher:
        """Return what computes this kind of checksum."""
        return _HASHERS[self.algorithm]()

    def check(self, digest: bytes, uri: str) -> None:
        """Raise WrongBytesError, so that the bytes are read again, if their checksum is another one."""
        if digest == self.value:
            return
        problem = f"the bytes differ from the service's {self.algorithm} checksum ({self.header})"

        def blame(num_reads: int) -> StoreError:
            fix = "Something between here and the service damages the bytes (use https, try another machine), or the "
            fix += "stored object is damaged: write it again"
            if self.header == "etag":
                fix += '. If the ETags of this server are no MD5s, set StoreConfig(verify="crc")'
            return DamagedError(f"{problem} after {num_reads} read{'s' * (num_reads != 1)}", uri=uri, fix=fix)

        raise WrongBytesError(problem, uri, blame)


def find_service_checksum(headers: Mapping[str, str], *, is_s3: bool, is_range: bool) -> ServiceChecksum | None:
    """Return the fastest checksum of the whole object that a response states, or None. The names of `headers` are in
    lower case. `is_range`: the request was for a range, for which S3 states checksums of something else."""
    stated: dict[str, tuple[str, str]] = {}
    for name, text in _GOOG_HASH.findall(headers.get("x-goog-hash", "")):
        stated[name] = text, "x-goog-hash"
    if is_s3 and not is_range and headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        for name in _HASHERS:
            text = headers.get(f"x-amz-checksum-{name}", "")
            if text and "-" not in text:  # a dash: a checksum of the parts' checksums
                stated[name] = text, f"x-amz-checksum-{name}"
    # Azure states the whole object's MD5 in another header if the request is for a range.
    for header in ("x-ms-blob-content-md5",) if is_range else ("content-md5", "x-ms-blob-content-md5"):
        if header in headers and not is_s3:
            stated["md5"] = headers[header], header
    for name in _HASHERS:
        if name in stated and (name != "crc64nvme" or _has_awscrt()):
            text, header = stated[name]
            try:
                return ServiceChecksum(name, base64.b64decode(text, validate=True), header)
            except ValueError:  # damaged on the way
                continue
    return _find_md5_etag(headers) if is_s3 else None


@functools.cache
def _has_awscrt() -> bool:
    """Return whether awscrt, which the `s3` extra installs, is there: no other library computes CRC64NVME."""
    return importlib.util.find_spec("awscrt") is not None


def _find_md5_etag(headers: Mapping[str, str]) -> ServiceChecksum | None:
    """Return the MD5 in the etag of S3. Objects that were uploaded in parts or are encrypted with keys of their own
    have other etags."""
    match = _MD5_ETAG.fullmatch(headers.get("etag", ""))
    is_other = headers.get("x-amz-server-side-encryption", "AES256") != "AES256"
    if match is None or is_other or "x-amz-server-side-encryption-customer-algorithm" in headers:
        return None
    return ServiceChecksum("md5", bytes.fromhex(match[1]), "etag")
