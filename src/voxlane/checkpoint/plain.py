"""`Checkpoint`: file-like writers and readers for `torch.save` and `torch.load`."""

from __future__ import annotations

from voxlane import uri as uris
from voxlane.checkpoint.reader import RangedReader
from voxlane.store import Store, StoreConfig, Writer


class Checkpoint:
    """Checkpoints below a URI.

        ckpt = Checkpoint("gs://bucket/run1")
        with ckpt.writer("epoch0.ckpt") as file:
            torch.save(model.state_dict(), file)
        with ckpt.reader("epoch0.ckpt") as file:
            state = torch.load(file)

    The writer uploads while you write, in bounded memory, and publishes only when the block ends without an
    exception.
    """

    def __init__(self, uri: str, config: StoreConfig | None = None) -> None:
        parsed = uris.parse(uri)
        self._store = Store(uri, config)
        self._prefix = parsed.key + "/" if parsed.key and not parsed.key.endswith("/") else parsed.key

    def writer(self, path: str) -> Writer:
        """A file to write `path` (relative to the URI); see `Writer` for when it is published."""
        return self._store.open_writer(self._key(path))

    def reader(self, path: str) -> RangedReader:
        """A seekable file over `path`, fetched in concurrent ranges."""
        return RangedReader(self._store, self._key(path))

    def _key(self, path: str) -> str:
        return self._prefix + path.lstrip("/")
