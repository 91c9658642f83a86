"""Entry point of the processes that tests kill; the fork server preloads this module so that they start at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from voxlane.store import StoreConfig
from voxlane.store.staging import stage


def stage_and_signal(source: str, root: Path, config: StoreConfig, begun: Any) -> None:
    """Stage a source, and set `begun` when staging begins."""
    stage(source, root, name="data", config=config, progress=lambda _: begun.set())
