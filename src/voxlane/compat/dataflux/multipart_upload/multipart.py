"""`dataflux_pytorch.multipart_upload.multipart`, based on voxlane's streaming writer."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from voxlane.compat.dataflux.clients import is_foreign_blob, locate_blob
from voxlane.store import RetryConfig, Store

TM_DEFAULT_CHUNK_SIZE = 32 << 20
DEFAULT_MAX_WORKERS = 8


def upload_chunks_concurrently_from_bytesio(
    bytesio: io.BytesIO,
    blob: Any,
    content_type: str | None = None,
    chunk_size: int = TM_DEFAULT_CHUNK_SIZE,
    deadline: float | None = None,
    max_workers: int = DEFAULT_MAX_WORKERS,
    *,
    checksum: str | None = "crc32c",
    timeout: Any = None,
    retry: Any = None,
) -> None:
    """Upload the whole buffer as one object, in parts and concurrently; it is published completely or not at all.

    With `deadline` no part is retried later than so many seconds. voxlane chooses the size and number of parts. An
    object with a content type, metadata or an encryption key is uploaded in one stream by google-cloud-storage itself.
    """
    view = bytesio.getbuffer()
    if is_foreign_blob(blob):
        with blob.open("wb", ignore_flush=True) as file:
            file.write(bytes(view))
        return
    if content_type is not None or _has_settings(blob):
        blob.upload_from_file(io.BytesIO(view), content_type=content_type, checksum=checksum)
        return
    store, key = locate_blob(blob)
    if deadline is not None:
        config = replace(store.config, retry=RetryConfig(deadline_s=float(deadline)))
        store = Store(store.root, config)
    with store.open_writer(key, size_hint=len(view)) as writer:
        writer.write(view)


def _has_settings(blob: Any) -> bool:
    """Return whether the object needs more than its bytes: only the client sends its settings."""
    return bool(blob._changes or blob.kms_key_name or blob._encryption_key or blob.user_project)
