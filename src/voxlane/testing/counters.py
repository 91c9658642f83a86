"""Count requests: :class:`RequestRecorder` in the server, :class:`Counters` for users."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["get", "head", "put", "list", "delete", "copy", "compose", "part", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Injected = Literal["error", "cut", "truncate", "stall", "throttle"]


@dataclass(slots=True)
class Tally:
    """Requests of one kind since the last reset."""

    requests: int = 0
    bytes_in: int = 0
    """Bytes of request bodies, after decoding aws-chunked."""
    bytes_out: int = 0
    """Bytes of response bodies written to the socket, including those of cut responses."""
    statuses: dict[int, int] = field(default_factory=dict)
    """Number of responses by HTTP status; a cut response counts under the status it began with."""


@dataclass(slots=True)
class Counters:
    """Counters since the server started or was last reset. Administrative requests are not counted.

    Starting, completing, aborting and listing uploads, and bucket operations, are ``other``. In the JSON API
    a metadata read is ``head``, an upload (each chunk of a resumable one) is ``put``; a batch is one
    ``other``, and each request inside it also counts under its own kind, without bytes.
    """

    get: Tally = field(default_factory=Tally)
    head: Tally = field(default_factory=Tally)
    put: Tally = field(default_factory=Tally)
    list: Tally = field(default_factory=Tally)
    delete: Tally = field(default_factory=Tally)
    copy: Tally = field(default_factory=Tally)
    compose: Tally = field(default_factory=Tally)
    part: Tally = field(default_factory=Tally)
    other: Tally = field(default_factory=Tally)
    max_concurrent: int = 0
    """Maximum number of concurrent requests."""
    injected: dict[str, int] = field(default_factory=dict)
    """Number of injected faults by name: error, cut, truncate, stall, throttle."""
    cpu_s: float = 0.0
    """CPU time of the server process, user and system, in seconds."""

    def counts_of(self, kind: Kind) -> Tally:
        """Return the counts of one kind of request."""
        counts: Tally = getattr(self, kind)
        return counts

    @property
    def requests(self) -> int:
        """Number of requests of all kinds."""
        return sum(self.counts_of(kind).requests for kind in KINDS)

    @property
    def bytes_in(self) -> int:
        """Request body bytes of all kinds."""
        return sum(self.counts_of(kind).bytes_in for kind in KINDS)

    @property
    def bytes_out(self) -> int:
        """Response body bytes of all kinds."""
        return sum(self.counts_of(kind).bytes_out for kind in KINDS)

    @property
    def statuses(self) -> dict[int, int]:
        """Number of responses of all kinds by HTTP status."""
        return dict(sum((Counter(self.counts_of(kind).statuses) for kind in KINDS), Counter()))

    def to_json(self) -> dict[str, Any]:
        """Return a form for :func:`json.dumps`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counters:
        """Read the form that :meth:`to_json` returns, after a round trip through JSON text."""
        counters = cls(**data)
        for kind in KINDS:
            counts = Tally(**data[kind])
            counts.statuses = {int(status): count for status, count in counts.statuses.items()}
            setattr(counters, kind, counts)
        return counters


class RequestRecorder:
    """Count requests in the server, which has one thread and so needs no locks."""

    def __init__(self) -> None:
        self._in_progress = 0
        self.reset()

    def reset(self) -> None:
        """Start from zero; requests in progress still count towards ``max_concurrent``."""
        self._counters = Counters(max_concurrent=self._in_progress)
        self._cpu_start_s = time.process_time()

    def begin(self, kind: Kind) -> None:
        """Record the arrival of a request."""
        self._in_progress += 1
        self._counters.max_concurrent = max(self._counters.max_concurrent, self._in_progress)
        self._counters.counts_of(kind).requests += 1

    def end(self, kind: Kind, status: int, bytes_in: int, bytes_out: int) -> None:
        """Record the end of a request; ``status`` is 0 if the client disconnected before a response began."""
        self._in_progress -= 1
        counts = self._counters.counts_of(kind)
        counts.bytes_in += bytes_in
        counts.bytes_out += bytes_out
        if status:
            counts.statuses[status] = counts.statuses.get(status, 0) + 1

    def record_batched(self, kind: Kind, status: int) -> None:
        """Record a request inside a batch."""
        counts = self._counters.counts_of(kind)
        counts.requests += 1
        counts.statuses[status] = counts.statuses.get(status, 0) + 1

    def inject(self, fault: Injected) -> None:
        """Record an injected fault."""
        self._counters.injected[fault] = self._counters.injected.get(fault, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """Return the current counters as :meth:`Counters.to_json` does."""
        self._counters.cpu_s = time.process_time() - self._cpu_start_s
        return self._counters.to_json()
