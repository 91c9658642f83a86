"""File formats of scans, one module for each family.

To add a format, write a module here that returns `StoredVoxels` and a `Geometry`, and call it from `_read_voxels` of
`voxlane.volume.scan`, which chooses the format by the name of the file.
"""
