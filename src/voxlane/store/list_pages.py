"""The pages of a listing from each kind of store, with the exact keys wherever that is possible."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from voxlane.errors import CredentialsError, InvalidKeyError, MissingExtraError
from voxlane.store.direct import LIST_PAGE_KEYS
from voxlane.store.local_files import list_files
from voxlane.store.translate import TransientError

if TYPE_CHECKING:
    from voxlane.store.bucket import Store
    from voxlane.store.list_xml import ListPage


class ListingProgress:
    """Checks that every page of a listing brings new keys. A server or a proxy that repeats a page would otherwise be
    listed for ever."""

    def __init__(self, prefix: str, start_after: str | None, *, is_ordered: bool) -> None:
        """`is_ordered`: the service certainly lists in the order of the keys."""
        self._prefix = prefix
        self._is_ordered = is_ordered
        self._last_key = start_after
        self._tokens: set[str] = set()
        self._first_keys: set[str] = set()

    def check(self, keys: Any, token: str | None, uri: str) -> None:
        """Note a page with these keys, an Arrow array, and the next page's token. Raises TransientError if it cannot be
        the next page: then it is requested again."""
        if token is not None and token in self._tokens:
            raise TransientError("the listing makes no progress: it repeats a page's token", uri)
        if len(keys):
            first, last = str(keys[0]), str(keys[len(keys) - 1])
            if first in self._first_keys:
                raise TransientError(
                    f"the listing makes no progress: it repeats the page that starts at {first!r}", uri
                )
            for key in (first, last):
                if not key.startswith(self._prefix):
                    raise TransientError(f"the listing has the key {key!r}, which lacks the prefix", uri)
            if self._is_ordered and self._last_key is not None and first <= self._last_key:
                raise TransientError(f"the listing goes back, to {first!r} after {self._last_key!r}", uri)
            self._first_keys.add(first)
            self._last_key = last
        if token is not None:
            self._tokens.add(token)


def list_pages(store: Store, prefix: str, start_after: str | None) -> Iterator[Any]:
    """Yield Arrow record batches, none empty, of the keys that start with `prefix`, after key `start_after`."""
    if store.scheme == "memory":
        yield from _list_by_engine(store, prefix, start_after, None)
    elif store.scheme == "file":
        page = store.call("list", store.uri(prefix), partial(list_files, prefix, start_after))
        if page.num_rows:
            yield page
    else:
        yield from _list_directly(store, prefix, start_after)


def drop_folder_markers(page: Any) -> Any:
    """Return the page without folder markers: empty objects whose keys end in a slash, which consoles create."""
    import pyarrow as pa  # slow to import
    import pyarrow.compute as pc

    batch = pa.record_batch(page)
    empty = pc.equal(batch.column("size"), 0)
    if not pc.any(empty).as_py():
        return page
    return batch.filter(pc.invert(pc.and_(empty, pc.ends_with(batch.column("path"), "/"))))


def _list_directly(store: Store, prefix: str, start_after: str | None) -> Iterator[Any]:
    """Yield the pages of a service by plain HTTP, which keeps keys as they are. The engine lists if the libraries for
    the service's credentials are not installed, or do not find the credentials that the engine may have."""
    token = None
    # Some servers of S3's protocol list folder by folder.
    progress = ListingProgress(prefix, start_after if store.scheme == "gs" else None, is_ordered=store.scheme == "gs")

    def next_page() -> ListPage:
        page: ListPage = store.open_direct().list_page(prefix, start_after, token)
        progress.check(page.batch.column("path"), page.token, store.uri(prefix))
        return page

    while True:
        try:
            page = store.call("list", store.uri(prefix), next_page)
        except (MissingExtraError, CredentialsError) as error:
            if token is not None:
                raise
            yield from _list_by_engine(store, prefix, start_after, error)
            return
        batch = page.batch
        if start_after is not None and store.scheme == "az":  # Azure cannot start at a key
            batch = _select(batch, lambda pc, keys: pc.greater(keys, start_after))
        if batch.num_rows:
            yield batch
        token = page.token
        if token is None:
            return


def _list_by_engine(
    store: Store, prefix: str, start_after: str | None, no_direct: MissingExtraError | CredentialsError | None
) -> Iterator[Any]:
    """Yield the engine's pages. `no_direct`: why there is no other way to list this service."""
    folder = prefix[: prefix.rfind("/") + 1]
    last_key = start_after
    pages: Iterator[Any] | None = None

    def next_page() -> Any:
        nonlocal pages
        if pages is None:
            options = {"offset": last_key, "chunk_size": LIST_PAGE_KEYS, "return_arrow": True}
            pages = iter(store.native.list(folder.rstrip("/") or None, **options))
        try:
            return next(pages, None)
        except BaseException:
            pages = None  # a failed stream cannot continue: the next attempt starts after the last key
            raise

    try:
        while (page := store.call("list", store.uri(folder), next_page)) is not None:
            last_key = page.column("path")[page.num_rows - 1].as_py()
            is_last = page.num_rows < LIST_PAGE_KEYS
            if no_direct is not None:
                page = _restore_markers(store, page)
            selected = page if folder == prefix else _select(page, lambda pc, keys: pc.starts_with(keys, prefix))
            if selected.num_rows:
                yield selected
            if is_last:
                return
    except InvalidKeyError as error:
        if no_direct is None:
            raise
        raise type(no_direct)(f"{error}; and {no_direct}") from None
    if last_key != start_after:
        store.counters.add("list", requests=-1)  # the last call made no request


def _restore_markers(store: Store, page: Any) -> Any:
    """Return a page of the engine with the slashes that it dropped from folder markers. A key of an empty object is a
    marker's if there is no such object. An object with bytes whose key ends in a slash is not recognised."""
    import pyarrow as pa  # slow to import
    import pyarrow.compute as pc

    batch = pa.record_batch(page)
    empty = batch.filter(pc.equal(batch.column("size"), 0)).column("path").to_pylist()
    checks = {key: store.submit(store.exists, key) for key in empty}
    markers = {key for key, check in checks.items() if not check.result()}
    if not markers:
        return batch
    keys = [f"{key}/" if key in markers else key for key in batch.column("path").to_pylist()]
    return batch.set_column(batch.schema.get_field_index("path"), "path", pa.array(keys, batch.column("path").type))


def _select(page: Any, choose: Any) -> Any:
    """Return the rows of a page for which `choose(pyarrow.compute, keys)` is true."""
    import pyarrow as pa  # slow to import
    import pyarrow.compute as pc

    batch = pa.record_batch(page)
    return batch.filter(choose(pc, batch.column("path")))
