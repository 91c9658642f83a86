"""Files that fsspec writes: modes wb, xb and ab, and transactions of several files."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

from fsspec.transaction import Transaction

from voxlane.checkpoint.plain import CheckpointWriter
from voxlane.checkpoint.verified_reader import open_verified
from voxlane.errors import AlreadyExistsError, ChangedError, ConfigError, DiscardedWarning, StoreError, UnsupportedError
from voxlane.store import ObjectInfo, Store
from voxlane.store.bucket import ignore_missing_object


class FileWriter(CheckpointWriter):
    """A file that fsspec writes. Closing it in a transaction only ends it; the transaction publishes it.

    Modes xb and ab publish only if `before`, the file as it was when this was opened, has not changed: None if there
    was none. An upload in parts cannot be conditional, so it is compared just before it is published.
    """

    def __init__(self, store: Store, key: str, mode: str, before: ObjectInfo | None, *, in_transaction: bool) -> None:
        super().__init__(store, key)
        self.mode = mode
        self._before_opening = before
        self._in_transaction = in_transaction
        self._is_ended = False

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._is_ended or self.is_final

    @property
    def is_final(self) -> bool:
        """Whether it was published or aborted."""
        return self._done

    def _end(self) -> None:
        if not self._in_transaction:
            self.commit()
            return
        try:
            self.finish_parts()
        except BaseException:
            self.abort()
            raise
        self._is_ended = True

    def _put_whole(self, data: Any) -> ObjectInfo:
        before = self._before_opening
        if self.mode != "wb":
            try:
                return self._store.put(
                    self._key, data, if_absent=before is None, if_etag=before.etag if before is not None else None
                )
            except ChangedError:
                raise self._changed() from None
            except UnsupportedError:  # a few servers cannot replace conditionally
                self._check_condition()
        return super()._put_whole(data)

    def _check_condition(self) -> None:
        if self.mode == "wb":
            return
        current, before = self._store.find(self._key), self._before_opening
        if before is None:
            if current is not None:
                raise _exists(self.name)
        elif current is None or current.etag != before.etag:
            raise self._changed()

    def _changed(self) -> ChangedError:
        return ChangedError(
            f"another process changed the file meanwhile; the {self.tell():,} bytes were not published",
            uri=self.name,
            fix="Let one process write each file",
        )


def open_file_writer(store: Store, key: str, mode: str, *, in_transaction: bool) -> FileWriter:
    """Open a file for writing in mode wb, xb or ab."""
    uri = store.uri(key)
    if mode not in ("wb", "xb", "ab"):
        fix = "Open it with rb, wb, xb or ab"
        raise ConfigError(f"mode {mode!r} is not supported: objects cannot be changed in place", uri=uri, fix=fix)
    if mode == "wb":
        return FileWriter(store, key, mode, None, in_transaction=in_transaction)
    if mode == "xb":
        if store.exists(key):
            raise _exists(uri)
        return FileWriter(store, key, mode, None, in_transaction=in_transaction)
    source = None
    with ignore_missing_object():
        source = open_verified(store, key)
    writer = FileWriter(store, key, mode, source.info if source is not None else None, in_transaction=in_transaction)
    try:
        for block in source.read_blocks() if source is not None else ():
            writer.write(block)
    except BaseException:
        writer.abort()
        raise
    return writer


def _exists(uri: str) -> AlreadyExistsError:
    return AlreadyExistsError("the file exists already", uri=uri, fix="Write another one, or use mode wb")


class BucketTransaction(Transaction):  # type: ignore[misc]
    """Publishes the files that were written in a transaction one after another when it ends, or discards all of them
    if it ends with an exception."""

    fs: Any
    files: deque[FileWriter]

    def complete(self, commit: bool = True) -> None:
        """End the transaction."""
        files = [file for file in self.files if not file.is_final]
        try:
            if commit:
                _publish(files)
        finally:
            discarded = [file.name for file in files if not file.is_final]
            for file in files:
                file.abort()
            self.files = deque()
            self.fs._intrans, self.fs._transaction, self.fs = False, None, None
        if discarded:
            files_were = "1 file was" if len(discarded) == 1 else f"{len(discarded)} files were"
            message = f"{files_were} discarded, because their transaction ended with an exception"
            warnings.warn(f"{message}: {', '.join(discarded)}", DiscardedWarning, stacklevel=3)


def _publish(files: list[FileWriter]) -> None:
    for file in files:
        if not file.closed:
            problem = "the file is still open at the end of its transaction, which therefore published nothing"
            raise StoreError(problem, uri=file.name, fix="Close it, or write it in a with block, before the end")
    for index, file in enumerate(files):
        try:
            file.commit()
        except BaseException as error:
            published = ", ".join(earlier.name for earlier in files[:index]) or "none"
            error.add_note(f"Of the {len(files)} files of the transaction these were published: {published}")
            raise
