"""What the emulator counts, as its user reads it (:class:`Counters`) and as the server keeps it
(:class:`Ledger`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

Kind = Literal["get", "head", "put", "list", "delete", "copy", "compose", "part", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Injected = Literal["error", "cut", "truncate", "stall", "throttle"]


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests of one kind since the last reset."""

    requests: int = 0
    bytes_in: int = 0
    """Bytes of request bodies, after decoding of aws-chunked."""
    bytes_out: int = 0
    """Bytes of response bodies handed to the socket; a cut response counts what was sent."""
    statuses: Mapping[int, int] = field(default_factory=dict)
    """How many answers had each HTTP status. An answer that was cut off counts under the status it began
    with."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Everything counted since the server started or was last reset. Admin requests are not counted.

    Starting, completing, aborting and listing uploads, and bucket operations, are ``other``. In the JSON API
    a metadata read is ``head``, an upload (each chunk of a resumable one) is ``put``; a batch is one
    ``other``, and each call inside it also counts under its own kind, without bytes.
    """

    get: Tally = Tally()
    head: Tally = Tally()
    put: Tally = Tally()
    list: Tally = Tally()
    delete: Tally = Tally()
    copy: Tally = Tally()
    compose: Tally = Tally()
    part: Tally = Tally()
    other: Tally = Tally()
    max_concurrent: int = 0
    """Most requests in progress at one moment."""
    injected: Mapping[str, int] = field(default_factory=dict)
    """Faults that were carried out, by name: error, cut, truncate, stall, throttle."""
    cpu_s: float = 0.0
    """Processor time of the server process, user and system, in seconds."""

    def tally(self, kind: Kind) -> Tally:
        """The tally of one kind by its name."""
        found: Tally = getattr(self, kind)
        return found

    @property
    def requests(self) -> int:
        """Requests of all kinds."""
        return sum(self.tally(kind).requests for kind in KINDS)

    @property
    def bytes_in(self) -> int:
        """Request body bytes of all kinds."""
        return sum(self.tally(kind).bytes_in for kind in KINDS)

    @property
    def bytes_out(self) -> int:
        """Response body bytes of all kinds."""
        return sum(self.tally(kind).bytes_out for kind in KINDS)

    @property
    def statuses(self) -> dict[int, int]:
        """Answers by HTTP status, of all kinds."""
        total: Counter[int] = Counter()
        for kind in KINDS:
            total.update(self.tally(kind).statuses)
        return dict(total)

    def to_json(self) -> dict[str, Any]:
        """A form that :func:`json.dumps` takes."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counters:
        """The inverse of :meth:`to_json`, after a trip through JSON text (statuses become strings)."""
        values = dict(data)
        for kind in KINDS:
            tally = dict(values[kind])
            tally["statuses"] = {int(status): count for status, count in tally["statuses"].items()}
            values[kind] = Tally(**tally)
        return cls(**values)


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Tally) else value


class _Row:
    __slots__ = ("bytes_in", "bytes_out", "requests", "statuses")

    def __init__(self) -> None:
        self.requests = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.statuses: dict[int, int] = {}


class Ledger:
    """The running counts inside the server (one thread, so no locks)."""

    def __init__(self) -> None:
        self._in_progress = 0
        self.reset()

    def reset(self) -> None:
        """Start again from zero; requests in progress now still count towards ``max_concurrent``."""
        self._rows: dict[Kind, _Row] = {kind: _Row() for kind in KINDS}
        self._most = self._in_progress
        self._injected: Counter[str] = Counter()
        self._cpu_start_s = time.process_time()

    def begin(self, kind: Kind) -> None:
        """A request has arrived."""
        self._in_progress += 1
        if self._in_progress > self._most:
            self._most = self._in_progress
        self._rows[kind].requests += 1

    def end(self, kind: Kind, status: int, bytes_in: int, bytes_out: int) -> None:
        """The same request was answered. ``status`` 0: the client left before an answer began."""
        self._in_progress -= 1
        self._record(self._rows[kind], status, bytes_in, bytes_out)

    def inner(self, kind: Kind, status: int) -> None:
        """A call inside a batch was answered."""
        row = self._rows[kind]
        row.requests += 1
        self._record(row, status, 0, 0)

    def inject(self, fault: Injected) -> None:
        """A fault was carried out."""
        self._injected[fault] += 1

    @staticmethod
    def _record(row: _Row, status: int, bytes_in: int, bytes_out: int) -> None:
        row.bytes_in += bytes_in
        row.bytes_out += bytes_out
        if status:
            row.statuses[status] = row.statuses.get(status, 0) + 1

    def snapshot(self) -> Counters:
        """The counts now."""
        tallies = {
            kind: Tally(row.requests, row.bytes_in, row.bytes_out, dict(row.statuses))
            for kind, row in self._rows.items()
        }
        return Counters(
            **tallies,
            max_concurrent=self._most,
            injected=dict(self._injected),
            cpu_s=time.process_time() - self._cpu_start_s,
        )
