"""The class for each scheme that fsspec finds through voxlane's entry points (`fsspec.specs` in pyproject.toml).

fsspec lets an entry point replace its own choice. So each name here is the class of the package that usually serves the
scheme if that package is installed, and `BucketFileSystem` otherwise: installing voxlane changes nothing for programs
that use gcsfs, s3fs or adlfs.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

USUAL_CLASSES = {
    "gs": ("gcsfs", "GCSFileSystem"),
    "gcs": ("gcsfs", "GCSFileSystem"),
    "s3": ("s3fs", "S3FileSystem"),
    "s3a": ("s3fs", "S3FileSystem"),
    "az": ("adlfs", "AzureBlobFileSystem"),
}
"""Package and class that usually serve each scheme in fsspec."""


def __getattr__(scheme: str) -> Any:
    if scheme not in USUAL_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {scheme!r}")
    package, class_name = USUAL_CLASSES[scheme]
    if importlib.util.find_spec(package) is not None:
        return getattr(importlib.import_module(package), class_name)
    # Imported here, because it imports this module.
    return importlib.import_module("voxlane.checkpoint.filesystem").BucketFileSystem
