"""`dataflux_pytorch.dataflux_checkpoint`, based on `voxlane.Checkpoint`."""

from __future__ import annotations

import io
import warnings
from types import TracebackType
from typing import Any

from voxlane.checkpoint.plain import CheckpointWriter
from voxlane.checkpoint.reader import RangedReader
from voxlane.checkpoint.verified_reader import open_verified
from voxlane.compat.dataflux.clients import ClientHolder, is_foreign_blob, locate_blob
from voxlane.compat.dataflux.multipart_upload.multipart import upload_chunks_concurrently_from_bytesio as upload
from voxlane.errors import DiscardedWarning

__all__ = ["DatafluxCheckpoint", "DatafluxCheckpointBuffer", "DatafluxCheckpointReader"]


class DatafluxCheckpointBuffer(CheckpointWriter):
    """A file that uploads to a Blob while it is written. It publishes at `close()` and at the end of a `with` block,
    and nothing after an exception in the block."""

    def __init__(self, blob: Any) -> None:
        self.blob = blob
        super().__init__(*locate_blob(blob))


class ClientBuffer(io.BytesIO):
    """A file in memory that is uploaded with its client's own methods when it is closed."""

    def __init__(self, blob: Any) -> None:
        super().__init__()
        self.blob = blob

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            super().close()
        self.close()

    def close(self) -> None:
        """Upload the contents, once."""
        if not self.closed:
            upload(self, self.blob)
        super().close()

    def __del__(self) -> None:
        if not self.closed:
            super().close()  # publishes nothing
            warnings.warn(f"{self.blob.name}: discarded, because it was not closed", DiscardedWarning, stacklevel=2)


DatafluxCheckpointBuffer.register(ClientBuffer)  # the type of both, for isinstance


class DatafluxCheckpointReader(RangedReader):
    """A seekable file over an object that is fetched in concurrent ranges, with two more methods of BytesIO."""

    read = RangedReader.read  # torch.load looks for it in the class itself

    def getvalue(self) -> bytes:
        """Return the whole object; the position stays."""
        position = self.tell()
        self.seek(0)
        body = self.read() or b""
        self.seek(position)
        return body

    def getbuffer(self) -> memoryview:
        """Return a read-only view of the whole object."""
        return memoryview(self.getvalue())


def open_reader(blob: Any) -> DatafluxCheckpointReader | io.BytesIO:
    """Open the object of a Blob for reading."""
    if not is_foreign_blob(blob):
        return DatafluxCheckpointReader(open_verified(*locate_blob(blob)))
    stream = io.BytesIO()
    blob.download_to_file(stream)
    stream.seek(0)
    return stream


def open_writer(blob: Any) -> DatafluxCheckpointBuffer | ClientBuffer:
    """Open the object of a Blob for writing."""
    return ClientBuffer(blob) if is_foreign_blob(blob) else DatafluxCheckpointBuffer(blob)


class DatafluxCheckpoint(ClientHolder):
    """Dataflux's checkpoint: files in a bucket for `torch.save` and `torch.load`."""

    def __init__(self, project_name: str | None, bucket_name: str, storage_client: Any = None) -> None:
        super().__init__(project_name, storage_client)
        self.bucket_name = bucket_name

    @property
    def bucket(self) -> Any:
        """The client's Bucket."""
        return self.storage_client.bucket(self.bucket_name)

    def reader(self, object_name: str) -> DatafluxCheckpointReader | io.BytesIO:
        """Open an object for reading; its bytes are verified if it was written with `writer`."""
        return open_reader(self.blob(self.bucket_name, object_name))

    def writer(self, object_name: str) -> DatafluxCheckpointBuffer | ClientBuffer:
        """Open an object for writing."""
        return open_writer(self.blob(self.bucket_name, object_name))
