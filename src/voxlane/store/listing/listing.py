"""`list_objects`: list every object under a URI once, in key order."""

from __future__ import annotations

import os.path
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from voxlane import uri as uris
from voxlane.errors import ConfigError, NotFoundError
from voxlane.store import Store, StoreConfig
from voxlane.store.gcs_json import COMPOSED_PREFIX, GcsJson
from voxlane.store.listing.manifest import SCHEMA, Manifest
from voxlane.store.listing.parallel import OutOfOrderError, Pages, ParallelLister, convert_page, is_ascending

_PARALLEL_SCHEMES = ("s3", "gs")
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
    """List every object whose key starts with the key of `uri`, a plain string prefix (`gs://b/foo/a` matches
    `foo/a1`).

    match: shell patterns; only keys that match one of them are returned.
    concurrency: maximum number of list requests in flight; 1 lists sequentially.
    progress: show a progress bar on stderr; default: if stderr is a terminal.
    generations: list each object's generation as its version, which composed download needs (GCS only).

    The temporary objects of composed downloads are not listed.
    """
    parsed = uris.parse(uri)
    store = store or Store(uri, config)
    prefix = parsed.key
    if parsed.scheme == "file" and prefix and not prefix.endswith("/") and os.path.isdir(f"/{prefix}"):
        prefix += "/"  # on a file system the name of a folder means the folder
    folder = prefix[: prefix.rfind("/") + 1]
    if parsed.scheme == "file" and not os.path.isdir(f"/{folder}"):
        raise NotFoundError("no such folder", uri=uri, fix="Check its spelling")
    if generations and parsed.scheme != "gs":
        raise ConfigError("generations exist only on GCS", uri=uri, fix="Leave out generations=True")
    source: Pages = lambda start: map(convert_page, store.list_pages(folder, start))  # noqa: E731
    if generations:
        json_api = GcsJson(store)
        source = lambda start: json_api.pages(prefix, start)  # noqa: E731
    with _progress_bar(uri, progress) as bar:
        workers = concurrency if parsed.scheme in _PARALLEL_SCHEMES else 1
        batches = _list_batches(source, prefix, workers, bar)
    table = pa.Table.from_batches(batches).cast(SCHEMA) if batches else SCHEMA.empty_table()
    if parsed.scheme == "gs" and COMPOSED_PREFIX.startswith(prefix):
        table = table.filter(pc.invert(pc.starts_with(table["key"], COMPOSED_PREFIX)))
    if not is_ascending(table["key"].combine_chunks()):
        table = table.sort_by("key")
    return Manifest(str(parsed), _drop_folder_markers(table)).match(match)


def _list_batches(source: Pages, prefix: str, workers: int, bar: Any) -> list[Any]:
    """Return the keys with `prefix` as Arrow batches, in the server's order."""
    on_keys: Callable[[int], object] = bar.update if bar is not None else lambda _: None
    if workers > 1:
        try:
            return ParallelLister(source, prefix, workers=workers, on_keys=on_keys).run()
        except OutOfOrderError:
            if bar is not None:
                bar.reset()
    batches = []
    for page in source(None):
        matching = page.filter(pc.starts_with(page.column("key"), prefix)) if prefix else page
        if matching.num_rows:
            on_keys(matching.num_rows)
            batches.append(matching)
    return batches


def _drop_folder_markers(table: Any) -> Any:
    """Drop the empty objects that web consoles create for folders. The engine lists the marker `a/` as `a`, which
    cannot be read; markers are recognised by their zero size and by keys below them."""
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


@contextmanager
def _progress_bar(uri: str, shown: bool | None) -> Iterator[Any]:
    """Yield a progress bar of tqdm, or None if it is hidden; tqdm takes a while to import."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=f"listing {uri}", unit=" objects", unit_scale=True, delay=0.5) as bar:
        yield bar
