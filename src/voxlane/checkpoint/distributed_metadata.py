"""The `.metadata` object of a distributed checkpoint, which makes it complete and describes its contents.

It is torch's own pickled `Metadata`, so torch's readers accept it, with three additions that they ignore: the
checksums of every file (in `storage_meta`), the offset of each tensor's plain bytes in its item (in `storage_data`),
and a checksum of the pickle after its end. Only the types that torch stores there are unpickled.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from voxlane import uri as uris
from voxlane.checkpoint.checksums import Checksums, corrupt_error, digest
from voxlane.errors import CheckpointError, ConfigError, CorruptError, IncompleteError, UnsafeError
from voxlane.store import ObjectInfo, Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.store.retry import read_until_intact
from voxlane.uri import StrPath

METADATA = ".metadata"
"""The object whose presence makes a checkpoint complete."""
DATA_SUFFIX = ".distcp"
_MAGIC = b"VOXLANE1"
_ADDITION = "voxlane"
PAYLOAD_OFFSET = "payload_offset"
"""Attribute of a tensor's `_StorageInfo`: where its plain bytes begin in its item, if that was recorded."""
_ATTACHMENT = re.compile(r"\.[0-9a-f]{12}\.attached$")
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


def attachment_path(name: str, save_id: str) -> str:
    """Return the path of an attachment: its name, made unique."""
    return f"{name}.{save_id}.attached"


def is_attachment(key: str) -> bool:
    """Return whether this is the key of an attachment."""
    return _ATTACHMENT.search(key) is not None


class CheckpointLocation:
    """Base of the writer and the reader of a checkpoint: its location, in the terms of torch's protocol."""

    _config: StoreConfig | None
    _store: Store
    _folder: str
    """Key of the checkpoint's folder, ending in a slash; empty for the bucket itself."""

    def _set_location(self, checkpoint_id: StrPath) -> None:
        self._store, key = Store.locate(uris.from_path(checkpoint_id), self._config)
        self._folder = key.rstrip("/") + "/" if key else ""

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's URI."""
        return self._store.uri(self._folder).rstrip("/")

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether voxlane supports this kind of URI."""
        try:
            uris.parse(checkpoint_id)
        except ConfigError:
            return False
        return True


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a distributed checkpoint that voxlane wrote."""

    checksums: Mapping[str, Checksums]
    """Checksums of each file by its path below the checkpoint's folder."""
    attachments: Mapping[str, str] = field(default_factory=dict)
    """Path of each attached file by its name."""
    world_size: int = 1
    """Number of ranks that wrote the checkpoint."""


def encode(metadata: Metadata, files: CheckpointFiles) -> bytes:
    """Return the bytes of `.metadata`."""
    assert metadata.storage_meta is not None
    plain = {
        "files": {path: checksums.to_json() for path, checksums in files.checksums.items()},
        "attachments": dict(files.attachments),
        "world_size": files.world_size,
    }
    setattr(metadata.storage_meta, _ADDITION, plain)
    body = pickle.dumps(metadata)
    return body + _MAGIC + digest(body)


def decode(data: bytes, uri: str) -> tuple[Metadata, CheckpointFiles | None]:
    """Return the metadata and files from the bytes of `.metadata`; files are None if voxlane did not write it."""
    is_signed = data[-16:-8] == _MAGIC
    if is_signed and digest(memoryview(data)[:-16]) != data[-8:]:
        raise corrupt_error(uri, "its bytes are not those that were written")
    try:
        metadata = _Unpickler(io.BytesIO(data), uri).load()
    except UnsafeError:
        raise
    except Exception as error:  # noqa: BLE001 - unpickling damaged bytes can raise anything; it becomes one error
        raise corrupt_error(uri, f"not the metadata of a checkpoint ({error})") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"holds a {type(metadata).__name__}, not the metadata of a checkpoint", uri=uri)
    plain = getattr(metadata.storage_meta, _ADDITION, None)
    _check_paths(metadata, plain, uri)
    if plain is None:
        return metadata, None
    if not is_signed:
        raise corrupt_error(uri, "the checksum at its end is damaged")
    files = {path: Checksums.from_json(checksums, uri) for path, checksums in plain["files"].items()}
    return metadata, CheckpointFiles(files, plain["attachments"], plain["world_size"])


def _check_paths(metadata: Metadata, plain: Any, uri: str) -> None:
    """Raise UnsafeError if the metadata names a file outside the checkpoint, which would be read and even removed."""
    paths = {info.relative_path for info in (metadata.storage_data or {}).values()}
    if plain is not None:
        paths |= {*plain["files"], *plain["attachments"].values()}
    if outside := [path for path in paths if not (isinstance(path, str) and uris.stays_below(path))]:
        raise UnsafeError(
            f"it names the file {outside[0]!r}, which is outside the checkpoint",
            uri=uri,
            fix="Do not use this checkpoint: nothing that saves checkpoints writes such a name",
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, uri: str) -> None:
        super().__init__(file)
        self._uri = uri

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype | torch.layout):
            return value
        raise UnsafeError(
            f"it refers to {module}.{name}, which no checkpoint metadata needs and which could run code",
            uri=self._uri,
            fix="Do not load it unless you trust its origin; torch's own FileSystemReader would run it",
        )


def read(store: Store, folder: str) -> tuple[Metadata, CheckpointFiles | None]:
    """Return the metadata of the checkpoint in `folder` (a key that ends in a slash). Raises IncompleteError if there
    is none."""
    key = folder + METADATA
    with ignore_missing_object():
        uri = store.uri(key)
        return read_until_intact(lambda: decode(bytes(store.get(key)), uri), CorruptError, store.counters)
    raise no_complete_checkpoint(store.uri(folder))


def no_complete_checkpoint(uri: str) -> IncompleteError:
    """Return the error for a URI without a complete checkpoint."""
    return IncompleteError(
        "no complete checkpoint here", uri=uri, fix="List the checkpoints that exist: voxlane checkpoint ls"
    )


def expected_items(metadata: Metadata) -> set[MetadataIndex]:
    """Return every item that a complete checkpoint with this metadata has stored."""
    items: set[MetadataIndex] = set()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            items |= {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks}
        elif isinstance(entry, BytesStorageMetadata):
            items.add(MetadataIndex(name))
    return items


def file_sizes(metadata: Metadata, files: CheckpointFiles | None) -> dict[str, int]:
    """Return the size in bytes of each file of the checkpoint; minimum sizes if voxlane did not write it."""
    if files is not None:
        return {path: checksums.size for path, checksums in files.checksums.items()}
    sizes: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
    return sizes


@dataclass(frozen=True)
class StoredFile:
    """A file that a rank stored, as it reports it to the coordinator."""

    path: str
    """Path below the checkpoint's folder."""
    info: ObjectInfo
    checksums: Checksums
