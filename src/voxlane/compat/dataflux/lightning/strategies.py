"""The FSDP strategy of Dataflux's multi-node demo, over `BucketFSDPStrategy`."""

from __future__ import annotations

from typing import Any

from voxlane.checkpoint.lightning import BucketFSDPStrategy
from voxlane.compat.dataflux.config import Config, store_config

__all__ = ["DatafluxFSDPStrategy"]


class DatafluxFSDPStrategy(BucketFSDPStrategy):
    """FSDP with its checkpoints in a bucket. `path`, `project_name` and `model` are taken and not needed: the trainer
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
        super().__init__(
            store_config=store_config(Config(), storage_client) if storage_client is not None else None, **kwargs
        )
