"""What a process that is killed runs; imported by the server that forks such processes, so that each starts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from voxlane.staging import stage
from voxlane.store import StoreConfig


def stage_and_tell(source: str, root: Path, config: StoreConfig, begun: Any) -> None:
    """Stage; `begun` is set when the copying begins."""
    stage(source, root, name="data", config=config, progress=lambda _: begun.set())
