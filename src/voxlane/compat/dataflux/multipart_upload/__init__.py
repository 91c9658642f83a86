"""`dataflux_pytorch.multipart_upload`."""

from voxlane.compat.dataflux.multipart_upload import multipart

__all__ = ["multipart"]
