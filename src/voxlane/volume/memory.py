"""The memory that a process may still use, so that a scan that needs more is rejected before it is read."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from voxlane.errors import ScanError
from voxlane.sizes import format_bytes

if sys.platform != "win32":
    import resource

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of this container's memory, in versions 2 and 1 of cgroups."""


class ScanMemoryError(ScanError):
    """Raised for a scan that needs more memory than there is."""


def available_bytes() -> int:
    """Return how much memory this process may still allocate: what the machine and the container have left, within the
    limits of the process (`ulimit -v`, `ulimit -d`)."""
    limits = [_free_on_machine()]
    for limit_file, use_file in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max" in it
            limits.append(int(Path(limit_file).read_text()) - int(Path(use_file).read_text()))
    used = _read_status()
    for name, field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(limit - used.get(field, 0))
    return max(0, min(limits))


def limit_memory(num_bytes: int) -> None:
    """Let allocations of this process fail once it has `num_bytes` more than now, whatever library makes them."""
    used = _read_status().get("VmData")
    if used is not None:  # Linux; elsewhere the limit does not count mapped memory
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = used + num_bytes if hard == resource.RLIM_INFINITY else min(used + num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def check_scan_fits(num_bytes: int, uri: str, purpose: str) -> None:
    """Raise ScanMemoryError if `num_bytes` are not available; `purpose` names what needs them."""
    available = available_bytes()
    if num_bytes > available:
        raise ScanMemoryError(
            f"{purpose} needs about {format_bytes(num_bytes)} of memory, and {format_bytes(available)} are available",
            uri=uri,
            fix="Check the shape and the spacing in its header, or use a machine with more memory",
        )


def _free_on_machine() -> int:
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_status() -> dict[str, int]:
    """Return the sizes in /proc/self/status in bytes, by name; empty where there is no such file."""
    sizes = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if value.endswith("kB"):
                sizes[name] = int(value.split()[0]) * 1024
    return sizes
