"""The `.metadata` object of a distributed checkpoint: what makes it complete, and what it holds.

It is torch's own pickled `Metadata`, so that torch's readers take it, with three additions they do not see: the
checksums of every file (in `storage_meta`), where each tensor's plain bytes lie inside its item (in `storage_data`),
and a checksum of the pickle itself after its end. We unpickle only the types that torch puts there.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from voxlane import uri as uris
from voxlane.checkpoint.sums import Sums, corrupt, digest
from voxlane.errors import CheckpointError, ConfigError, IncompleteError, NotFoundError, UnsafeError
from voxlane.store import ObjectInfo, Store

METADATA = ".metadata"
"""The object whose presence makes a checkpoint complete."""
DATA_SUFFIX = ".distcp"
_MAGIC = b"VOXLANE1"
_ADDITION = "voxlane"
_PAYLOAD = "payload_offset"

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath"},
}


_ATTACHMENT = re.compile(r"\.[0-9a-f]{12}\.attached$")


def attachment_path(name: str, save_id: str) -> str:
    """The path of an attachment: its name, made unique."""
    return f"{name}.{save_id}.attached"


def is_attachment(key: str) -> bool:
    """Whether this is the key of an attachment."""
    return _ATTACHMENT.search(key) is not None


class AtUri:
    """What the writer and the reader of a checkpoint share: where it is, as torch asks for it."""

    _store: Store
    _folder: str
    """Key of the checkpoint's folder, ending in a slash."""

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URI."""
        return self._store.uri(self._folder).rstrip("/")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether voxlane knows this kind of URI."""
        try:
            uris.parse(checkpoint_id)
        except ConfigError:
            return False
        return True


@dataclass(frozen=True)
class Files:
    """The files of a distributed checkpoint that voxlane wrote."""

    sums: Mapping[str, Sums]
    """By path below the checkpoint's folder."""
    attachments: Mapping[str, str] = field(default_factory=dict)
    """Path of each attached file by the name it was given."""
    world_size: int = 1
    """Ranks that wrote it."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(sums.size for sums in self.sums.values())


def encode(metadata: Metadata, files: Files) -> bytes:
    """The bytes of `.metadata`."""
    assert metadata.storage_meta is not None
    plain = {
        "files": {path: sums.to_json() for path, sums in files.sums.items()},
        "attachments": dict(files.attachments),
        "world_size": files.world_size,
    }
    setattr(metadata.storage_meta, _ADDITION, plain)
    body = pickle.dumps(metadata)
    return body + _MAGIC + digest(body)


def decode(data: bytes, uri: str) -> tuple[Metadata, Files | None]:
    """Read `.metadata`; the files are None when it was written by another tool than voxlane."""
    is_signed = data[-16:-8] == _MAGIC
    if is_signed and digest(memoryview(data)[:-16]) != data[-8:]:
        raise corrupt(uri, "the bytes are not those that were written")
    try:
        metadata = _Unpickler(io.BytesIO(data), uri).load()
    except UnsafeError:
        raise
    except Exception as error:  # noqa: BLE001 - unpickling damaged bytes can raise anything; it becomes one error
        raise corrupt(uri, f"not the metadata of a checkpoint ({error})") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"holds a {type(metadata).__name__}, not the metadata of a checkpoint", uri=uri)
    plain = getattr(metadata.storage_meta, _ADDITION, None)
    if plain is None:
        return metadata, None
    if not is_signed:
        raise corrupt(uri, "the checksum at its end is damaged")
    files = {path: Sums.from_json(sums, uri) for path, sums in plain["files"].items()}
    return metadata, Files(files, plain["attachments"], plain["world_size"])


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, uri: str) -> None:
        super().__init__(file)
        self._uri = uri

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        raise UnsafeError(
            f"names {module}.{name}, which no checkpoint metadata needs and which could run code",
            uri=self._uri,
            fix="Do not load it unless you know where it comes from; torch's own FileSystemReader would run it",
        )


def read(store: Store, folder: str) -> tuple[Metadata, Files | None]:
    """The metadata of the checkpoint in `folder` (a key that ends in a slash); IncompleteError when there is none."""
    key = folder + METADATA
    try:
        data = bytes(store.get(key))
    except NotFoundError as error:
        if type(error) is not NotFoundError:
            raise
        raise IncompleteError(
            "no complete checkpoint here", uri=store.uri(folder), fix="See what there is: voxlane checkpoint ls"
        ) from None
    return decode(data, store.uri(key))


def with_payload(info: _StorageInfo, payload_offset: int | None) -> _StorageInfo:
    """Note in `info` where the tensor's plain bytes begin inside its item."""
    if payload_offset is not None:
        setattr(info, _PAYLOAD, payload_offset)
    return info


def payload_offset(info: _StorageInfo) -> int | None:
    """Where the tensor's plain bytes begin inside its item, if that is known."""
    return getattr(info, _PAYLOAD, None)


def expected_items(metadata: Metadata) -> set[MetadataIndex]:
    """Every item that a complete checkpoint of this metadata has stored."""
    items: set[MetadataIndex] = set()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            items |= {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks}
        elif isinstance(entry, BytesStorageMetadata):
            items.add(MetadataIndex(name))
    return items


def file_sizes(metadata: Metadata, files: Files | None) -> dict[str, int]:
    """The files that make up the checkpoint, with their sizes; of a foreign one, the least size they can have."""
    if files is not None:
        return {path: sums.size for path, sums in files.sums.items()}
    sizes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes


def new_storage_meta(uri: str) -> StorageMeta:
    """What goes into `Metadata.storage_meta`."""
    return StorageMeta(checkpoint_id=uri)


@dataclass(frozen=True)
class StoredFile:
    """What a rank tells of a file it stored."""

    path: str
    """Below the checkpoint's folder."""
    info: ObjectInfo
    sums: Sums
