"""`list_objects`: every object under a URI, each once, in key order."""

from __future__ import annotations

import os.path
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError
from voxlane.listing.manifest import SCHEMA, Manifest
from voxlane.listing.parallel import OutOfOrder, Pages, ParallelLister, as_batch
from voxlane.store import Store, StoreConfig
from voxlane.store.gcs_json import COMPOSED_PREFIX, GcsJson

_LISTS_FROM_A_KEY = ("s3", "gs")
"""Services that can start a listing at any key and list in order. The others are listed sequentially."""


def list_objects(
    uri: str,
    *,
    match: str | Sequence[str] | None = None,
    config: StoreConfig | None = None,
    concurrency: int = 64,
    progress: bool | None = None,
    store: Store | None = None,
    generations: bool = False,
) -> Manifest:
    """List every object whose key starts with the key of `uri`, a plain string prefix (`gs://b/foo/a` finds
    `foo/a1`).

    match: shell patterns; only keys that fit one are kept.
    concurrency: list requests in flight, at most; 1 lists sequentially.
    progress: a bar on stderr; by default when stderr is a terminal.
    generations: GCS only: list each object's generation as its version, which composed download needs.

    What composed download leaves in a bucket for a moment is not listed.
    """
    parsed = uris.parse(uri)
    store = store or Store(uri, config)
    prefix = parsed.key
    if parsed.scheme == "file" and prefix and not prefix.endswith("/") and os.path.isdir(f"/{prefix}"):
        prefix += "/"  # a folder's name alone means the folder, as everywhere on a file system
    folder = prefix[: prefix.rfind("/") + 1]
    if parsed.scheme == "file" and not os.path.isdir(f"/{folder}"):
        raise NotFoundError("no such folder", uri=uri, fix="Check its spelling")
    if generations and parsed.scheme != "gs":
        raise ConfigError("generations exist on GCS only", uri=uri, fix="Leave them out")
    source: Pages = lambda start: map(as_batch, store.list_pages(folder, start))  # noqa: E731
    if generations:
        json_api = GcsJson(store)
        source = lambda start: json_api.pages(prefix, start)  # noqa: E731
    with _Bar(uri, progress) as bar:
        batches: list[Any] | None = None
        if parsed.scheme in _LISTS_FROM_A_KEY and concurrency > 1:
            try:
                batches = ParallelLister(source, prefix, workers=concurrency, on_keys=bar.add).run()
            except OutOfOrder:
                bar.restart()
        if batches is None:
            batches = list(_sequential(source, prefix, bar.add))
    table = pa.Table.from_batches(batches).cast(SCHEMA) if batches else SCHEMA.empty_table()
    if parsed.scheme == "gs" and COMPOSED_PREFIX.startswith(prefix):
        table = table.filter(pc.invert(pc.starts_with(table["key"], COMPOSED_PREFIX)))
    return Manifest(str(parsed), _without_folder_markers(_sorted(table))).match(match)


def _sequential(source: Pages, prefix: str, on_keys: Callable[[int], None]) -> Iterator[Any]:
    for page in source(None):
        kept = page.filter(pc.starts_with(page.column("key"), prefix)) if prefix else page
        if kept.num_rows:
            on_keys(kept.num_rows)
            yield kept


def _sorted(table: Any) -> Any:
    keys = table["key"].combine_chunks()
    if len(keys) < 2 or pc.all(pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py():
        return table
    return table.sort_by("key")


def _without_folder_markers(table: Any) -> Any:
    """Drop the empty objects that consoles make for a folder. The engine names the marker `a/` as `a`, which cannot
    be read; it is told by its zero size and by keys below it."""
    empty = pc.equal(table["size"], 0)
    if not pc.any(empty).as_py():
        return table
    folders: set[str] = set()
    inside = pc.filter(table["key"], pc.match_substring(table["key"], "/"))
    for folder in pc.unique(pc.replace_substring_regex(inside, r"/[^/]*$", "")).to_pylist():
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    if not folders:
        return table
    marker = pc.and_(empty, pc.is_in(table["key"], pa.array(sorted(folders), pa.large_string())))
    return table.filter(pc.invert(marker))


class _Bar:
    """A progress bar, or nothing."""

    def __init__(self, uri: str, wanted: bool | None) -> None:
        self._uri = uri
        self._shown = sys.stderr.isatty() if wanted is None else wanted
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        if self._shown:
            from tqdm import tqdm

            self._bar = tqdm(desc=f"listing {self._uri}", unit=" objects", unit_scale=True, delay=0.5)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, keys: int) -> None:
        """Count listed keys."""
        if self._bar is not None:
            self._bar.update(keys)

    def restart(self) -> None:
        """Start counting again."""
        if self._bar is not None:
            self._bar.reset()
