"""Listing: what a bucket holds, in parallel, as a manifest that can be saved and shared between ranks."""

from voxlane.listing.listing import list_objects
from voxlane.listing.manifest import Entry, Manifest

__all__ = ["Entry", "Manifest", "list_objects"]
