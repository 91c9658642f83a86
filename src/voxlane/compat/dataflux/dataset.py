"""What Dataflux's two datasets share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from voxlane.compat.dataflux.config import Config, store_config
from voxlane.dataset.samples import Samples, Source


def samples(
    bucket_name: str, config: Config, data_format_fn: Callable[[bytes], Any] | None, storage_client: Any
) -> Samples:
    """The samples of a Dataflux dataset."""
    composed = config.max_composite_object_size > 0
    return Samples(
        Source(
            f"gs://{bucket_name}/{config.prefix or ''}",
            decode=data_format_fn,
            match=None,
            config=store_config(config, storage_client),
            cache=None,
            cache_bytes=1,
            compose="auto" if composed else "off",
            compose_max_bytes=config.max_composite_object_size,
        )
    )


class Objects:
    """Adds `objects`, the listing as (name, size in bytes) pairs."""

    samples: Samples

    @property
    def objects(self) -> list[tuple[str, int]]:
        """Name and size of every object, in order."""
        return [(entry.key, entry.size) for entry in self.samples.sources[""].manifest]
