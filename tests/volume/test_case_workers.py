"""Worker processes: cases that hang, crash or need too much memory are ended, and the others are finished."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

import numpy as np
import pytest

from voxlane.errors import ScanError
from voxlane.volume.case_workers import CaseTask, CaseWorkers
from voxlane.volume.dataset_layouts import SourceCase
from voxlane.volume.description import Description
from voxlane.volume.worker_process import WorkerCrashError, WorkerMemoryError, WorkerProcess, WorkerTimeoutError

DESCRIPTION = Description(name="a", channels=("CT",), labels={"background": 0, "a": 1})


def act(task: CaseTask) -> dict[str, Any]:
    """Do as the name of the case says."""
    if task.case.id == "hang":
        time.sleep(10_000)
    if task.case.id == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task.case.id == "eat":
        np.ones(1 << 31, np.uint8)
    return {"problems": [], "name": task.case.id}


def make_task(name: str) -> CaseTask:
    return CaseTask(SourceCase(name, name, (name,), None), DESCRIPTION, None, None, "", "", "", ())


def test_bad_cases_are_ended_and_the_others_finished() -> None:
    names = ["hang", "a", "die", "b", "eat", "c"]
    with CaseWorkers(2, 1 << 30, 5.0, False) as workers:
        results = workers.run(act, {name: make_task(name) for name in names}, {}, None, "acting")
    assert [results[name]["name"] for name in "abc"] == ["a", "b", "c"]
    kinds = {name: results[name]["problems"][0]["kind"] for name in ("hang", "die", "eat")}
    assert kinds == {"hang": "time", "die": "crash", "eat": "memory"}
    assert all(results[name]["problems"][0]["transient"] for name in kinds)
    assert "killed, most likely because memory ran out, twice" in results["die"]["problems"][0]["detail"]


def make_array(size: int) -> dict[str, Any]:
    return {"array": np.arange(size, dtype=np.int32).reshape(2, -1), "text": "a"}


def fail(_: int) -> None:
    raise ScanError("no scan", uri="a.nii", fix="Use another")


def test_worker_process_returns_arrays_and_errors_and_starts_again() -> None:
    process = WorkerProcess(memory_bytes=1 << 30)
    try:
        result = process.call(make_array, 1_000_000, timeout_s=60)
        np.testing.assert_array_equal(result["array"], make_array(1_000_000)["array"])
        assert result["array"].flags.writeable
        with pytest.raises(ScanError, match=r"a\.nii: no scan\. Use another") as caught:
            process.call(fail, 0, timeout_s=60)
        assert caught.value.uri == "a.nii"
        with pytest.raises(WorkerTimeoutError, match="more than 0 s"):
            process.call(time.sleep, 1000, timeout_s=0.1)
        with pytest.raises(WorkerMemoryError, match=r"more than 1\.0 GiB"):
            process.call(make_array, 1 << 30, timeout_s=60)
        with pytest.raises(WorkerCrashError, match="status 7"):
            process.call(os._exit, 7, timeout_s=60)
        assert process.call(os.getpid, timeout_s=60) != os.getpid()
    finally:
        process.close()


def test_process_that_cannot_start_says_why() -> None:
    worker = WorkerProcess(lambda: None)
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        worker.call(os.getpid, timeout_s=60)
    worker.close()
