"""What requests and bytes cost."""

from __future__ import annotations

from dataclasses import dataclass

from voxlane.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Prices:
    """US list prices of the three large clouds are of this order; give your own."""

    usd_per_10k_requests: float = 0.004
    """Reads: class B on Google, GET on Amazon."""
    usd_per_gb: float = 0.02
    """A GB (1e9 bytes) that leaves for another region of the continent. Within the bucket's region it is free; to the
    internet it is 0.08 to 0.12."""

    def __post_init__(self) -> None:
        if not (self.usd_per_10k_requests >= 0 and self.usd_per_gb >= 0):
            raise ConfigError("a price below zero", fix="Give dollars, 0 or more")

    def requests_usd(self, requests: float) -> float:
        """Of so many reads."""
        return requests / 10_000 * self.usd_per_10k_requests

    def egress_usd(self, size: float) -> float:
        """Of so many bytes, if they leave the region."""
        return size / 1e9 * self.usd_per_gb
