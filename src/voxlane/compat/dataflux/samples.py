"""The samples of Dataflux's datasets: a list of (name, size) tuples that the user may change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import pyarrow as pa

from voxlane.compat.dataflux.clients import is_foreign_client, new_client, store_config
from voxlane.compat.dataflux.config import Config, translate_retry
from voxlane.dataset.reading import ObjectReader, PendingObject
from voxlane.dataset.samples import PendingSample, Samples, SampleSource
from voxlane.errors import ConfigError
from voxlane.store import Store
from voxlane.store.listing import Entry, Manifest
from voxlane.store.listing.manifest import SCHEMA

ListedObject = tuple[str, int]
"""Name and size in bytes of an object."""
_log = logging.getLogger("voxlane")


class ListedObjects(list[ListedObject]):
    """The objects of a listing, with the manifest that also knows their versions."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(zip(manifest.keys(), manifest.sizes.tolist(), strict=True))
        self.manifest = manifest


class DatafluxSource(SampleSource):
    """A bucket as Dataflux's settings describe it. `new_lister` makes a `ListingController`."""

    _may_be_empty = True

    def __init__(
        self,
        project_name: str | None,
        bucket_name: str,
        config: Config,
        client: Any,
        decode: Callable[[bytes], Any] | None = None,
        new_lister: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            f"gs://{bucket_name}/{config.prefix or ''}",
            decode=decode,
            config=store_config(client, translate_retry(config.download_retry_config)),
            compose=config.compose,
            compose_max_bytes=config.max_composite_object_size,
        )
        self._settings = config
        self._project_name, self._bucket_name = project_name, bucket_name
        self._new_lister = new_lister
        self._client = client

    def __getstate__(self) -> dict[str, Any]:
        # A google-cloud-storage client cannot be pickled. Its endpoint and credentials are in the store's config.
        client = self._client if self.has_foreign_client else self._client is not None
        return {**super().__getstate__(), "_client": client}

    @property
    def client(self) -> Any:
        """The user's storage client or, after unpickling, another one with its endpoint and credentials."""
        if self._client is True or self._client is False:
            self._client = new_client(self._project_name, self.store.config) if self._client else None
        return self._client

    @client.setter
    def client(self, client: Any) -> None:
        retry = translate_retry(self._settings.download_retry_config)
        self.store = Store(self.uri, store_config(client, retry))
        self._client, self._reader = client, None

    @property
    def has_foreign_client(self) -> bool:
        """Whether objects are listed and read with the client's own methods."""
        return not isinstance(self._client, bool) and is_foreign_client(self._client)

    @property
    def is_listed(self) -> bool:
        """Whether the bucket has been listed."""
        return self._manifest is not None

    def list_tuples(self) -> list[ListedObject]:
        """List the bucket, up to `max_listing_retries` times."""
        config = self._settings
        assert self._new_lister is not None
        for attempts_left in reversed(range(max(1, config.max_listing_retries))):
            lister = self._new_lister(
                max_parallelism=config.num_processes,
                project=self._project_name,
                bucket=self._bucket_name,
                sort_results=config.sort_listing_results,
                prefix=config.prefix,
                retry_config=config.list_retry_config,
            )
            lister.client = self.client
            try:
                return list(listed) if type(listed := lister.run()) is list else listed
            except Exception as error:
                if not attempts_left:
                    raise
                _log.warning("%s: listing failed (%s); attempts left: %d", self.uri, error, attempts_left)
        raise AssertionError("unreachable")

    def _list(self) -> Manifest:
        listed = self.list_tuples()
        manifest = listed.manifest if isinstance(listed, ListedObjects) else _manifest_of(self.uri, listed)
        if not len(manifest):
            _log.warning("%s: no objects under this prefix", self.uri)
        return manifest

    def decode_sample(self, entry: Entry, body: bytes) -> Any:
        """Return the formatted object. Errors of the user's function are raised as they are, with the object's name."""
        if self.decode is None:
            return body
        try:
            return self.decode(body)
        except Exception as error:
            error.add_note(f"while formatting {self.store.uri(entry.key)}")
            raise

    def submit_unlisted(self, name: str, size: int) -> PendingObject:
        """Start to read a complete object whose version is not known, and whose size may not be `size`."""
        if self.has_foreign_client:
            return PendingDownload([self.store.submit(self._download, name)])
        if size < self.store.config.part_bytes:
            return PendingObject([self.store.submit(self.store.get, name)])
        return PendingUnlisted(self.store, name)

    def _download(self, name: str) -> bytes:
        body: bytes = self._client.bucket(self._bucket_name).blob(name).download_as_bytes()
        return body


class PendingDownload(PendingObject):
    """An object that a client is downloading; its result is what the client returns."""

    def result(self) -> Any:
        """Return what the client returned, or raise the error of its download."""
        return self._futures[0].result()


class PendingUnlisted(PendingObject):
    """A large object that is looked up first, so that it can be read in concurrent ranges."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._lookup: Future[Entry] = store.submit(store.head, name)
        super().__init__([self._lookup])

    def result(self) -> bytes:
        """Return the object's bytes, or raise the error of its read."""
        return ObjectReader(self._store).submit([self._lookup.result()])[0].result()


class DatafluxSamples(Samples):
    """The samples of one source. Once the list of objects was handed out or assigned, it is the truth: it may be
    replaced and changed in place. Until then the listing itself is used, which is smaller."""

    def __init__(self, source: DatafluxSource, objects: list[ListedObject] | None = None) -> None:
        super().__init__(source)
        self.source = source
        self._objects = objects

    @property
    def objects(self) -> list[ListedObject]:
        """Name and size in bytes of every object, in the order of the samples."""
        if self._objects is None:
            self._objects = list(ListedObjects(self.source.manifest))
        return self._objects

    @objects.setter
    def objects(self, objects: Sequence[ListedObject]) -> None:
        self._objects = objects if isinstance(objects, list) else list(objects)
        for item in self._objects:
            if not (len(item) == 2 and isinstance(item[0], str)):
                raise ConfigError(
                    f"objects must be (name, size) tuples, got {item!r}", fix="Take them from objects or a listing"
                )

    def __len__(self) -> int:
        return len(self.source.manifest if self._objects is None else self._objects)

    @property
    def manifest(self) -> Manifest:
        """The samples as a manifest; the versions of objects that were not listed are unknown."""
        if self._objects is None:
            return self.source.manifest
        return _manifest_of(self.source.uri, self._objects, [self._find_listed(i) for i in range(len(self._objects))])

    @property
    def fingerprint(self) -> str:
        """Hash of the samples and their order."""
        return self.manifest.fingerprint

    def entries(self, index: int) -> dict[str, Entry]:
        """Return the object of one sample."""
        return {"": self._find_listed(index) or Entry(*self.objects[index], None, None)}

    def size(self, index: int) -> int:
        """Return the size in bytes of the object of one sample."""
        return int(self.source.manifest.sizes[index] if self._objects is None else self._objects[index][1])

    def submit(self, indices: Sequence[int]) -> list[PendingSample]:
        """Start to read the samples at `indices`."""
        listed = {i: entry for i in indices if (entry := self._find_listed(i)) and not self.source.has_foreign_client}
        pending = dict(zip(listed, self.source.reader.submit(list(listed.values())), strict=True)) if listed else {}
        return [
            PendingSample(self, self.entries(i), {"": pending.get(i) or self.source.submit_unlisted(*self.objects[i])})
            for i in indices
        ]

    def group_sizes(self, indices: Sequence[int]) -> list[int]:
        """Return how many consecutive samples of `indices` to submit together, group by group."""
        return [1] * len(indices) if self.source.has_foreign_client else super().group_sizes(indices)

    def _find_listed(self, index: int) -> Entry | None:
        """Return the object of one sample with its version, if the bucket was listed and had it with this size."""
        if self._objects is None:
            return self.source.manifest[index]
        if not self.source.is_listed:
            return None
        name, size = self._objects[index]
        manifest = self.source.manifest
        entry = manifest[index] if index < len(manifest) else None
        if entry is None or entry.key != name:
            row = self._rows_by_name.get(name)
            entry = None if row is None else manifest[row]
        return entry if entry is not None and entry.size == size else None

    @cached_property
    def _rows_by_name(self) -> dict[str, int]:
        """Rows of the listing, for a list of objects in another order."""
        return {name: row for row, name in enumerate(self.source.manifest.keys())}


def _manifest_of(uri: str, objects: Sequence[ListedObject], entries: Sequence[Entry | None] | None = None) -> Manifest:
    """Return a manifest of `objects` in their order, with the versions of `entries` where they are known."""
    versions = entries or [None] * len(objects)
    columns = {
        "key": [name for name, _ in objects],
        "size": [size for _, size in objects],
        "etag": [entry and entry.etag for entry in versions],
        "version": [entry and entry.version for entry in versions],
    }
    return Manifest(uri, pa.table(columns, schema=SCHEMA))
