"""Measurements: each in a fresh process, interleaved over contenders, kept raw, summed up as median and spread."""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from servers import Server

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
_POLL_S = 0.05
_CONTEXT = multiprocessing.get_context("forkserver")
# torch takes over a second to import. The fork server imports it once, and nothing else: every measurement is a fork
# of that clean process, so no contender finds another one's modules, connections, caches or memory.
_CONTEXT.set_forkserver_preload(["torch", "torch.utils.data"])

Sample = dict[str, Any]
"""What one measurement found. `error` when it failed; else what the measured function returned, and `peak_rss_bytes`
(or `peak_memory_bytes`), `server_cpu_s`, `server_requests`."""


def interleaved(contenders: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, contender): all contenders in turn, each round starting with another one."""
    for turn in range(rounds):
        start = turn % len(contenders)
        for name in [*contenders[start:], *contenders[:start]]:
            yield turn, name


def measure(
    work: Callable[..., Sample],
    arguments: Mapping[str, Any],
    server: Server,
    *,
    limit_s: float,
    shared_once: bool = False,
) -> Sample:
    """Run `work(**arguments)` in a process of its own and watch it. `work` is importable and returns plain data.

    `shared_once`: memory is told as `peak_memory_bytes`, in which what processes share counts once and mapped files,
    which the kernel can drop, do not count; instead of `peak_rss_bytes`.
    """
    requests, cpu_s = server.requests(), server.cpu_s()
    mine, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_child, args=(work, dict(arguments), theirs))
    process.start()
    theirs.close()
    with _PeakMemory(process.pid or 0, _own_memory if shared_once else _resident) as memory:
        answered = mine.poll(limit_s)
        try:
            sample: Sample = mine.recv() if answered else {"error": f"no result within {limit_s:.0f} s"}
        except EOFError:
            process.join()
            sample = {"error": f"the process ended with status {process.exitcode}"}
    sample["peak_memory_bytes" if shared_once else "peak_rss_bytes"] = memory.peak_bytes
    sample["server_cpu_s"] = round(server.cpu_s() - cpu_s, 3)
    after = server.requests()
    sample["server_requests"] = {k: n - requests.get(k, 0) for k, n in after.items() if n > requests.get(k, 0)}
    _end(process)
    return sample


def _child(work: Callable[..., Sample], arguments: dict[str, Any], answer: Connection) -> None:
    # Workers and listers that a contender leaves behind must be found: one group for all of them.
    os.setpgid(0, 0)
    # A forked server's child would start its own workers through the server; contenders get Linux's default.
    multiprocessing.set_start_method("fork", force=True)
    try:
        answer.send(work(**arguments))
    except BaseException as error:  # noqa: BLE001 - a process's boundary: the error becomes part of the result
        answer.send({"error": anonymous(f"{type(error).__name__}: {error}")})
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some contenders' threads keep an interpreter from ending, or abort it; the result is out already


def _end(process: multiprocessing.process.BaseProcess) -> None:
    pid = process.pid or 0
    process.join(5)
    for left in [psutil.Process(p) for p in psutil.pids() if _group(p) == pid]:
        try:
            left.kill()
        except psutil.NoSuchProcess:
            continue
    process.join()
    process.close()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


class Stopwatch:
    """Time and processor time of this process and of children that have ended, from its start."""

    def __init__(self) -> None:
        gc.collect()
        self._cpu_s = _own_cpu_s()
        self._start = time.perf_counter()

    def elapsed_s(self) -> float:
        """Wall-clock seconds since the start."""
        return time.perf_counter() - self._start

    def cpu_s(self) -> float:
        """Processor seconds since the start; workers count once they were joined."""
        return _own_cpu_s() - self._cpu_s


def _own_cpu_s() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usages)


def _resident(process: psutil.Process) -> int:
    """Memory that processes share (batches on their way, the interpreter's pages) counts in each."""
    return int(process.memory_info().rss)


def _own_memory(process: psutil.Process) -> int:
    """This process's share of anonymous and shared memory, as the kernel divides it among those who map it."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return 1024 * sum(int(kib) for kib in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", text, re.MULTILINE))


class _PeakMemory:
    """The largest sum of memory over a process and its descendants, polled."""

    def __init__(self, pid: int, count: Callable[[psutil.Process], int]) -> None:
        self.peak_bytes = 0
        self._count = count
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_POLL_S):
            total = 0
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    total += self._count(process)
            except psutil.NoSuchProcess:
                continue
            self.peak_bytes = max(self.peak_bytes, total)


# -- results -----------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def facts(libraries: Sequence[str]) -> dict[str, Any]:
    """Where and on what this ran; names no host and no path."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "versions": {name: _version(name) for name in libraries},
    }


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.name}", flush=True)


def hide_host(path: Path) -> None:
    """Take this machine's name out of a result of `voxlane bench loading`, which is to be published."""
    result: dict[str, Any] = json.loads(path.read_text())
    for epoch in result["epochs"]:
        for node in epoch["nodes"]:
            node["host"] = "localhost"
    path.write_text(json.dumps(result, indent=1) + "\n")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = [line for line in git("status", "--porcelain", "src").splitlines() if line]
    return git("rev-parse", "HEAD")[:12] + (" with changes in src" if changed else "")


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def anonymous(text: str) -> str:
    """An error message without this machine's paths, at most 500 characters."""
    return re.sub(r"(/[\w.\-]+){2,}/", ".../", text)[:500]
