"""Repeat failed requests. `translate` decides which failures are retried, `RetryConfig` for how long."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from voxlane.errors import StoreError
from voxlane.store.config import RetryConfig
from voxlane.store.counters import RequestCounters
from voxlane.store.translate import TransientError, is_foreign, translate

_T = TypeVar("_T")
_log = logging.getLogger("voxlane")
_ATTEMPTS_BEFORE_WARNING = 5
"""Warn after this many failed attempts; occasional failures are normal."""
_WARNING_INTERVAL_S = 30.0
"""Warn at most this often for all requests of a store."""


class Retrier:
    """Repeats the requests of one store while they fail transiently."""

    def __init__(self, config: RetryConfig) -> None:
        self._config = config
        self._last_warning_s = -_WARNING_INTERVAL_S

    def call(self, kind: str, uri: str, attempt: Callable[[], _T], counters: RequestCounters) -> _T:
        """Call `attempt` until it succeeds, fails permanently, or the deadline passes; count every attempt."""
        deadline = time.monotonic() + self._config.deadline_s
        delay_s = self._config.initial_delay_s
        attempts = 0
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
            if time.monotonic() + pause_s > deadline:
                raise failure.to_unavailable(attempts) from None
            is_due = time.monotonic() - self._last_warning_s > _WARNING_INTERVAL_S
            if attempts == _ATTEMPTS_BEFORE_WARNING and is_due:  # many requests fail together; one line is enough
                self._last_warning_s = time.monotonic()
                _log.warning("%s: %s; retrying for up to %.0f s", failure.uri, failure, self._config.deadline_s)
            time.sleep(pause_s)
            delay_s = min(delay_s * self._config.multiplier, self._config.max_delay_s)
