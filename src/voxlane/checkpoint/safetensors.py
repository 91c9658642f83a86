"""Model weights in safetensors files at URIs: written as a stream, read tensor by tensor.

The format is a length, a JSON header and plain bytes. The safetensors package works on local files and byte strings;
this module reads and writes the same files in buckets. A test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from voxlane.checkpoint.plain import CheckpointWriter
from voxlane.checkpoint.verified_reader import ReadTarget, open_verified, view_bytes
from voxlane.errors import CheckpointError, ConfigError, MismatchError
from voxlane.store import ObjectInfo, Store, StoreConfig
from voxlane.uri import StrPath

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000
"""Longest header that is accepted, as in the safetensors package."""
_HEADER_GUESS_BYTES = 256 * 1024
"""Bytes that the first request reads; most headers are shorter."""


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and byte range of a tensor in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    stop: int
    """End of the bytes, exclusive, counted from the start of the file."""


def save_safetensors(
    tensors: Mapping[str, torch.Tensor],
    uri: StrPath,
    config: StoreConfig | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> ObjectInfo:
    """Write the tensors of a state dict to a `.safetensors` file at `uri`, using about 100 MB of memory.

    The file is published when it is complete. Tensors that share memory are written separately. `metadata` holds
    strings to store in the header.
    """
    size, chunks = encode_safetensors(tensors, metadata=metadata)
    store, key = Store.locate(uri, config)
    with CheckpointWriter(store, key, size) as file:
        for chunk in chunks:
            file.write(chunk)
        return file.commit()


def encode_safetensors(
    tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> tuple[int, Iterator[Any]]:
    """Return the size in bytes of a safetensors file with these tensors, and its content in buffers that follow each
    other. Larger item sizes come first, as the safetensors package does, so that every tensor is aligned to its own
    item size."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    order = sorted(tensors.items(), key=lambda item: (-_require_plain(*item).dtype.itemsize, item[0]))
    for name, tensor in order:
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def iterate() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in order:
            yield view_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())

    return 8 + len(text) + offset, iterate()


def decode_safetensors(body: bytes, uri: str = "") -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a safetensors file that was read already; errors name `uri`."""
    entries, _ = _read_header(lambda start, stop: body[start:stop], len(body), uri)
    tensors = {}
    for name, entry in entries.items():
        tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
        view_bytes(tensors[name])[...] = np.frombuffer(body, np.uint8, entry.stop - entry.start, entry.start)
    return tensors


class SafetensorsFile:
    """A safetensors file at a URI. Opening it reads the header; `load` reads tensors in concurrent ranges and verifies
    them if the file has checksums.

        file = SafetensorsFile("gs://bucket/model.safetensors")
        file.names()
        file.load(["encoder.0.weight", "encoder.0.bias"])
    """

    def __init__(self, uri: StrPath, config: StoreConfig | None = None) -> None:
        self._source = open_verified(*Store.locate(uri, config))
        self.uri = self._source.uri
        self._entries, self.metadata = _read_header(self._source.read_bytes, self._source.info.size, self.uri)

    def names(self) -> list[str]:
        """Return the names of the tensors in the file's order."""
        return list(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """Return the type, shape and byte range of a tensor."""
        if name not in self._entries:
            raise MismatchError(
                f"no tensor {name!r}",
                uri=self.uri,
                fix=f"The file has {len(self._entries)} tensors, such as {self.names()[:3]}",
            )
        return self._entries[name]

    def load(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Return these tensors (default: all) on the CPU; only their bytes are read."""
        entries = [self.entry(name) for name in (self.names() if names is None else names)]
        tensors = {e.name: torch.empty(e.shape, dtype=e.dtype) for e in entries}
        self._source.read_targets([ReadTarget(e.start, view_bytes(tensors[e.name])) for e in entries])
        return tensors


def load_safetensors(
    uri: StrPath, config: StoreConfig | None = None, *, names: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or those in `names`; only their bytes are read."""
    return SafetensorsFile(uri, config).load(names)


def _require_plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        kind = f"{tensor.dtype} {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(f"{name!r} is a {kind}, which safetensors cannot store", fix="Pass plain, dense tensors")
    return tensor


def _read_header(
    read: Callable[[int, int], bytes], size: int, uri: str
) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Parse the header of a file of `size` bytes, whose bytes [start, stop) `read` returns."""
    head = read(0, min(size, _HEADER_GUESS_BYTES))
    length = int.from_bytes(head[:8], "little")
    try:
        if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError("no header")
        text = head[8 : 8 + length] if 8 + length <= len(head) else read(8, 8 + length)
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        entries = {name: _parse_entry(name, fields, 8 + length, size) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"not a safetensors file ({error})", uri=uri) from None
    return dict(sorted(entries.items(), key=lambda item: item[1].start)), metadata


def _parse_entry(name: str, fields: Mapping[str, Any], data_start: int, size: int) -> TensorEntry:
    low, high = fields["data_offsets"]
    entry = TensorEntry(name, _DTYPES[fields["dtype"]], tuple(fields["shape"]), data_start + low, data_start + high)
    nbytes = entry.dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
    if not 0 <= low <= high or entry.stop > size or entry.stop - entry.start != nbytes:
        raise ValueError(f"{name!r} lies outside the file, or its size does not match its shape")
    return entry
