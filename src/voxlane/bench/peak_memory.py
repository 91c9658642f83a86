"""How much more memory a call takes at its highest than there was in use before it."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import TracebackType
from typing import Self

_PROC = Path("/proc/self")


class PeakMemory:
    """A `with` block whose `extra_bytes` is afterwards how far this process's resident memory rose above where it was
    at the start, as the kernel noted it; None where the kernel does not (other systems than Linux)."""

    extra_bytes: int | None = None

    def __enter__(self) -> Self:
        gc.collect()
        try:
            (_PROC / "clear_refs").write_text("5")  # forget the highest so far
            self._before = _status("VmRSS")
        except OSError:
            self._before = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            peak = _status("VmHWM")
            self.extra_bytes = None if peak is None else max(0, peak - self._before)


def _status(name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
