"""Measurements of contenders, each in a fresh process, interleaved, with the raw samples kept."""

from __future__ import annotations

import datetime
import gc
import json
import multiprocessing
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from servers import Server
from voxlane.bench.process_usage import TreeMemorySampler, read_pss_bytes
from voxlane.bench.report import find_cpu_model, find_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
_POLL_S = 0.05
_CONTEXT = multiprocessing.get_context("forkserver")
# torch takes over a second to import. The fork server imports it once, and nothing else: every measurement is a fork
# of that clean process, so contenders share no modules, connections, caches or memory.
_CONTEXT.set_forkserver_preload(["torch", "torch.utils.data"])

Sample = dict[str, Any]
"""Result of one measurement: `error` if it failed, otherwise what the measured function returned; always with
`peak_rss_bytes` (or `peak_memory_bytes`), `server_cpu_s` and `server_requests`."""


def interleaved(contenders: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round, contender): all contenders in turn, each round starting with another one."""
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

    With `shared_once`, memory is reported as `peak_memory_bytes` instead of `peak_rss_bytes`: shared memory counts
    once, and mapped files, which the kernel can drop, do not count.
    """
    requests, cpu_s = server.requests(), server.cpu_s()
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_child, args=(work, dict(arguments), sender))
    process.start()
    sender.close()
    read_bytes = _own_bytes if shared_once else _resident_bytes
    with TreeMemorySampler(process.pid or 0, read_bytes=read_bytes, interval_s=_POLL_S) as memory:
        answered = receiver.poll(limit_s)
        try:
            sample: Sample = receiver.recv() if answered else {"error": f"no result within {limit_s:.0f} s"}
        except EOFError:
            process.join()
            sample = {"error": f"the process ended with status {process.exitcode}"}
    sample["peak_memory_bytes" if shared_once else "peak_rss_bytes"] = memory.bytes
    sample["server_cpu_s"] = round(server.cpu_s() - cpu_s, 3)
    after = server.requests()
    sample["server_requests"] = {k: n - requests.get(k, 0) for k, n in after.items() if n > requests.get(k, 0)}
    _end(process)
    return sample


def _child(work: Callable[..., Sample], arguments: dict[str, Any], answer: Connection) -> None:
    # One process group for all, so that processes that a contender leaves behind can be ended.
    os.setpgid(0, 0)
    # Workers would be started by the fork server; contenders get Linux's default method.
    multiprocessing.set_start_method("fork", force=True)
    try:
        answer.send(work(**arguments))
    except BaseException as error:  # noqa: BLE001 - a process's boundary: the error becomes part of the result
        answer.send({"error": anonymous(f"{type(error).__name__}: {error}")})
    answer.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of some contenders keep the interpreter from ending, or abort it; the result is already sent


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
    """Measures the time and the processor time of this process and of children that have ended."""

    def __init__(self) -> None:
        gc.collect()
        self._cpu_s = _own_cpu_s()
        self._start = time.perf_counter()

    def elapsed_s(self) -> float:
        """Return the wall-clock seconds since the start."""
        return time.perf_counter() - self._start

    def cpu_s(self) -> float:
        """Return the processor seconds since the start; workers count once they are joined."""
        return _own_cpu_s() - self._cpu_s


def _own_cpu_s() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usages)


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; memory that processes share counts in each."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _own_bytes(pid: int) -> int:
    """Return the share of a process in anonymous and shared memory, without mapped files."""
    return read_pss_bytes(pid, "Pss_Anon|Pss_Shmem")


# -- results -----------------------------------------------------------------------------------------------------------


def facts(libraries: Sequence[str]) -> dict[str, Any]:
    """Return where and on what this ran; it names no host and no path."""
    versions = find_versions(libraries)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {
            "cpu": find_cpu_model(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "versions": {name: versions.get(name, "not installed") for name in libraries},
    }


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.name}", flush=True)


def hide_host(path: Path) -> None:
    """Remove this machine's name from a result of `voxlane bench loading` before it is published."""
    result: dict[str, Any] = json.loads(path.read_text())
    for epoch in result["epochs"]:
        for node in epoch["nodes"]:
            node["host"] = "localhost"
    path.write_text(json.dumps(result, indent=1) + "\n")


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = [line for line in git("status", "--porcelain", "src").splitlines() if line]
    return git("rev-parse", "HEAD")[:12] + (" with changes in src" if changed else "")


def anonymous(text: str) -> str:
    """Return an error message without this machine's paths, at most 500 characters."""
    return re.sub(r"(/[\w.\-]+){2,}/", ".../", text)[:500]
