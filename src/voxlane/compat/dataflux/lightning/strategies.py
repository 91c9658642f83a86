"""The FSDP strategy of Dataflux's multi-node demo, based on `BucketFSDPStrategy`."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.lightning import BucketFSDPStrategy
from voxlane.compat.dataflux.config import client_config

__all__ = ["DatafluxFSDPStrategy"]


class DatafluxFSDPStrategy(BucketFSDPStrategy):
    """FSDP with its checkpoints in a bucket. `path`, `project_name` and `model` are accepted and ignored: the trainer
    names each checkpoint. Sharded by default, as there."""

    def __init__(
        self,
        path: str | None = None,
        project_name: str | None = None,
        storage_client: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("state_dict_type", "sharded")
        super().__init__(store_config=client_config(storage_client), **kwargs)
