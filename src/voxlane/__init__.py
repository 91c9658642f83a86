"""voxlane: from a bucket of 3D medical scans to a trained, evaluated segmentation model.

Names are imported on first use, so that `import voxlane` and the command line start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voxlane.checkpoint import Checkpoint
    from voxlane.dataset import DataLoader, IterableDataset, MapDataset, Sampler, list_once
    from voxlane.errors import VoxlaneError
    from voxlane.listing import Entry, Manifest, list_objects
    from voxlane.store import ObjectInfo, RetryConfig, Store, StoreConfig, Traffic, Writer
    from voxlane.volume.prepared import Prepared
    from voxlane.volume.stream import PatchStream

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "voxlane.checkpoint",
    "DataLoader": "voxlane.dataset",
    "IterableDataset": "voxlane.dataset",
    "MapDataset": "voxlane.dataset",
    "Sampler": "voxlane.dataset",
    "list_once": "voxlane.dataset",
    "VoxlaneError": "voxlane.errors",
    "Entry": "voxlane.listing",
    "Manifest": "voxlane.listing",
    "list_objects": "voxlane.listing",
    "ObjectInfo": "voxlane.store",
    "RetryConfig": "voxlane.store",
    "Store": "voxlane.store",
    "StoreConfig": "voxlane.store",
    "Traffic": "voxlane.store",
    "Writer": "voxlane.store",
    "PatchStream": "voxlane.volume.stream",
    "Prepared": "voxlane.volume.prepared",
}

__all__ = [
    "Checkpoint",
    "DataLoader",
    "Entry",
    "IterableDataset",
    "Manifest",
    "MapDataset",
    "ObjectInfo",
    "PatchStream",
    "Prepared",
    "RetryConfig",
    "Sampler",
    "Store",
    "StoreConfig",
    "Traffic",
    "VoxlaneError",
    "Writer",
    "list_objects",
    "list_once",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'voxlane' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
