"""What Dataflux's two datasets share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from voxlane.compat.dataflux.config import Config, store_config
from voxlane.dataset.samples import Samples, Source


class DatafluxDataset:
    """Dataflux's constructor and `objects`, before one of voxlane's datasets in a class's bases."""

    samples: Samples

    def __init__(
        self,
        project_name: str | None,
        bucket_name: str,
        config: Config | None = None,
        data_format_fn: Callable[[bytes], Any] | None = None,
        storage_client: Any = None,
    ) -> None:
        self.project_name, self.bucket_name = project_name, bucket_name
        config = config or Config()
        source = Source(
            f"gs://{bucket_name}/{config.prefix or ''}",
            decode=data_format_fn,
            match=None,
            config=store_config(config, storage_client),
            cache=None,
            cache_bytes=0,
            compose="auto" if config.max_composite_object_size else "off",
            compose_max_bytes=config.max_composite_object_size,
        )
        super().__init__(Samples(source))  # type: ignore[call-arg]  # the dataset that stands behind in the bases

    @cached_property
    def objects(self) -> list[tuple[str, int]]:
        """Name and size in bytes of every object, in order."""
        manifest = self.samples.sources[""].manifest
        return list(zip(manifest.keys(), manifest.sizes.tolist(), strict=True))
