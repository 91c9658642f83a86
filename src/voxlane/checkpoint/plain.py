"""`Checkpoint`: one file a checkpoint, for `torch.save`, `torch.load` and anything else that takes a file."""

from __future__ import annotations

import os
import pickle
import tempfile
from typing import Any

import torch

from voxlane import uri as uris
from voxlane.checkpoint.collective import Ranks
from voxlane.checkpoint.reader import RangedReader
from voxlane.checkpoint.shared_reader import SharedReader
from voxlane.checkpoint.source import (
    SUMS_SUFFIX,
    Contents,
    add_contents,
    add_missing_contents,
    open_source,
    read_contents,
    unchecked_before,
)
from voxlane.checkpoint.writer import SummedWriter
from voxlane.errors import CheckpointError, CorruptError, UnsafeError, VoxlaneError
from voxlane.store import ObjectInfo, Store, StoreConfig


class CheckpointWriter(SummedWriter):
    """A `Writer` that also keeps checksums, in a small object beside the file (its name and `.sums`), so that every
    later read can be checked.

    The checksums are noted before the file is published, beside those of the file it replaces; so whenever the process
    dies, what is there has its checksums.
    """

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        super().__init__(store, key, size_hint)
        self._before = store.submit(_known_before, store, key)

    def commit(self) -> ObjectInfo:
        """Finish the upload; when this returns the file is there, whole, with its checksums."""
        self._check_open()
        try:
            self.finish_parts()
            sums = self.sums()
            add_contents(self._store, self._key, self._before.result(), sums)
            info = super().commit()
            if self._store.scheme in ("file", "memory"):
                # No conditional writes there: another save of this name may have written over our note.
                add_missing_contents(self._store, self._key, sums)
            return info
        except BaseException:
            self.abort()
            raise


def _known_before(store: Store, key: str) -> Contents:
    try:
        contents = read_contents(store, key)
    except CorruptError:
        contents = Contents()
    return contents if contents.sums else unchecked_before(store, key)


class Checkpoint:
    """Checkpoints below a URI.

        ckpt = Checkpoint("gs://bucket/run1")
        with ckpt.writer("epoch0.ckpt") as file:
            torch.save(model.state_dict(), file)
        with ckpt.reader("epoch0.ckpt") as file:
            state = torch.load(file)

    The writer uploads while you write, in about 100 MB of memory, and publishes only when the block ends without an
    exception. The reader checks every block against the checksums that the writer kept.
    """

    def __init__(self, uri: str | os.PathLike[str], config: StoreConfig | None = None) -> None:
        parsed = uris.parse(uri)
        self._store = Store(str(parsed), config)
        self._prefix = parsed.key + "/" if parsed.key and not parsed.key.endswith("/") else parsed.key

    @property
    def store(self) -> Store:
        """The bucket, with its counters."""
        return self._store

    def writer(self, path: str | os.PathLike[str], *, size_hint: int = 0) -> CheckpointWriter:
        """A file to write `path` (relative to the URI); see `Writer` for when it is published. `size_hint` is about how
        many bytes will come: needed above 80 GB, where parts must be larger."""
        key = self._key(path)
        self._store.check_writable(key)
        return CheckpointWriter(self._store, key, size_hint)

    def reader(self, path: str | os.PathLike[str]) -> RangedReader:
        """A seekable file over `path`, fetched in concurrent ranges and checked."""
        return RangedReader(open_source(self._store, self._key(path)))

    def save(self, state: Any, path: str | os.PathLike[str]) -> ObjectInfo:
        """`torch.save(state)` to `path`."""
        with self.writer(path, size_hint=tensor_bytes(state)) as file:
            torch.save(state, file)  # type: ignore[arg-type]
            return file.commit()

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        map_location: Any = None,
        mmap: bool = False,
        weights_only: bool = True,
        read_once: bool = False,
        process_group: Any = None,
    ) -> Any:
        """`torch.load` from `path`.

        With `mmap` the file is fetched to local disk, whole and in parallel, and mapped: tensors come into memory when
        they are used. It is deleted at once, and its space is freed with the last tensor. Only with
        `weights_only=False` may the file run code; do that for files you trust.

        With `read_once` all ranks of the process group must call this together; each block is then read by one of them
        and sent to the others, so that a thousand ranks do not read the same bytes a thousand times.
        """
        ranks = Ranks.of(process_group) if read_once else None
        key = self._key(path)
        with self.reader(path) if ranks is None else SharedReader(self._store, key, ranks) as file:
            uri = self._store.uri(key)
            if not mmap:
                return load_file(file, uri, map_location, weights_only)
            with tempfile.TemporaryDirectory(prefix="voxlane-") as folder:
                local = os.path.join(folder, "mapped")
                file.save_to(local)
                return load_file(local, uri, map_location, weights_only, mmap=True)

    def delete(self, path: str | os.PathLike[str]) -> None:
        """Delete `path` and its checksums, in that order."""
        self._store.delete_one(self._key(path))
        self._store.delete_one(self._key(path) + SUMS_SUFFIX)

    def _key(self, path: str | os.PathLike[str]) -> str:
        return self._prefix + os.fspath(path).lstrip("/")


def load_file(file: Any, uri: str, map_location: Any, weights_only: bool, *, mmap: bool = False) -> Any:
    """`torch.load`, with one clear error for what is no checkpoint and for what would run code."""
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only, mmap=mmap or None)
    except VoxlaneError:
        raise
    except pickle.UnpicklingError as error:
        if weights_only and "Weights only load failed" in str(error):
            raise UnsafeError(
                f"it holds more than tensors and plain data ({_refused(str(error))}), and reading that can run code",
                uri=uri,
                fix="If you trust it, pass weights_only=False, or allow the type with "
                "torch.serialization.add_safe_globals",
            ) from None
        raise CheckpointError(f"not a torch checkpoint: {str(error).splitlines()[0]}", uri=uri) from None
    except (RuntimeError, EOFError) as error:
        if isinstance(error, EOFError) or "PytorchStreamReader" in str(error) or "zip archive" in str(error):
            raise CheckpointError(
                "not a torch checkpoint, or a truncated one", uri=uri, fix="Load an earlier one"
            ) from None
        raise
    except Exception as error:
        if not weights_only:
            raise  # perhaps of the code that the file was allowed to run
        raise CheckpointError(f"not a torch checkpoint ({type(error).__name__}: {error})", uri=uri) from None


def _refused(text: str) -> str:
    for line in text.splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ").split(" was not an allowed")[0]
    return "a type that torch does not allow"


def tensor_bytes(state: Any) -> int:
    """About how many bytes the tensors of a nested state take."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(tensor_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(tensor_bytes(value) for value in state)
    return 0
