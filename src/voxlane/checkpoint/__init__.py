"""Checkpoints straight to and from a bucket, never half-published.

Names are imported on first use, because distributed checkpoints take a second to import and most programs need only
one kind. Lightning's plugin and strategies are in `voxlane.checkpoint.lightning`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voxlane.checkpoint.async_save import AsyncSaver
    from voxlane.checkpoint.distributed_reader import DistributedReader, load_sharded
    from voxlane.checkpoint.distributed_writer import DistributedWriter, save_sharded
    from voxlane.checkpoint.lifecycle import Retention, find_orphans, latest, list_checkpoints, prune, verify
    from voxlane.checkpoint.plain import Checkpoint, CheckpointWriter
    from voxlane.checkpoint.reader import RangedReader
    from voxlane.checkpoint.safetensors import SafetensorsFile, load_safetensors, save_safetensors

_NAMES_OF_MODULES = {
    "async_save": ("AsyncSaver",),
    "distributed_reader": ("DistributedReader", "load_sharded"),
    "distributed_writer": ("DistributedWriter", "save_sharded"),
    "lifecycle": ("Retention", "find_orphans", "latest", "list_checkpoints", "prune", "verify"),
    "plain": ("Checkpoint", "CheckpointWriter"),
    "reader": ("RangedReader",),
    "safetensors": ("SafetensorsFile", "load_safetensors", "save_safetensors"),
}
_MODULES = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names}

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "CheckpointWriter",
    "DistributedReader",
    "DistributedWriter",
    "RangedReader",
    "Retention",
    "SafetensorsFile",
    "find_orphans",
    "latest",
    "list_checkpoints",
    "load_safetensors",
    "load_sharded",
    "prune",
    "save_safetensors",
    "save_sharded",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'voxlane.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"voxlane.checkpoint.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
