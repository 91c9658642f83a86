"""`Checkpoint`: single-file checkpoints for `torch.save`, `torch.load` and anything else that takes a file."""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any

import torch

from voxlane.checkpoint.collective import RankGroup
from voxlane.checkpoint.direct_load import NotDirectError, load_direct
from voxlane.checkpoint.reader import RangedReader, SharedReader
from voxlane.checkpoint.verified_reader import (
    CHECKSUM_SUFFIX,
    add_contents,
    open_verified,
    read_contents,
    read_contents_before_save,
)
from voxlane.checkpoint.writer import ChecksummedWriter
from voxlane.errors import CheckpointError, ConfigError, UnsafeError, VoxlaneError
from voxlane.store import ObjectInfo, Store, StoreConfig
from voxlane.temporary import temporary_folder
from voxlane.uri import StrPath


class CheckpointWriter(ChecksummedWriter):
    """A `Writer` that stores checksums in a small object beside the file (`NAME.sums`), so that every later read can be
    verified.

    The checksums are stored before the file is published, together with those of the file it replaces. So whenever the
    process dies, the file that is there has its checksums.
    """

    def __init__(self, store: Store, key: str, size_hint: int = 0) -> None:
        if key.endswith(CHECKSUM_SUFFIX):
            raise ConfigError(
                f"names that end in {CHECKSUM_SUFFIX} are those of checksums",
                uri=store.uri(key),
                fix="Choose another name",
            )
        super().__init__(store, key, size_hint)
        self._before = store.submit(read_contents_before_save, store, key)

    def _publish(self) -> ObjectInfo:
        self.finish_parts()
        checksums = self.checksums()
        is_recorded = add_contents(self._store, self._key, self._before.result(), checksums)
        info = super()._publish()
        if not is_recorded:
            # Without conditional writes another save of this name may have overwritten our checksums.
            current = read_contents(self._store, self._key)
            if checksums not in current.checksums:
                add_contents(self._store, self._key, current, checksums)
        return info


class Checkpoint:
    """Checkpoints below a URI.

        ckpt = Checkpoint("gs://bucket/run1")
        with ckpt.writer("epoch0.ckpt") as file:
            torch.save(model.state_dict(), file)
        with ckpt.reader("epoch0.ckpt") as file:
            state = torch.load(file)

    The writer uploads while you write, using about 100 MB of memory, and publishes only when the block ends without an
    exception, or at `close()`. The reader verifies every block against the checksums that the writer stored.
    """

    def __init__(self, uri: StrPath, config: StoreConfig | None = None) -> None:
        self.store, key = Store.locate(uri, config)
        """The bucket, which counts its requests."""
        self._prefix = key + "/" if key and not key.endswith("/") else key

    def writer(self, path: StrPath, *, size_hint: int = 0) -> CheckpointWriter:
        """Open `path` (relative to the URI) for writing; see `Writer` for when it is published. `size_hint` is the
        approximate size in bytes; above 80 GB it is required, because parts must be larger."""
        return CheckpointWriter(self.store, self._key(path), size_hint)

    def reader(self, path: StrPath) -> RangedReader:
        """Open `path` as a seekable file that is fetched in concurrent ranges and verified."""
        return RangedReader(open_verified(self.store, self._key(path)))

    def save(self, state: Any, path: StrPath) -> ObjectInfo:
        """Write `state` to `path` with `torch.save`."""
        with self.writer(path, size_hint=sum_tensor_bytes(state)) as file:
            torch.save(state, file)  # type: ignore[arg-type]
            return file.commit()

    def load(
        self,
        path: StrPath,
        *,
        map_location: Any = None,
        mmap: bool = False,
        weights_only: bool = True,
        read_once: bool = False,
        process_group: Any = None,
    ) -> Any:
        """Read `path` with `torch.load` and return the state.

        With `mmap` the file is downloaded to local disk in parallel and mapped, so tensors come into memory when they
        are used. The file is deleted at once; its space is freed with the last tensor. With `weights_only=False` the
        file may run code; use that only for files you trust.

        With `read_once` all ranks of the process group must call this together. One rank reads each block and sends it
        to the others, so that a thousand ranks do not read the same bytes a thousand times.
        """
        ranks = RankGroup.current(process_group) if read_once else None
        key = self._key(path)
        if ranks is None and weights_only and not mmap:
            with contextlib.suppress(NotDirectError):
                return load_direct(
                    self.store, key, map_location, lambda file, place: load_file(file, self.store.uri(key), place, True)
                )
        with self.reader(path) if ranks is None else SharedReader(self.store, key, ranks) as file:
            uri = self.store.uri(key)
            if not mmap:
                return load_file(file, uri, map_location, weights_only)
            with temporary_folder("mapped") as folder:
                local = os.path.join(folder, "mapped")
                file.save_to(local)
                return load_file(local, uri, map_location, weights_only, mmap=True)

    def delete(self, path: StrPath) -> None:
        """Delete `path` and then its checksums."""
        self.store.delete_one(self._key(path))
        self.store.delete_one(self._key(path) + CHECKSUM_SUFFIX)

    def _key(self, path: StrPath) -> str:
        name = os.fspath(path).lstrip("/")
        if self.store.scheme == "file" and ".." in name.split("/"):
            # In a bucket, this is a key like any other; in a folder, it would be a file outside of it.
            raise ConfigError(
                f"the name {name!r} leaves the folder of the checkpoints",
                uri=self.store.uri(self._prefix),
                fix="Remove '..' from the name, or open a Checkpoint in the other folder",
            )
        return self._prefix + name


def load_file(file: Any, uri: str, map_location: Any, weights_only: bool, *, mmap: bool = False) -> Any:
    """Call `torch.load`; raise UnsafeError if the file would run code, CheckpointError if it is no checkpoint. torch's
    errors have no types of their own, so their texts tell them apart."""
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only, mmap=mmap or None)
    except VoxlaneError:
        raise
    except pickle.UnpicklingError as error:
        if weights_only and "Weights only load failed" in str(error) and "Unsupported operand" not in str(error):
            raise UnsafeError(
                f"it holds other objects than tensors ({_find_refused_type(error)}), and reading them can run code",
                uri=uri,
                fix="If you trust it, pass weights_only=False, or allow the type with "
                "torch.serialization.add_safe_globals",
            ) from None
        raise CheckpointError("not a torch checkpoint", uri=uri, fix="Check the name of the file") from None
    except (RuntimeError, EOFError) as error:
        if isinstance(error, EOFError) or any(mark in str(error) for mark in ("PytorchStreamReader", "zip archive")):
            raise CheckpointError(
                "not a torch checkpoint, or a truncated one", uri=uri, fix="Load an earlier checkpoint"
            ) from None
        raise
    except Exception as error:
        if not weights_only:
            raise  # code that the file was allowed to run may have raised it
        raise CheckpointError(f"not a torch checkpoint ({type(error).__name__}: {error})", uri=uri) from None


def _find_refused_type(error: Exception) -> str:
    """Return the type that `torch.load(weights_only=True)` refused, such as "GLOBAL builtins.print"."""
    for line in str(error).splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ").split(" was not an allowed")[0]
    return "a type that torch does not allow"


def sum_tensor_bytes(state: Any) -> int:
    """Return the size in bytes of all tensors in a nested state; sparse ones count as nothing."""
    if isinstance(state, torch.Tensor):
        return state.nbytes if state.layout == torch.strided else 0
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(sum_tensor_bytes, values))
