"""Parallel listing of buckets into manifests that can be saved and shared between ranks."""

from voxlane.store.listing.listing import list_objects
from voxlane.store.listing.manifest import Entry, Manifest

__all__ = ["Entry", "Manifest", "list_objects"]
