"""Checkpoints straight to and from a bucket."""

from voxlane.checkpoint.plain import Checkpoint, CheckpointWriter
from voxlane.checkpoint.reader import RangedReader

__all__ = ["Checkpoint", "CheckpointWriter", "RangedReader"]
