"""`dataflux_core`, Dataflux's client library, based on voxlane's listing and datasets."""

from voxlane.compat.dataflux.dataflux_core import download, fast_list, user_agent

__all__ = ["download", "fast_list", "user_agent"]
