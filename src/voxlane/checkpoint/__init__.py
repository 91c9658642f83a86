"""Checkpoints straight to and from a bucket."""

from voxlane.checkpoint.plain import Checkpoint
from voxlane.checkpoint.reader import RangedReader

__all__ = ["Checkpoint", "RangedReader"]
