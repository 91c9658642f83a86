"""What the server itself counted, where it is one that tells: our emulator."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import astuple, dataclass
from typing import Any

from voxlane import uri as uris
from voxlane.store import StoreConfig
from voxlane.store.credentials import endpoint_of

_TIMEOUT_S = 10.0
_REFUSALS = ("429", "503")
_NOT_COUNTS = ("max_concurrent", "injected", "cpu_s")


@dataclass(frozen=True)
class Counted:
    """Since the server began to count; subtract two."""

    bytes: int
    """Of answers' bodies."""
    requests: int
    refused: int
    """Answered with 429 or 503: too many at once."""
    cpu_s: float
    """Seconds of a processor that the server used."""

    def __sub__(self, other: Counted) -> Counted:
        mine, theirs = astuple(self), astuple(other)
        return Counted(*(a - b for a, b in zip(mine, theirs, strict=True)))


class Server:
    """The server of a bucket. One that does not count gives None."""

    def __init__(self, uri: str, config: StoreConfig) -> None:
        self._endpoint = endpoint_of(uris.parse(uri), config)

    def counted(self) -> Counted | None:
        """What it has counted so far."""
        told = self._ask("counters")
        if told is None:
            return None
        kinds = [value for name, value in told.items() if name not in _NOT_COUNTS]
        return Counted(
            sum(kind["bytes_out"] for kind in kinds),
            sum(kind["requests"] for kind in kinds),
            sum(kind["statuses"].get(status, 0) for kind in kinds for status in _REFUSALS),
            told["cpu_s"],
        )

    def description(self) -> dict[str, Any] | None:
        """What the server is and how it was told to behave."""
        faults = self._ask("faults")
        return None if faults is None else {"kind": "emulator", "faults": faults}

    def _ask(self, what: str) -> Any:
        if self._endpoint is None:
            return None
        try:
            with urllib.request.urlopen(f"{self._endpoint}/_emulator/{what}", timeout=_TIMEOUT_S) as answer:
                told = json.load(answer)
        except (urllib.error.URLError, OSError, ValueError):  # another server, to which the path means nothing
            return None
        return told if isinstance(told, dict) else None
