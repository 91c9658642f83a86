"""Processor time and memory of a process and its children, as Linux reports them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

_PROC = Path("/proc")


def find_descendants(pid: int) -> list[int]:
    """Return `pid` and the ids of all processes that descend from it."""
    pids = [pid]
    for parent in pids:
        for path in (_PROC / str(parent) / "task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                pids += [int(child) for child in path.read_text().split()]
    return pids


def measure_cpu_s() -> float:
    """Return the processor seconds, user and system, of this process and its living descendants."""
    times = os.times()
    used_s = times.user + times.system
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in find_descendants(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
            used_s += (int(fields[11]) + int(fields[12])) / ticks
    return used_s


def read_pss_bytes(pid: int, kinds: str = "Pss") -> int:
    """Return the proportional memory of a process: memory that several processes share is divided among them. `kinds`
    is a pattern of the lines of smaps_rollup to add up."""
    try:
        text = (_PROC / str(pid) / "smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return 1024 * sum(int(kib) for kib in re.findall(rf"^(?:{kinds}):\s+(\d+) kB$", text, re.MULTILINE))


def release_memory() -> None:
    """Return free memory to the system, so that the next measurement does not count it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def find_age_s() -> float | None:
    """Return the seconds since this process started; None where the system does not report it."""
    try:
        started = int((_PROC / "self" / "stat").read_text().rpartition(") ")[2].split()[19])
        return float((_PROC / "uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


class TreeMemorySampler:
    """A `with` block after which `bytes` is the most memory that a process and its descendants used in it, sampled
    every `interval_s` seconds by `read_bytes`."""

    def __init__(
        self, pid: int | None = None, *, read_bytes: Callable[[int], int] = read_pss_bytes, interval_s: float = 0.25
    ) -> None:
        self.bytes = 0
        self._pid = os.getpid() if pid is None else pid
        self._read_bytes = read_bytes
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="voxlane-memory", daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        total = sum(map(self._read_bytes, find_descendants(self._pid)))
        if not total and self._pid == os.getpid():  # not Linux
            total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self.bytes = max(self.bytes, total)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()


class PeakMemory:
    """A `with` block after which `extra_bytes` is the peak of this process's resident memory above its size at the
    start, as the kernel recorded it; None where the kernel does not (other systems than Linux)."""

    extra_bytes: int | None = None
    _before_bytes: int | None = None

    def __enter__(self) -> Self:
        gc.collect()
        with contextlib.suppress(OSError):
            (_PROC / "self" / "clear_refs").write_text("5")  # resets the kernel's peak
            self._before_bytes = _read_status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self._before_bytes is not None and (peak_bytes := _read_status("VmHWM")) is not None:
            self.extra_bytes = max(0, peak_bytes - self._before_bytes)


def _read_status(name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", (_PROC / "self" / "status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else None
