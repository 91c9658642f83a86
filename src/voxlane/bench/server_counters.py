"""Counters of the server itself, if it is one that reports them: voxlane's emulator."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from voxlane import uri as uris
from voxlane.store import StoreConfig
from voxlane.store.credentials import resolve_endpoint

_TIMEOUT_S = 10.0
_REFUSALS = ("429", "503")
_NOT_COUNTS = ("max_concurrent", "injected", "cpu_s")


def read_counters(uri: str, config: StoreConfig) -> dict[str, float] | None:
    """Return totals since the server of a bucket started; None if it has no counters.

    bytes: bytes of the bodies of all responses.
    refused: requests answered with 429 or 503, because there were too many at once.
    cpu_s: processor seconds that the server used.
    """
    counters = _get(uri, config, "counters")
    if counters is None:
        return None
    kinds = [value for name, value in counters.items() if name not in _NOT_COUNTS]
    return {
        "bytes": sum(kind["bytes_out"] for kind in kinds),
        "requests": sum(kind["requests"] for kind in kinds),
        "refused": sum(kind["statuses"].get(status, 0) for kind in kinds for status in _REFUSALS),
        "cpu_s": counters["cpu_s"],
    }


def describe_server(uri: str, config: StoreConfig) -> dict[str, Any] | None:
    """Return the kind of the server and the faults it was configured with; None if it does not report them."""
    faults = _get(uri, config, "faults")
    return None if faults is None else {"kind": "emulator", "faults": faults}


def _get(uri: str, config: StoreConfig, path: str) -> Any:
    endpoint = resolve_endpoint(uris.parse(uri), config)
    if endpoint is None:
        return None
    try:
        with urllib.request.urlopen(f"{endpoint}/_emulator/{path}", timeout=_TIMEOUT_S) as response:
            answer = json.load(response)
    except (OSError, ValueError):  # another server, which does not know the path
        return None
    return answer if isinstance(answer, dict) else None
