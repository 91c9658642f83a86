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
    from voxlane.store import ObjectInfo, RetryConfig, Store, StoreConfig, Traffic, Writer
    from voxlane.store.listing import Entry, Manifest, list_objects
    from voxlane.volume.patch_stream import PatchStream
    from voxlane.volume.prepared_dataset import Prepared

__version__ = "0.1.0"

_NAMES_OF_MODULES = {
    "voxlane.checkpoint": ("Checkpoint",),
    "voxlane.dataset": ("DataLoader", "IterableDataset", "MapDataset", "Sampler", "list_once"),
    "voxlane.errors": ("VoxlaneError",),
    "voxlane.store": ("ObjectInfo", "RetryConfig", "Store", "StoreConfig", "Traffic", "Writer"),
    "voxlane.store.listing": ("Entry", "Manifest", "list_objects"),
    "voxlane.volume.patch_stream": ("PatchStream",),
    "voxlane.volume.prepared_dataset": ("Prepared",),
}
_MODULES = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names}

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
    if name not in _MODULES:
        raise AttributeError(f"module 'voxlane' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
