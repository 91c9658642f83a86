"""What a process and its children take: processor time and memory, as Linux tells it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

_PROC = Path("/proc")
_SAMPLE_S = 0.25


def pids() -> list[int]:
    """This process and all that descend from it."""
    found = [os.getpid()]
    for pid in found:
        for task in _children_files(pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found += [int(word) for word in task.read_text().split()]
    return found


def _children_files(pid: int) -> list[Path]:
    try:
        return list((_PROC / str(pid) / "task").glob("*/children"))
    except OSError:
        return []


def cpu_s() -> float:
    """Seconds of a processor, user and system, that this process and its living descendants have used."""
    times = os.times()
    used = times.user + times.system
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in pids()[1:]:
        with contextlib.suppress(OSError):
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
            used += (int(fields[11]) + int(fields[12])) / ticks
    return used


def memory_bytes() -> int:
    """Resident memory of this process and its descendants; what several share is split between them."""
    total = 0
    for pid in pids():
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def release_memory() -> None:
    """Give what is free back to the system, so that what follows is not charged for what went before."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def age_s() -> float | None:
    """Seconds since this process began; None where the system does not tell."""
    try:
        started = int((_PROC / "self" / "stat").read_text().rpartition(") ")[2].split()[19])
        return float((_PROC / "uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


class PeakMemory:
    """A `with` block whose `bytes` is afterwards the most that `memory_bytes` gave in it, asked four times a second."""

    def __enter__(self) -> Self:
        self.bytes = memory_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="voxlane-memory", daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(_SAMPLE_S):
            self.bytes = max(self.bytes, memory_bytes())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self.bytes = max(self.bytes, memory_bytes())
