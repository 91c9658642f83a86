"""Buckets: one small interface for gs://, s3://, az://, file:// and memory://."""

from voxlane.store.bucket import Store
from voxlane.store.config import RetryConfig, StoreConfig
from voxlane.store.counters import Traffic
from voxlane.store.objects import ObjectInfo
from voxlane.store.writer import Writer

__all__ = ["ObjectInfo", "RetryConfig", "Store", "StoreConfig", "Traffic", "Writer"]
