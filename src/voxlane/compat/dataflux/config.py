"""Dataflux's Config, and its retries translated to voxlane's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from voxlane.store import RetryConfig

try:
    from google.cloud.storage.retry import DEFAULT_RETRY
except ImportError:  # the datasets work without google-cloud-storage
    DEFAULT_RETRY = None

_TEN_YEARS_S = 10 * 365 * 86400.0
"""Deadline of a retry without one."""


def make_retry(deadline_s: float, multiplier: float, max_delay_s: float) -> Any:
    """Return one of Dataflux's default retries: google.api_core's Retry, or voxlane's if that is not installed."""
    if DEFAULT_RETRY is None:
        return RetryConfig(deadline_s=deadline_s, initial_delay_s=1.0, multiplier=multiplier, max_delay_s=max_delay_s)
    return DEFAULT_RETRY.with_timeout(deadline_s).with_delay(initial=1.0, multiplier=multiplier, maximum=max_delay_s)


MODIFIED_RETRY = make_retry(100_000.0, 1.5, 30.0)
"""The datasets' default retry: for up to 100,000 seconds, with pauses of 1 to 30 seconds."""


@dataclass
class Config:
    """Dataflux's settings of a dataset.

    Listing is always sorted, and downloads are always concurrent: `sort_listing_results` and `threads_per_process` are
    accepted and have no effect.
    """

    sort_listing_results: bool = False
    max_composite_object_size: int = 100_000_000
    """Maximum size of a joined object in bytes; 0 turns composed download off."""
    num_processes: int | None = os.cpu_count()
    """Parallelism of the listing: 1 lists sequentially, any other number as fast as possible."""
    prefix: str | None = None
    """Start of the names of the dataset's objects; all objects of the bucket if it is empty."""
    max_listing_retries: int = 3
    """How often the whole listing is attempted, in addition to the retries of its requests."""
    threads_per_process: int = 1
    disable_compose: bool | None = None
    """True turns composed download off, an explicit False turns it on. By default voxlane decides, and reads objects
    directly, because GCS joins objects more slowly than it serves them (docs/composed-download.md)."""
    list_retry_config: Any = MODIFIED_RETRY
    """A google.api_core Retry for list requests; None turns their retries off."""
    download_retry_config: Any = MODIFIED_RETRY
    """A google.api_core Retry for reads; None turns their retries off."""

    def __post_init__(self) -> None:
        if self.disable_compose:
            self.max_composite_object_size = 0

    @property
    def compose(self) -> Literal["off", "on", "auto"]:
        """Return whether small objects are joined, in voxlane's words."""
        if not self.max_composite_object_size:
            return "off"
        return "on" if self.disable_compose is False else "auto"


def translate_retry(retry: Any) -> RetryConfig:
    """Return a google.api_core Retry as voxlane's: same pauses, and no retry after its deadline. None, which turns
    retries off, has a deadline of 0."""
    if isinstance(retry, RetryConfig):
        return retry
    if retry is None:
        return RetryConfig(deadline_s=0.0)
    deadline_s = retry._timeout if hasattr(retry, "_timeout") else retry._deadline
    return RetryConfig(
        deadline_s=_TEN_YEARS_S if deadline_s is None else float(deadline_s),
        initial_delay_s=float(retry._initial),
        multiplier=max(1.0, float(retry._multiplier)),
        max_delay_s=float(retry._maximum),
    )
