"""Faults the emulator injects: what to inject (:class:`Faults`) and, per request, whether (:class:`Dice`).

Whether a request is hit follows from the seed and from what is asked (kind, bucket, key, range, and how often
the same was asked before), not from the order in which concurrent requests happen to arrive. So a run repeats
even when its threads interleave differently. Only ``requests_per_s`` depends on when requests arrive.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from voxlane.testing.counters import KINDS, Kind
from voxlane.testing.limits import Link, Quota

_RATES = ("error_rate", "cut_rate", "truncate_rate", "stall_rate")
_AMOUNTS = (
    "latency_s",
    "jitter_s",
    "bandwidth_bytes_per_s",
    "total_bandwidth_bytes_per_s",
    "requests_per_s",
    "fail_next",
    "stall_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Faults and delays for the requests that match ``kinds``, ``bucket`` and ``key_prefix``.

    Rates are probabilities in ``[0, 1]``; at most one of error, cut, truncate and stall hits one request, so
    their sum must not exceed 1.
    """

    latency_s: float = 0.0
    """Delay before each answer, in seconds; concurrent requests wait side by side."""
    jitter_s: float = 0.0
    """Up to this many seconds are added to ``latency_s``, uniformly."""
    bandwidth_bytes_per_s: float = 0.0
    """Cap on body bytes per second of each connection; 0 means none."""
    total_bandwidth_bytes_per_s: float = 0.0
    """Cap on body bytes per second of all answers together, shared equally by those being sent; 0 means none."""
    requests_per_s: float = 0.0
    """Requests beyond this rate are refused (503 SlowDown in S3, 429 in GCS) instead of waiting; 0 means no cap. What
    was not used in the second before may be used at once. A refusal comes after ``latency_s`` like any answer."""
    error_rate: float = 0.0
    """Share of requests answered with one of ``error_statuses``, without any effect on the store."""
    error_statuses: tuple[int, ...] = (503,)
    """HTTP statuses to answer with. ``error_rate`` picks among them; ``fail_next`` goes through them in turn.
    """
    fail_next: int = 0
    """This many of the next matching requests fail, after which the rates apply."""
    cut_rate: float = 0.0
    """Share of answers whose connection is reset half way through the body. A write has then taken effect."""
    truncate_rate: float = 0.0
    """Share of answers that end half way through the body they announced, with an orderly close. Answers
    without a body are left whole."""
    stall_rate: float = 0.0
    """Share of answers that pause for ``stall_s`` between headers and body."""
    stall_s: float = 30.0
    """How long a stall lasts, in seconds."""
    kinds: tuple[Kind, ...] = ()
    """Only requests of these kinds; empty means all."""
    bucket: str = ""
    """Only requests to this bucket; empty means all."""
    key_prefix: str = ""
    """Only requests whose key starts with this; a listing's key is its prefix."""
    seed: int = 0
    """Two runs with the same seed and the same requests meet the same faults."""

    def __post_init__(self) -> None:
        for name in _RATES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"Faults.{name} is {getattr(self, name)!r}: give a probability from 0 to 1")
        if sum(getattr(self, name) for name in _RATES) > 1.0 + 1e-9:
            raise ValueError(f"Faults: {' + '.join(_RATES)} exceeds 1; one request meets at most one fault")
        for name in _AMOUNTS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Faults.{name} is {getattr(self, name)!r}: give zero or more")
        if unknown := set(self.kinds) - set(KINDS):
            raise ValueError(f"Faults.kinds has {sorted(unknown)}: choose from {', '.join(KINDS)}")
        bad = [status for status in self.error_statuses if not 400 <= status <= 599]
        if bad or not self.error_statuses:
            raise ValueError(f"Faults.error_statuses is {self.error_statuses!r}: give statuses from 400 to 599")

    def to_json(self) -> dict[str, Any]:
        """A form that :func:`json.dumps` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Faults:
        """The inverse of :meth:`to_json`."""
        values = dict(data)
        for name in ("error_statuses", "kinds"):
            if name in values:
                values[name] = tuple(values[name])
        return cls(**values)


class Fate(NamedTuple):
    """What happens to one request."""

    delay_s: float = 0.0
    error_status: int = 0
    """Answer with this and do nothing; 0: proceed."""
    cut: bool = False
    truncate: bool = False
    stall_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    link: Link | None = None
    """Shared with other answers; None: no cap."""
    throttled: bool = False
    """Refuse and do nothing."""


UNHARMED = Fate()


class Dice:
    """Decides the fate of each request under one :class:`Faults`."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._left_to_fail = faults.fail_next
        self._failed = 0
        self._chancy = faults.jitter_s > 0 or any(getattr(faults, name) > 0 for name in _RATES)
        self._asked: dict[tuple[str, str, str, str], int] = {}
        self._quota = Quota(faults.requests_per_s) if faults.requests_per_s else None
        self._steady = Fate(
            delay_s=faults.latency_s,
            bandwidth_bytes_per_s=faults.bandwidth_bytes_per_s,
            link=Link(faults.total_bandwidth_bytes_per_s) if faults.total_bandwidth_bytes_per_s else None,
        )
        harmless = self._steady == UNHARMED and self._quota is None
        self._idle = harmless and not self._chancy and not self._left_to_fail

    def roll(self, kind: Kind, bucket: str, key: str, detail: str) -> Fate:
        """The fate of a request; ``detail`` tells apart requests of one key, such as their range."""
        if self._idle:
            return UNHARMED
        faults = self.faults
        if (faults.kinds and kind not in faults.kinds) or (faults.bucket and bucket != faults.bucket):
            return UNHARMED
        if not key.startswith(faults.key_prefix):
            return UNHARMED
        if self._quota is not None and not self._quota.take():
            return self._steady._replace(throttled=True)
        if self._left_to_fail:
            self._left_to_fail -= 1
            self._failed += 1
            status = faults.error_statuses[(self._failed - 1) % len(faults.error_statuses)]
            return self._steady._replace(error_status=status)
        if not self._chancy:
            return self._steady
        identity = (kind, bucket, key, detail)
        nth = self._asked.get(identity, 0)
        self._asked[identity] = nth + 1
        return self._chance(repr((faults.seed, nth, *identity)))

    def _chance(self, identity: str) -> Fate:
        digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=24).digest()
        which, wait, status = (int.from_bytes(digest[i : i + 8]) / 2**64 for i in (0, 8, 16))
        faults = self.faults
        fate = self._steady._replace(delay_s=faults.latency_s + wait * faults.jitter_s)
        if which < faults.error_rate:
            return fate._replace(error_status=faults.error_statuses[int(status * len(faults.error_statuses))])
        which -= faults.error_rate
        if which < faults.cut_rate:
            return fate._replace(cut=True)
        which -= faults.cut_rate
        if which < faults.truncate_rate:
            return fate._replace(truncate=True)
        which -= faults.truncate_rate
        return fate._replace(stall_s=faults.stall_s) if which < faults.stall_rate else fate
