"""One rank lists, the others are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed

from voxlane.listing import Manifest, list_objects
from voxlane.store import StoreConfig


def list_once(
    uri: str, *, match: str | Sequence[str] | None = None, config: StoreConfig | None = None, concurrency: int = 64
) -> Manifest:
    """List `uri` on rank 0 and give every rank the manifest. A collective call: all ranks must make it. Without an
    initialised process group it just lists. If rank 0 fails, every rank raises its error."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return list_objects(uri, match=match, config=config, concurrency=concurrency)
    answer: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            answer = [list_objects(uri, match=match, config=config, concurrency=concurrency)]
        except Exception as error:  # noqa: BLE001 - a process boundary: every rank raises it, else they would wait
            answer = [error]
    torch.distributed.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    manifest: Manifest = answer[0]
    return manifest
