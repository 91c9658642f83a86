"""A listing of a bucket: keys, sizes and versions in one table that can be saved and shared."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from voxlane import uri as uris
from voxlane.errors import ConfigError
from voxlane.store import ObjectInfo, Store, StoreConfig
from voxlane.store.listing.parquet import read_table

SCHEMA = pa.schema(
    [
        ("key", pa.large_string()),
        ("size", pa.int64()),
        ("etag", pa.large_string()),
        ("version", pa.large_string()),
    ]
)
_FORMAT = b"voxlane-manifest-1"


Entry = ObjectInfo
"""One listed object; a manifest does not store when it was modified."""


class Manifest:
    """The objects of a listing in key order; an immutable sequence of `Entry`."""

    def __init__(self, uri: str, table: Any, folder_markers: int = 0, other_classes: int = 0) -> None:
        self.uri = uri
        """The URI that was listed; keys are complete paths inside its bucket."""
        self.table = table
        """A pyarrow table with the columns key, size, etag and version."""
        self.folder_markers = folder_markers
        """Number of folder markers (empty objects whose keys end in a slash) that the listing left out."""
        self.other_classes = other_classes
        """Number of objects that the listing left out, because they have another storage class than those asked for."""

    @property
    def root(self) -> str:
        """The bucket's URI, ending in a slash."""
        return uris.parse(self.uri).root

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Manifest: ...
    def __getitem__(self, index: int | slice) -> Entry | Manifest:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for a manifest of {len(self)} objects")
        row = index % len(self)
        column = self._columns
        return Entry(column[0][row].as_py(), int(self.sizes[row]), column[1][row].as_py(), column[2][row].as_py())

    def __iter__(self) -> Iterator[Entry]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.uri == other.uri and bool(self.table.equals(other.table))

    def __repr__(self) -> str:
        return f"Manifest({self.uri!r}, {len(self):,} objects, {self.total_bytes:,} bytes)"

    def __getstate__(self) -> dict[str, Any]:
        counts = {"folder_markers": self.folder_markers, "other_classes": self.other_classes}
        return {"uri": self.uri, "table": self.table, **counts}

    @cached_property
    def _columns(self) -> tuple[Any, Any, Any]:
        # One contiguous array per column: indexing a chunked array searches its chunks every time.
        table = self.table.combine_chunks()
        return tuple(
            table[name].chunk(0) if table.num_rows else pa.array([], pa.large_string())
            for name in ("key", "etag", "version")
        )

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Size of each object in bytes."""
        # Arrow's to_numpy would import pandas, in every worker: a quarter of a second before its first batch.
        chunks = [np.from_dlpack(chunk) for chunk in self.table["size"].chunks]
        return np.concatenate([np.empty(0, np.int64), *chunks])

    @property
    def folder(self) -> str:
        """The listed folder, with which every key starts: `a/b/` for `gs://bucket/a/b/`, and for `gs://bucket/a/b` if
        all keys lie below `a/b/`, else `a/`."""
        prefix = uris.parse(self.uri).key
        if prefix and not prefix.endswith("/") and pc.all(pc.starts_with(self.table["key"], prefix + "/")).as_py():
            return prefix + "/"
        return prefix[: prefix.rfind("/") + 1]

    @property
    def total_bytes(self) -> int:
        """Size of all objects in bytes."""
        return int(self.sizes.sum())

    def keys(self) -> list[str]:
        """Return all keys in order."""
        return [str(k) for k in self.table["key"].to_pylist()]

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of the keys and sizes, in order; listings with the same hash have the same samples."""
        digest = hashlib.sha256()
        for name in ("key", "size"):
            # A stream of one combined batch is independent of the column's chunks and offsets.
            batch = pa.record_batch([self.table[name].combine_chunks()], names=["c"])
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            digest.update(sink.getvalue())
        return digest.hexdigest()[:16]

    def take(self, rows: Sequence[int] | range | npt.NDArray[np.int64]) -> Manifest:
        """Return the entries at `rows`, in that order."""
        return Manifest(self.uri, self.table.take(pa.array(np.asarray(rows, np.int64))))

    def match(self, patterns: str | Sequence[str] | None) -> Manifest:
        """Return the entries whose key matches one of the shell patterns (`*.nii.gz`, `*/labels/*`); `*` also matches
        slashes."""
        if patterns is None:
            return self
        pattern_list = [patterns] if isinstance(patterns, str) else list(patterns)
        if not pattern_list:
            raise ConfigError(
                "match: an empty list of patterns selects nothing", fix="Leave it out to select all objects"
            )
        mask = reduce(pc.or_, map(self._match_mask, pattern_list))
        return Manifest(self.uri, self.table.filter(mask), self.folder_markers, self.other_classes)

    def _match_mask(self, pattern: str) -> Any:
        suffix = pattern[1:]
        if pattern.startswith("*") and not re.search(r"[*?\[]", suffix):
            return pc.ends_with(self.table["key"], suffix)
        matches = re.compile(fnmatch.translate(pattern)).match
        start = len(self.folder)  # a pattern may apply to the complete key or to the part below the listed folder
        return pa.array([bool(matches(k) or matches(k[start:])) for k in self.table["key"].to_pylist()], pa.bool_())

    def save(self, uri: str, config: StoreConfig | None = None) -> None:
        """Write the manifest as Parquet to any URI or path, atomically."""
        sink = pa.BufferOutputStream()
        metadata = {b"voxlane.format": _FORMAT, b"voxlane.uri": self.uri.encode()}
        pq.write_table(self.table.replace_schema_metadata(metadata), sink, compression="zstd")
        with Store(uri, config).open_writer(uris.parse(uri).key) as writer:
            writer.write(memoryview(sink.getvalue()))

    @classmethod
    def load(cls, uri: str, config: StoreConfig | None = None) -> Manifest:
        """Read a manifest that `save` wrote."""
        body = Store(uri, config).get(uris.parse(uri).key)
        try:
            table = read_table(body)
        except pa.ArrowInvalid:
            raise ConfigError("not a manifest (Parquet)", uri=uri, fix="Make one: voxlane ls URI --save FILE") from None
        metadata = table.schema.metadata or {}
        if metadata.get(b"voxlane.format") != _FORMAT:
            raise ConfigError("a Parquet file, not a manifest", uri=uri, fix="Make one: voxlane ls URI --save FILE")
        listed = metadata[b"voxlane.uri"].decode()
        _check_confined(uri, listed, table)
        return cls(listed, table.replace_schema_metadata(None))

    @classmethod
    def of(cls, uri: str, entries: Sequence[Entry]) -> Manifest:
        """Return a manifest of these entries, sorted by key."""
        ordered = sorted(entries, key=lambda e: e.key)
        columns = [[getattr(e, name) for e in ordered] for name in SCHEMA.names]
        return cls(uri, pa.table(dict(zip(SCHEMA.names, columns, strict=True)), schema=SCHEMA))


def _check_confined(uri: str, listed: str, table: Any) -> None:
    """Raise ConfigError if the manifest at `uri` names objects outside what it says was listed. One in a bucket names
    no file of this machine, because whoever wrote it must not choose which of the reader's files are read."""
    is_local = uris.parse(listed).scheme == "file"
    outside = table["key"].filter(pc.invert(pc.starts_with(table["key"], uris.parse(listed).key)))
    if is_local:
        above = pc.match_substring_regex(table["key"], r"(^|/)\.\.(/|$)")
        outside = pa.chunked_array([*outside.chunks, *table["key"].filter(above).chunks], outside.type)
    if is_local and uris.parse(uri).scheme != "file":
        problem = f"the manifest is in a bucket, but lists files of this machine, below {listed}"
    elif len(outside):
        problem = f"the manifest names {outside[0].as_py()!r}, which is outside {listed}"
    else:
        return
    raise ConfigError(problem, uri=uri, fix="List the objects again: voxlane ls URI --save FILE")
