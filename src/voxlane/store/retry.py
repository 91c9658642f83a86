"""Repeat failed requests. `translate` decides which failures are retried, `RetryConfig` for how long."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from voxlane.errors import StoreError, VoxlaneError
from voxlane.redaction import redact_text
from voxlane.store.config import RetryConfig
from voxlane.store.counters import RequestCounters
from voxlane.store.translate import TransientError, WrongBytesError, is_foreign, translate

_T = TypeVar("_T")
_log = logging.getLogger("voxlane")
_ATTEMPTS_BEFORE_WARNING = 5
"""Warn after this many failed attempts; occasional failures are normal."""
MAX_READS = 5
"""Reads whose bytes are wrong before the object is blamed."""
_WARNING_INTERVAL_S = 30.0
"""Warn at most this often for all requests of a store."""


def read_until_intact(read: Callable[[], _T], damage: type[VoxlaneError], counters: RequestCounters) -> _T:
    """Return what `read` returns. If it raises `damage`, read again, because something on the way may have changed the
    bytes; the error that is raised after the last read says how often they were read."""
    for num_reads in range(1, MAX_READS + 1):
        try:
            return read()
        except damage as error:
            if num_reads == MAX_READS:
                message = f"{error.message} (the same after {num_reads} reads)"
                raise type(error)(message, uri=error.uri, fix=error.fix) from None
            counters.add("get", requests=0, retries=1)
    raise AssertionError("unreachable")


class Retrier:
    """Repeats the requests of one store while they fail transiently."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._last_warning_s = -_WARNING_INTERVAL_S

    def call(self, kind: str, uri: str, attempt: Callable[[], _T], counters: RequestCounters) -> _T:
        """Call `attempt` until it succeeds, fails permanently, or the deadline passes; count every attempt."""
        deadline = time.monotonic() + self._config.deadline_s
        delay_s = self._config.initial_delay_s
        attempts = wrong_reads = 0
        while True:
            attempts += 1
            counters.add(kind, retries=int(attempts > 1))
            try:
                return attempt()
            except TransientError as error:
                failure = error
            except Exception as error:
                if not is_foreign(error):
                    raise
                translated = translate(error, uri)
                if isinstance(translated, StoreError):
                    raise translated from None
                failure = translated
            pause_s = delay_s * random.uniform(0.5, 1.0)
            if isinstance(failure, WrongBytesError):
                wrong_reads += 1
                if wrong_reads == MAX_READS or time.monotonic() + pause_s > deadline:
                    raise failure.blame(wrong_reads) from None
            if time.monotonic() + pause_s > deadline:
                raise failure.to_unavailable(attempts) from None
            is_due = time.monotonic() - self._last_warning_s > _WARNING_INTERVAL_S
            if attempts == _ATTEMPTS_BEFORE_WARNING and is_due:  # many requests fail together; one line is enough
                self._last_warning_s = time.monotonic()
                text = redact_text(f"{failure.uri}: {failure}")
                _log.warning("%s; retrying for up to %.0f s", text, self._config.deadline_s)
            time.sleep(pause_s)
            delay_s = min(delay_s * self._config.multiplier, self._config.max_delay_s)
