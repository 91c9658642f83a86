"""Copy objects from a bucket to a local disk: in parallel, verified, and deduplicated by content.

`stage` creates or updates a copy of a source below a root folder, `list_copies` lists the copies there, and `remove`
deletes one. `local_store` documents the layout of a root folder.
"""

from voxlane.store.staging.datasets import (
    RESERVE_BYTES,
    StagedCopy,
    StagingProgress,
    StagingReport,
    list_copies,
    remove,
    stage,
)
from voxlane.store.staging.sources import SourceListing, SourceObject, default_name, list_source

__all__ = [
    "RESERVE_BYTES",
    "SourceListing",
    "SourceObject",
    "StagedCopy",
    "StagingProgress",
    "StagingReport",
    "default_name",
    "list_copies",
    "list_source",
    "remove",
    "stage",
]
