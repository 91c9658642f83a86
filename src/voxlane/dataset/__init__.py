"""Datasets: a bucket as a map-style or iterable-style PyTorch dataset, without a local copy."""

from voxlane.dataset.cache import DiskCache
from voxlane.dataset.iterable import IterableDataset
from voxlane.dataset.loader import DataLoader
from voxlane.dataset.map import MapDataset, Sampler
from voxlane.dataset.samples import list_once

__all__ = ["DataLoader", "DiskCache", "IterableDataset", "MapDataset", "Sampler", "list_once"]
