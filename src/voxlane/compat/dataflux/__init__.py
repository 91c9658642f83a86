"""The API of Google's Dataflux connector (gcs-torch-dataflux), as a thin layer over voxlane's own classes.

Change `from dataflux_pytorch import ...` to `from voxlane.compat.dataflux import ...`. docs/from-dataflux.md shows how
to move to voxlane's own API, line by line.
"""
