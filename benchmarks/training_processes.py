"""Start training runs as a user does, and record from outside the time of each line and the load of the GPU."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voxlane.bench import report

_LIBRARIES = ("voxlane", "torch", "triton", "numpy", "lightning", "numcodecs", "obstore")
_SAMPLE_MS = 500
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
_QUERY = "utilization.gpu,memory.used,power.draw,clocks.sm"


class FailedError(Exception):
    """Raised when a command fails; the message holds its last lines."""

    @property
    def short(self) -> str:
        """Return the last line without this machine's paths, for a result file."""
        return re.sub(r"(/[\w.\-]+){2,}/?", "...", str(self).splitlines()[-1])[:300]


@dataclass(frozen=True)
class Line:
    """A line that a command printed."""

    at_s: float
    """Seconds since just before the process started."""
    text: str


@dataclass(frozen=True)
class Watched:
    """The output and duration of a command that has ended."""

    seconds: float
    """Seconds from before the process started until it ended."""
    lines: list[Line]

    def epochs(self) -> list[float]:
        """Return the time of each epoch's line, in seconds since before the process started."""
        return [line.at_s for line in self.lines if line.text.startswith("epoch ")]


def watch(*words: str, echo: bool = True, caches: Path | None = None) -> Watched:
    """Run `python -m voxlane WORDS`; FailedError if it fails.

    `caches` is a folder for compiled kernels instead of the user's. With a new folder the run compiles everything anew.
    """
    return watch_command([sys.executable, "-m", "voxlane", *words], echo=echo, caches=caches)


def watch_command(command: Sequence[str], *, echo: bool = True, caches: Path | None = None) -> Watched:
    """Run a command and record the time of each line that it prints; FailedError if it fails."""
    cache_variables = {} if caches is None else {name: str(caches / name.lower()) for name in _CACHES}
    environment = {**os.environ, **cache_variables, "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    lines: list[Line] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            lines.append(Line(time.perf_counter() - began, text.rstrip()))
            if echo:
                print(f"  {lines[-1].at_s:6.1f} s  {lines[-1].text}", flush=True)
    if process.returncode:
        last_lines = "\n".join(line.text for line in lines[-30:])
        raise FailedError(f"{' '.join(command[1:])} ended with {process.returncode}\n{last_lines}")
    return Watched(time.perf_counter() - began, lines)


# -- the GPU -----------------------------------------------------------------------------------------------------------


@dataclass
class Gpu:
    """Samples of the driver's counters, twice per second; empty without nvidia-smi.

    `utilization.gpu` is the fraction of the driver's last sampling period in which a kernel ran.
    """

    samples: list[dict[str, float]] = field(default_factory=list)

    def __enter__(self) -> Gpu:
        self._began = time.perf_counter()
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", f"-lms={_SAMPLE_MS}"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._thread = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._thread.join()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            try:
                busy, memory_mib, power_w, clock_mhz = map(float, text.split(","))
            except ValueError:  # "[N/A]", or a line that was cut off at the end
                continue
            at_s = round(time.perf_counter() - self._began, 2)
            counters = {"busy_share": busy / 100, "memory_mib": memory_mib, "power_w": power_w, "clock_mhz": clock_mhz}
            self.samples.append({"at_s": at_s, **counters})

    def between(self, first_s: float, last_s: float) -> dict[str, Any] | None:
        """Return means between two times, in seconds since the start; None without samples in between."""
        selected = [s for s in self.samples if first_s <= s["at_s"] <= last_s]
        if not selected:
            return None
        means = {name: sum(s[name] for s in selected) / len(selected) for name in selected[0] if name != "at_s"}
        return {"samples": len(selected), "least_busy_share": min(s["busy_share"] for s in selected), **means}


# -- results -----------------------------------------------------------------------------------------------------------


def facts(benchmark: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return when and on what hardware this ran, without host names and paths."""
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": settings.pop("commit", None) or report.find_commit(),
        "hardware": report.describe_hardware(),
        "python": platform.python_version(),
        "versions": report.find_versions(_LIBRARIES),
        "settings": settings,
    }


def save(path: Path, document: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.name}", flush=True)


def read(run: Path, name: str) -> Any:
    """Read a JSON file of a run."""
    return json.loads((run / name).read_text())
