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
from voxlane.errors import ConfigError, CredentialsError, MissingExtraError, NotFoundError, StoreError
from voxlane.store import Store, StoreConfig
from voxlane.store.gcs_json import COMPOSED_PREFIXES, GcsJson
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
    folder_markers: bool = False,
    storage_classes: Sequence[str] | None = None,
    include_composed: bool = False,
) -> Manifest:
    """List every object whose key starts with the key of `uri`, a plain string prefix (`gs://b/foo/a` matches
    `foo/a1`).

    match: shell patterns; only keys that match one of them are returned.
    concurrency: maximum number of list requests in flight; 1 lists sequentially.
    progress: show a progress bar on stderr; default: if stderr is a terminal.
    generations: list each object's generation as its version, which composed download needs (GCS only).
    storage_classes: return only objects of these storage classes, such as ["STANDARD"] (GCS only). The others are
        counted in `Manifest.other_classes`.
    include_composed: also return the temporary objects of composed downloads.
    folder_markers: also list folder markers.

    A folder marker is an empty object whose key ends in a slash, as web consoles create them. Markers are left out and
    counted in `Manifest.folder_markers`. Everything else is listed under its exact key: an empty object `e` beside
    `e/x`, `a/` with bytes in it, `a//b`, `a/../b`.
    """
    parsed = uris.parse(uri)
    store = store or Store(uri, config)
    prefix = parsed.key
    if parsed.scheme == "file" and prefix and not prefix.endswith("/") and os.path.isdir(f"/{prefix}"):
        prefix += "/"  # on a file system the name of a folder means the folder
    if parsed.scheme == "file" and not os.path.isdir(f"/{prefix[: prefix.rfind('/') + 1]}"):
        raise NotFoundError("no such folder", uri=uri, fix="Check its spelling")
    if (generations or storage_classes is not None) and parsed.scheme != "gs":
        option = "generations" if generations else "storage_classes"
        raise ConfigError(f"{option} can be listed only on GCS", uri=uri, fix=f"Leave out {option}=")
    source = _choose_pages(store, prefix, generations=generations, storage_class=storage_classes is not None)
    with _progress_bar(uri, progress) as bar:
        workers = concurrency if parsed.scheme in _PARALLEL_SCHEMES else 1
        batches = _list_batches(source, prefix, workers, bar)
    table = pa.Table.from_batches(batches) if batches else SCHEMA.empty_table()
    if not include_composed:
        table = _drop_composed(table, parsed.scheme, prefix)
    table, other_classes = _select_classes(table, storage_classes)
    if not is_ascending(table["key"].combine_chunks()):
        table = table.sort_by("key")
        _check_unique(table["key"].combine_chunks(), uri)
    markers = _is_folder_marker(table)
    count = 0 if folder_markers else int(pc.sum(markers).as_py() or 0)
    listed = table.filter(pc.invert(markers)) if count else table
    return Manifest(str(parsed), listed, count, other_classes).match(match)


def _choose_pages(store: Store, prefix: str, *, generations: bool, storage_class: bool) -> Pages:
    """Return the source of pages for this service; only GCS's JSON API has generations and storage classes."""
    plain: Pages = lambda start: map(convert_page, store.list_pages(prefix, start, folder_markers=True))  # noqa: E731
    if store.scheme != "gs":
        return plain
    api = GcsJson(store)
    pages: Pages = lambda start: api.pages(prefix, start, storage_class=storage_class)  # noqa: E731
    return pages if generations or storage_class else _prefer_pages(pages, plain)


def _prefer_pages(preferred: Pages, other: Pages) -> Pages:
    """Return a source of pages from GCS's JSON API, `preferred`, or from the `other` one if Google's library is not
    installed or finds no credentials. Pages of the JSON API are a third as large as those of the XML API."""

    def pages(start: str | None) -> Iterator[Any]:
        is_first = True
        try:
            for page in preferred(start):
                is_first = False
                yield page
        except (MissingExtraError, CredentialsError):
            if not is_first:
                raise
            yield from other(start)

    return pages


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


def _select_classes(table: Any, storage_classes: Sequence[str] | None) -> tuple[Any, int]:
    """Return the objects of these storage classes, all if it is None, and the number of the others."""
    if storage_classes is None or not len(table):
        return table.cast(SCHEMA), 0
    is_allowed = pc.is_in(table["storage_class"], pa.array(list(storage_classes), pa.string()))
    selected = table.filter(is_allowed).drop_columns("storage_class")
    return selected.cast(SCHEMA), len(table) - len(selected)


def _drop_composed(table: Any, scheme: str, prefix: str) -> Any:
    """Drop the temporary objects of composed downloads, which exist on GCS."""
    for composed in COMPOSED_PREFIXES:
        if scheme == "gs" and composed.startswith(prefix):
            table = table.filter(pc.invert(pc.starts_with(table["key"], composed)))
    return table


def _check_unique(keys: Any, uri: str) -> None:
    """Raise if sorted keys repeat: a listing with some keys twice may lack others."""
    repeated = keys.slice(1).filter(pc.equal(keys.slice(0, len(keys) - 1), keys.slice(1)))
    if len(repeated):
        problem = f"the service listed {repeated[0].as_py()!r} twice, so the listing cannot be trusted"
        raise StoreError(problem, uri=uri, fix="Check the server, and any proxy before it, then try again")


def _is_folder_marker(table: Any) -> Any:
    is_empty = pc.invert(table["size"].cast(pa.bool_()))  # comparing with 0 would import pandas, as in list_json.py
    return pc.and_(is_empty, pc.ends_with(table["key"], "/"))


@contextmanager
def _progress_bar(uri: str, shown: bool | None) -> Iterator[Any]:
    """Yield a progress bar of tqdm, or None if it is hidden; tqdm takes a while to import."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=f"listing {uri}", unit=" objects", unit_scale=True, delay=0.5) as bar:
        yield bar
