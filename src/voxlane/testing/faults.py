"""Inject faults: :class:`Faults` configures them, and :class:`FaultInjector` decides for each request.

The decision depends on the seed and on the request (kind, bucket, key, range, and the number of earlier equal
requests), not on the order in which concurrent requests arrive. So a run is reproducible even if its threads interleave
differently. Only ``requests_per_s`` and the bandwidths depend on time: requests share a :class:`Quota` and a
:class:`Link`.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from voxlane.testing.counters import KINDS, Kind

Clock = Callable[[], float]
"""Function that returns the seconds of a monotonic clock."""

_RATES = ("error_rate", "cut_rate", "truncate_rate", "stall_rate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Faults and delays for the requests that match ``kinds``, ``bucket`` and ``key_prefix``.

    Rates are probabilities in ``[0, 1]``; a request meets at most one of error, cut, truncate and stall, so their
    sum must not exceed 1.
    """

    latency_s: float = 0.0
    """Delay before each response in seconds; concurrent requests are delayed in parallel."""
    jitter_s: float = 0.0
    """Maximum random delay in seconds, added to ``latency_s`` with a uniform distribution."""
    bandwidth_bytes_per_s: float = 0.0
    """Limit on body bytes per second of each connection; 0 means none."""
    total_bandwidth_bytes_per_s: float = 0.0
    """Limit on body bytes per second of all responses together, which they share equally; 0 means none."""
    requests_per_s: float = 0.0
    """Rate above which requests are refused (503 SlowDown in S3, 429 in GCS); 0 means no limit. The unused quota of the
    last second may be used at once. A refusal is delayed by ``latency_s`` like every response."""
    error_rate: float = 0.0
    """Fraction of requests that fail with one of ``error_statuses`` and have no effect."""
    error_statuses: tuple[int, ...] = (503,)
    """HTTP statuses of failures; ``error_rate`` chooses one at random, ``fail_next`` uses them in turn."""
    fail_next: int = 0
    """Number of next matching requests that fail before the rates apply."""
    cut_rate: float = 0.0
    """Fraction of responses whose connection is reset halfway through the body; writes have taken effect by then."""
    truncate_rate: float = 0.0
    """Fraction of responses that end halfway through the announced body with an orderly close; responses without a body
    are not affected."""
    stall_rate: float = 0.0
    """Fraction of responses that pause for ``stall_s`` between headers and body."""
    stall_s: float = 30.0
    """Duration of a stall in seconds."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of requests that are affected; empty means all."""
    bucket: str = ""
    """Bucket whose requests are affected; empty means all."""
    key_prefix: str = ""
    """Prefix of the keys that are affected; the key of a listing is its prefix."""
    seed: int = 0
    """Seed; two runs with the same seed and the same requests meet the same faults."""

    def __post_init__(self) -> None:
        for name in ("error_statuses", "kinds"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in _RATES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"Faults.{name} is {getattr(self, name)!r}: give a probability from 0 to 1")
        if sum(getattr(self, name) for name in _RATES) > 1.0 + 1e-9:
            raise ValueError(f"Faults: {' + '.join(_RATES)} exceeds 1; one request meets at most one fault")
        for name in ("fail_next", *(name for name in self.__slots__ if name.endswith("_s"))):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Faults.{name} is {getattr(self, name)!r}: give zero or more")
        if unknown := set(self.kinds) - set(KINDS):
            raise ValueError(f"Faults.kinds has {sorted(unknown)}: choose from {', '.join(KINDS)}")
        invalid = [status for status in self.error_statuses if not 400 <= status <= 599]
        if invalid or not self.error_statuses:
            raise ValueError(f"Faults.error_statuses is {self.error_statuses!r}: give statuses from 400 to 599")


# Delays up to this, from the millisecond timers of the event loop, are made up for, so that the limit is met on
# average. Longer delays, for example on a busy machine, are lost like the idle time of a real link.
_CATCH_UP_S = 0.02


class Link:
    """A link of limited bandwidth, shared equally by the current senders.

    Each sender reserves the link for one piece at a time, in order of the calls, so senders take turns. A sender
    that is slower for another reason leaves its share to the others.
    """

    def __init__(self, bytes_per_s: float, clock: Clock = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_s = 0.0
        self._senders = 0

    def join(self) -> None:
        """Register a sender. Time without senders is lost."""
        if not self._senders:
            self._free_s = max(self._free_s, self._clock())
        self._senders += 1

    def leave(self) -> None:
        """Unregister a sender."""
        self._senders -= 1

    def reserve(self, size: int) -> float:
        """Reserve the link for ``size`` bytes after all earlier reservations.

        Return the seconds until they are sent; zero or less if that time has passed.
        """
        now_s = self._clock()
        self._free_s = max(self._free_s, now_s - _CATCH_UP_S) + size / self._bytes_per_s
        return self._free_s - now_s


class Quota:
    """A limited rate of requests; unused quota is kept for one second, and for at least one request."""

    def __init__(self, requests_per_s: float, clock: Clock = time.monotonic) -> None:
        self._rate = requests_per_s
        self._clock = clock
        self._capacity = max(1.0, requests_per_s)
        self._left = self._capacity
        self._then_s = clock()

    def try_acquire(self) -> bool:
        """Count a request and return True if it is within the rate, else return False."""
        now_s = self._clock()
        self._left = min(self._capacity, self._left + (now_s - self._then_s) * self._rate)
        self._then_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class FaultDecision(NamedTuple):
    """Faults that one request meets."""

    delay_s: float = 0.0
    error_status: int = 0
    """Status to fail with; 0 means that the request is handled."""
    cut: bool = False
    truncate: bool = False
    stall_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    link: Link | None = None
    """Link shared with other responses; None means no limit."""
    throttled: bool = False
    """Whether the request exceeds the rate and is refused."""


NO_FAULT = FaultDecision()


class FaultInjector:
    """Decide which faults each request meets."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._failed = 0
        self._has_chance = faults.jitter_s > 0 or any(getattr(faults, name) > 0 for name in _RATES)
        self._request_counts: dict[tuple[str, str, str, str], int] = {}
        self._quota = Quota(faults.requests_per_s) if faults.requests_per_s else None
        self._base_decision = FaultDecision(
            delay_s=faults.latency_s,
            bandwidth_bytes_per_s=faults.bandwidth_bytes_per_s,
            link=Link(faults.total_bandwidth_bytes_per_s) if faults.total_bandwidth_bytes_per_s else None,
        )
        harmless = self._base_decision == NO_FAULT and self._quota is None
        self._idle = harmless and not self._has_chance and not faults.fail_next

    def decide(self, kind: Kind, bucket: str, key: str, detail: str) -> FaultDecision:
        """Return the faults of a request; ``detail``, such as a range, distinguishes requests for one key."""
        if self._idle:
            return NO_FAULT
        faults = self.faults
        if (faults.kinds and kind not in faults.kinds) or (faults.bucket and bucket != faults.bucket):
            return NO_FAULT
        if not key.startswith(faults.key_prefix):
            return NO_FAULT
        if self._quota is not None and not self._quota.try_acquire():
            return self._base_decision._replace(throttled=True)
        if self._failed < faults.fail_next:
            status = faults.error_statuses[self._failed % len(faults.error_statuses)]
            self._failed += 1
            return self._base_decision._replace(error_status=status)
        if not self._has_chance:
            return self._base_decision
        identity = (kind, bucket, key, detail)
        count = self._request_counts.get(identity, 0)
        self._request_counts[identity] = count + 1
        return self._decide_by_chance(repr((faults.seed, count, *identity)))

    def _decide_by_chance(self, identity: str) -> FaultDecision:
        digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=24).digest()
        draw, jitter, status = (int.from_bytes(digest[i : i + 8]) / 2**64 for i in (0, 8, 16))
        faults = self.faults
        decision = self._base_decision._replace(delay_s=faults.latency_s + jitter * faults.jitter_s)
        error_status = faults.error_statuses[int(status * len(faults.error_statuses))]
        for rate, fault in (
            (faults.error_rate, {"error_status": error_status}),
            (faults.cut_rate, {"cut": True}),
            (faults.truncate_rate, {"truncate": True}),
            (faults.stall_rate, {"stall_s": faults.stall_s}),
        ):
            if draw < rate:
                return decision._replace(**fault)
            draw -= rate
        return decision
