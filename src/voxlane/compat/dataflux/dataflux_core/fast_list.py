"""`dataflux_core.fast_list`, based on `voxlane.store.listing`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pyarrow.compute as pc

from voxlane.compat.dataflux.clients import add_user_agent, is_foreign_client, open_store
from voxlane.compat.dataflux.config import make_retry, translate_retry
from voxlane.compat.dataflux.dataflux_core.download import COMPOSED_PREFIX
from voxlane.compat.dataflux.samples import ListedObject, ListedObjects
from voxlane.store.listing import Manifest, list_objects

__all__ = ["DEFAULT_ALLOWED_CLASS", "MODIFIED_RETRY", "ListingController"]

DEFAULT_ALLOWED_CLASS = ["STANDARD"]
MODIFIED_RETRY = make_retry(300.0, 1.2, 45.0)
_CONCURRENCY = 64
_log = logging.getLogger("voxlane")


class ListingController:
    """Lists a bucket. Assign a storage client to `client` to use its endpoint and credentials."""

    def __init__(
        self,
        max_parallelism: int | None,
        project: str | None,
        bucket: str,
        sort_results: bool = False,
        skip_compose: bool = True,
        prefix: str | None = "",
        allowed_storage_classes: Sequence[str] = DEFAULT_ALLOWED_CLASS,
        retry_config: Any = MODIFIED_RETRY,
    ) -> None:
        """`max_parallelism`: 1 lists sequentially, any other number as fast as possible. `skip_compose`: leave out the
        temporary objects of composed downloads. `project` and `sort_results` are accepted and have no effect: the
        result is always sorted."""
        self.max_parallelism = max_parallelism
        self.gcs_project = project
        self.bucket = bucket
        self.sort_results = sort_results
        self.client: Any = None
        self.skip_compose = skip_compose
        self.prefix = prefix
        self.allowed_storage_classes = allowed_storage_classes
        self.retry_config = retry_config

    def run(self) -> list[ListedObject]:
        """Return the name and size in bytes of every object with the prefix and an allowed storage class, sorted.
        Names that end in a slash, which mark folders, are left out. Objects with bytes that are left out are counted
        in a warning."""
        add_user_agent(self.client)
        if is_foreign_client(self.client):
            return sorted(self._list_with_client())
        manifest = list_objects(
            f"gs://{self.bucket}/{self.prefix or ''}",
            store=open_store(self.client, self.bucket, translate_retry(self.retry_config)),
            concurrency=1 if self.max_parallelism == 1 else _CONCURRENCY,
            storage_classes=self.allowed_storage_classes,
            include_composed=not self.skip_compose,
        )
        is_hidden = pc.ends_with(manifest.table["key"], "/")
        if self.skip_compose:
            is_hidden = pc.or_(is_hidden, pc.starts_with(manifest.table["key"], COMPOSED_PREFIX))
        table = manifest.table.filter(pc.invert(is_hidden))
        self._warn_of_omissions(pc.sum(pc.ends_with(manifest.table["key"], "/")).as_py() or 0, manifest.other_classes)
        return ListedObjects(Manifest(manifest.uri, table, manifest.folder_markers))

    def _list_with_client(self) -> list[ListedObject]:
        blobs = [
            blob
            for blob in self.client.bucket(self.bucket).list_blobs(prefix=self.prefix or "")
            if not (self.skip_compose and blob.name.startswith(COMPOSED_PREFIX))
        ]
        allowed = [blob for blob in blobs if blob.storage_class in self.allowed_storage_classes]
        listed = [blob for blob in allowed if not blob.name.endswith("/")]
        folders = sum(bool(blob.size) for blob in allowed if blob.name.endswith("/"))
        self._warn_of_omissions(folders, len(blobs) - len(allowed))
        return [(blob.name, blob.size) for blob in listed]

    def _warn_of_omissions(self, num_folders: int, num_other_classes: int) -> None:
        """Log how many objects are left out that are no mere folder markers."""
        uri = f"gs://{self.bucket}/{self.prefix or ''}"
        if num_folders:
            _log.warning("%s: objects left out, because their names end in a slash: %d", uri, num_folders)
        if num_other_classes:
            reason = f"their storage class is not {' or '.join(self.allowed_storage_classes) or 'allowed'}"
            _log.warning("%s: objects left out, because %s: %d", uri, reason, num_other_classes)
