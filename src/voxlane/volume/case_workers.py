"""Processes that check and prepare cases, each case within limits of memory and time."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from voxlane.store import Store, StoreConfig
from voxlane.volume.case_checks import CaseProblem, ProblemKind
from voxlane.volume.dataset_layouts import SourceCase
from voxlane.volume.description import Description
from voxlane.volume.memory import available_bytes
from voxlane.volume.plan import Plan
from voxlane.volume.worker_process import WorkerCrashError, WorkerMemoryError, WorkerProcess, WorkerTimeoutError

_ABOUT_MEMORY = "use fewer workers, or let a case have more memory (case_memory_gb)"


@dataclass(frozen=True)
class CaseTask:
    """One case for a worker."""

    case: SourceCase
    description: Description
    plan: Plan | None
    config: StoreConfig | None
    root: str
    """URI of the prepared dataset; empty if the case is only checked."""
    record_key: str
    """Key of the record that the case is done; empty if there is none."""
    lease_token: str
    """Token of the lease on the prepared dataset, without which nothing may be written; empty if there is none."""
    listed: tuple[str, ...]
    """URIs of those files of the case that the source's listing named."""


CaseWork = Callable[[CaseTask], dict[str, Any]]
"""Work on a case. Its result has `problems`, a list of problems as plain data."""


class CaseWorkers:
    """Worker processes for cases, with limits of time and memory for each case. Without isolation, a single worker is
    this process, which has no limits."""

    def __init__(
        self,
        count: int,
        case_memory_bytes: int,
        timeout_s: float,
        progress: bool | None,
        *,
        isolate: bool = True,
        check_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare processes without starting them. 0: a worker for each core, and for each case an equal part of the
        free memory. `check_lease` raises when results may no longer be recorded."""
        self._check_lease = check_lease
        self._count = count or os.cpu_count() or 1
        self._in_process = not isolate and self._count == 1
        self._progress = progress
        self.case_memory_bytes = case_memory_bytes or available_bytes() // self._count
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(self._count, "case")
        self._processes = [WorkerProcess(_init_worker, self.case_memory_bytes) for _ in range(self._count)]
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def __enter__(self) -> CaseWorkers:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if error is not None:
            for process in self._processes:
                process.kill()  # which ends the call that a thread may be waiting for
        self._threads.shutdown()
        for process in self._processes:
            process.close()

    def run(
        self,
        work: CaseWork,
        tasks: Mapping[str, CaseTask],
        known_results: Mapping[str, Any],
        store: Store | None,
        title: str,
    ) -> dict[str, dict[str, Any]]:
        """Return the result of `work` for every case without a known result, and record each in `store` immediately if
        its task has a key. The result of a case that was ended by its limits is that problem."""
        results = {}
        disable = None if self._progress is None else not self._progress
        with tqdm(total=len(tasks), initial=len(known_results), desc=title, unit="case", disable=disable) as bar:
            for name, result in self._results(work, {n: task for n, task in tasks.items() if n not in known_results}):
                self._check_lease()
                if store is not None:
                    store.put(tasks[name].record_key, json.dumps(result).encode())
                results[name] = result
                bar.update()
        return results

    def _results(self, work: CaseWork, tasks: Mapping[str, CaseTask]) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._in_process:
            for name, task in tasks.items():
                yield name, work(task)
            return
        names = {self._threads.submit(self._call, work, task): name for name, task in tasks.items()}
        killed = []
        for future in as_completed(names):
            name = names.pop(future)
            try:
                yield name, future.result()
            except WorkerCrashError:
                killed.append(name)
        for name in killed:  # alone, because another case may have taken the memory
            try:
                yield name, self._call(work, tasks[name])
            except WorkerCrashError as error:
                yield name, _fail(name, "crash", f"{error}, twice; {_ABOUT_MEMORY}")

    def _call(self, work: CaseWork, task: CaseTask) -> dict[str, Any]:
        process = self._idle.get()
        try:
            result: dict[str, Any] = process.call(work, task, timeout_s=self._timeout_s)
            return result
        except WorkerTimeoutError as error:
            return _fail(task.case.id, "time", f"{error}; case_timeout_s sets how long a case may take")
        except WorkerMemoryError as error:
            return _fail(task.case.id, "memory", f"{error}; {_ABOUT_MEMORY}")
        finally:
            self._idle.put(process)


def _fail(name: str, kind: ProblemKind, text: str) -> dict[str, Any]:
    """Return the result of a case whose work was ended."""
    return {
        "problems": [asdict(CaseProblem(name, kind, text, fatal=True, transient=True))],
        "fingerprint": None,
        "summary": None,
    }


def _init_worker() -> None:
    """Limit a worker to one thread, because there is one worker per core."""
    import torch

    torch.set_num_threads(1)
