"""The names of Google's Dataflux connector (gcs-torch-dataflux), thin over voxlane's own classes.

Change `from dataflux_pytorch import ...` to `from voxlane.compat.dataflux import ...` and run. docs/from-dataflux.md
shows the move to voxlane's own names, line by line.
"""
