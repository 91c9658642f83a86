"""A lease on a folder of a store: at most one job at a time writes a run, a search or a prepared dataset.

The lease is an object with the name of its holder. The holder replaces it every `BEAT_S`, conditionally, so it learns
when another job has taken it over; before it publishes anything, it checks. Others are refused while the holder lives.
They take the lease over at once if the holder's process on their own machine has ended, if the holder belongs to the
same job (a token that a launcher passes on, or an earlier start of a restarted job), and otherwise once the lease has
not been renewed for `EXPIRY_S` of their own clock. Clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from voxlane import settings
from voxlane.errors import (
    AlreadyExistsError,
    ChangedError,
    ConfigError,
    LeaseError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from voxlane.processes import ProcessId, read_scope
from voxlane.settings import record
from voxlane.store.bucket import Store, ignore_missing_object
from voxlane.store.uploads import drop_upload, list_unfinished_uploads

LEASE = "lease.json"
"""Name of the object in the folder that it is for."""
BEAT_S = 10.0
"""Seconds between renewals."""
EXPIRY_S = 40.0
"""Seconds without a renewal after which others may take the lease."""
_FRESH_S = 2.0
"""Age of a renewal below which a check trusts it. Services limit how often one object may be replaced."""
_POLL_S = 1.0
_log = logging.getLogger("voxlane")


@dataclass(frozen=True)
class JobStart:
    """One start of a job that a scheduler restarts, such as a SLURM job that returned to the queue. Before it starts a
    job again, the scheduler has ended the processes of the start before."""

    job: str = ""
    """Name of the job, unique in its cluster; empty: no scheduler restarts this process."""
    number: int = 0
    """Number of restarts before this start."""


@record
class LeaseHolder:
    """Content of the lease."""

    token: str
    """Name of the job, which its processes share."""
    host: str
    pid: int
    process: str
    """The holder's `ProcessId`."""
    since: str
    """When the holder took the lease."""
    job: str = ""
    start: int = 0
    """The holder's `JobStart`."""
    beats: int = 0
    """Number of renewals, so that every content is another one."""
    renewed_s: float = 0.0
    """Time of the last renewal on the holder's machine, in seconds since that was started."""

    @classmethod
    def parse(cls, body: bytes) -> LeaseHolder | None:
        """Return the holder; None for content that no holder wrote."""
        try:
            return settings.build(cls, json.loads(body))
        except (ValueError, ConfigError):
            return None

    def describe(self) -> str:
        """Return who holds the lease and since when."""
        job = f", {self.job}" if self.job else ""
        return f"host {self.host}, pid {self.pid}{job}, since {self.since}"


class Lease:
    """The lease on the folder of `store` that `prefix` names. It does no I/O until it is acquired.

    `subject`: what the folder holds, such as "run". `token`: that of the job which this process belongs to (default: a
    new one). `on_wait` receives a line if the lease may have expired, and its expiry has to be awaited.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        subject: str,
        *,
        token: str | None = None,
        start: JobStart | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.token = token or uuid.uuid4().hex
        self._store = store
        self._key = prefix + LEASE
        self._uri = store.uri(prefix).rstrip("/")
        self._subject = subject
        self._start = start or JobStart()
        self._on_wait = on_wait or _log.warning
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._holder: LeaseHolder | None = None
        self._etag = ""
        self._renewed_s = 0.0
        self._lost: LeaseError | None = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lease and renew it from a thread. Raises LeaseError if another job holds it."""
        me = LeaseHolder(
            token=self.token,
            host=socket.gethostname(),
            pid=os.getpid(),
            process=str(ProcessId.current()),
            since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            job=self._start.job,
            start=self._start.number,
        )
        seen_etag, seen_at_s = "", 0.0
        while not self._write(me, None):
            read = self._read()
            if read is None:
                continue
            etag, holder = read
            if seen_etag and etag != seen_etag:
                raise self._held_error(holder)
            if self._may_take(holder) or (seen_etag and _clock_s() - seen_at_s >= EXPIRY_S):
                if self._write(me, etag):
                    self._remove_unfinished_files()
                    break
                continue
            if holder is not None and _is_alive_here(holder):
                raise self._held_error(holder)
            if not seen_etag:
                seen_etag, seen_at_s = etag, _clock_s()
                self._on_wait(
                    f"{self._uri}: {self._describe(holder)} may still write this {self._subject}; continuing unless it "
                    f"renews its lease within {EXPIRY_S:.0f} s"
                )
            time.sleep(_POLL_S)
        self._pid, self._lost = os.getpid(), None
        self._stopped.clear()
        self._thread = threading.Thread(target=self._renew_regularly, name="voxlane-lease", daemon=True)
        self._thread.start()

    def _remove_unfinished_files(self) -> None:
        """Remove what the former holder had not finished. In a bucket, nobody sees such uploads but `checkpoint gc`."""
        if self._store.scheme == "file":
            for upload in list_unfinished_uploads(self._store, self._key.removesuffix(LEASE)):
                drop_upload(self._store, upload)

    def check(self) -> None:
        """Raise LeaseError if another process has taken the lease over. Called before anything is published. A process
        that does not hold the lease, such as a rank other than the first, passes."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self.raise_if_lost()
            if _clock_s() - self._renewed_s > _FRESH_S:
                self._renew()
            self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise LeaseError if it is already known that another process has taken the lease over."""
        if self._lost is not None:
            raise self._lost

    def release(self, *, whole_job: bool = False) -> None:
        """Give the lease up if this process still holds it; with `whole_job`, also if it was left by a process of its
        job that this process started and that has ended."""
        if self._pid != os.getpid():
            return
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._pid = 0
        try:
            with self._lock:
                if self._lost is None:
                    self._renew()  # others then wait for its expiry, and cannot take it while it is deleted
                if self._lost is None or (whole_job and self._take_from_ended_process()):
                    self._store.delete_one(self._key)
        except StoreError as error:
            _log.warning("the lease could not be given up, and expires in %.0f s: %s", EXPIRY_S, error)

    def _renew_regularly(self) -> None:
        while not self._stopped.wait(BEAT_S):
            with self._lock, contextlib.suppress(StoreError):  # tried again with the next beat
                self._renew()
                if self._lost is not None:
                    return

    def _renew(self) -> None:
        """Replace the lease by its next beat, or note that it is lost."""
        assert self._holder is not None
        if self._write(self._holder, self._etag):
            return
        read = self._read()
        taker = self._describe(read[1]) + " took it over" if read is not None else "its lease was deleted"
        self._lost = LeaseError(
            f"this process no longer writes the {self._subject}: {taker}",
            uri=self._uri,
            fix=f"Let one job at a time write a {self._subject}",
        )

    def _write(self, holder: LeaseHolder, etag: str | None) -> bool:
        """Write the lease if it is absent (`etag` is None) or has this version; return whether it was written."""
        renewed = replace(holder, beats=holder.beats + 1, renewed_s=_clock_s())
        body = json.dumps(asdict(renewed)).encode()
        try:
            if etag is None:
                info = self._store.put(self._key, body, if_absent=True)
            else:
                info = self._store.put(self._key, body, if_etag=etag)
        except (AlreadyExistsError, ChangedError, NotFoundError):
            return False
        except UnsupportedError:  # without conditional writes, another job is noticed only before the write
            current = self._store.find(self._key)
            if (current and current.etag) != etag:
                return False
            info = self._store.put(self._key, body)
        self._holder, self._etag, self._renewed_s = renewed, info.etag or "", renewed.renewed_s
        return True

    def _read(self) -> tuple[str, LeaseHolder | None] | None:
        """Return the version and content of the lease; None if it is absent or was just replaced."""
        with ignore_missing_object(), contextlib.suppress(ChangedError):
            info = self._store.find(self._key)
            if info is not None and info.etag is not None:
                return info.etag, LeaseHolder.parse(bytes(self._store.get(self._key, etag=info.etag)))
        return None

    def _may_take(self, holder: LeaseHolder | None) -> bool:
        """Return whether the holder is known to write no more, or belongs to this process's job."""
        if holder is None:  # nobody who holds a lease wrote this
            return True
        if holder.token == self.token:
            return True
        if holder.job and holder.job == self._start.job and holder.start < self._start.number:
            return True
        process = ProcessId.parse(holder.process)
        if process is None or process.scope != read_scope():
            return False
        return process.has_ended() or _clock_s() - holder.renewed_s >= EXPIRY_S

    def _take_from_ended_process(self) -> bool:
        """Take the lease over if its holder belongs to this job and is not known to be alive; return whether it did."""
        etag, holder = self._read() or ("", None)
        if holder is None or holder.token != self.token or _is_alive_here(holder):
            return False
        return self._write(holder, etag)

    def _held_error(self, holder: LeaseHolder | None) -> LeaseError:
        return LeaseError(
            f"another process writes this {self._subject}: {self._describe(holder)}",
            uri=self._uri,
            fix=f"Wait until it has ended, or stop it; if it hangs, its lease expires after {EXPIRY_S:.0f} s",
        )

    def _describe(self, holder: LeaseHolder | None) -> str:
        return holder.describe() if holder is not None else f"the writer of {self._store.uri(self._key)}"


def _is_alive_here(holder: LeaseHolder) -> bool:
    """Return whether the holder is a process of this machine that has not ended."""
    process = ProcessId.parse(holder.process)
    return process is not None and process.scope == read_scope() and not process.has_ended()


def _clock_s() -> float:
    """Return seconds since the machine was started, including those it slept."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def check_token(store: Store, prefix: str, token: str, subject: str) -> None:
    """Raise LeaseError unless the job with this token holds the lease on the folder. For workers of the holder."""
    lease: Any = None
    with ignore_missing_object():
        lease = LeaseHolder.parse(bytes(store.get(prefix + LEASE)))
    if lease is None or lease.token != token:
        holder = lease.describe() + " took it over" if lease is not None else "its lease was deleted"
        raise LeaseError(f"this process no longer writes the {subject}: {holder}", uri=store.uri(prefix).rstrip("/"))
