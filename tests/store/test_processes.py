"""A store that was used in the parent works in child processes of every kind, and in the parent afterwards."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.queues import SimpleQueue
from typing import Any

import pytest

from tests.conftest import Bucket
from voxlane import Store
from voxlane.store import counters


def _read(store: Store, key: str, answers: SimpleQueue[Any]) -> None:
    answers.put(bytes(store.get(key)))


def _read_in_grandchild(store: Store, key: str, answers: SimpleQueue[Any]) -> None:
    store.get(key)
    child = multiprocessing.get_context("fork").Process(target=_read, args=(store, key, answers))
    child.start()
    child.join(60)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_kind(shared_bucket: Bucket, method: str) -> None:
    store, key = shared_bucket.store, shared_bucket.key("k")
    store.put(key, b"body")
    assert bytes(store.get(key)) == b"body"
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    children = [context.Process(target=_read, args=(store, key, answers)) for _ in range(2)]
    for child in children:
        child.start()
    assert [answers.get() for _ in children] == [b"body"] * 2
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert bytes(store.get(key)) == b"body"


def test_fork_of_a_fork(s3: Bucket) -> None:
    store = s3.store
    store.put("k", b"body")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_read_in_grandchild, args=(store, "k", answers))
    child.start()
    assert answers.get() == b"body"
    child.join(60)
    assert child.exitcode == 0


def test_fork_while_threads_are_reading(s3: Bucket) -> None:
    store = s3.store
    store.put("k", bytes(1 << 20))
    stop = threading.Event()

    def read_on() -> None:
        while not stop.is_set():
            store.get("k")

    threads = [threading.Thread(target=read_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            context = multiprocessing.get_context("fork")
            answers = context.SimpleQueue()
            child = context.Process(target=_read, args=(store, "k", answers))
            child.start()
            assert len(answers.get()) == 1 << 20
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_fork_while_a_thread_counts(gcs: Bucket) -> None:
    gcs.store.put("k", b"body")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_read, args=(gcs.store, "k", answers))
    with counters._lock:
        child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0


def test_without_a_private_folder_the_copy_lives_in_memory(
    s3: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    store = s3.store
    store.put("k", b"body")
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/missing")
    pid = os.fork()
    if pid == 0:  # the child must not continue with pytest's code
        os._exit(0 if bytes(store.get("k")) == b"body" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
