"""The API of Google's Dataflux connector (gcs-torch-dataflux), as a thin layer over voxlane's own classes.

Change `from dataflux_pytorch import ...` to `from voxlane.compat.dataflux import ...`. docs/from-dataflux.md lists what
differs, and shows how to move to voxlane's own API, line by line.
"""

from voxlane.compat.dataflux import dataflux_mapstyle_dataset

__all__ = ["dataflux_mapstyle_dataset"]
