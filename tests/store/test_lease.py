"""The lease on a folder: one holder at a time, clear messages, and takeovers that the old holder notices."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from typing import Any

import pytest

from tests.conftest import Bucket
from voxlane.errors import LeaseError
from voxlane.processes import ProcessId
from voxlane.store import Store, StoreConfig, lease
from voxlane.store.lease import JobStart, Lease, check_token

KINDS = ["gcs", "s3_emulator", "azure", "folder"]


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest) -> Bucket:
    opened: Bucket = request.getfixturevalue(request.param)
    return opened


def open_lease(bucket: Bucket, **options: Any) -> Lease:
    return Lease(Store(bucket.uri, bucket.config), _prefix(bucket), "run", **options)


def _prefix(bucket: Bucket) -> str:
    return Store.locate(f"{bucket.uri}/runs/a/", bucket.config)[1]


def rewrite(bucket: Bucket, **changes: Any) -> None:
    """Let the lease look as another machine's or an ended process's holder would have left it."""
    store, key = Store(bucket.uri, bucket.config), _prefix(bucket) + lease.LEASE
    store.put(key, json.dumps({**json.loads(bytes(store.get(key))), **changes}).encode())


OTHER_MACHINE = {"host": "other", "pid": 7, "process": "7-100-otherone", "since": "2026-01-01T00:00:00+00:00"}


def test_a_second_job_is_refused_until_the_first_gives_up(bucket: Bucket) -> None:
    with open_lease(bucket) as first:
        first.check()
        with pytest.raises(
            LeaseError, match=rf"runs/a: another process writes this run: host .*, pid {os.getpid()}, s"
        ):
            open_lease(bucket).acquire()
        first.check()
    with open_lease(bucket):
        pass
    assert not Store(bucket.uri, bucket.config).exists(_prefix(bucket) + lease.LEASE)


def test_only_one_of_many_gets_it(bucket: Bucket) -> None:
    leases, got = [open_lease(bucket) for _ in range(6)], []
    barrier = threading.Barrier(len(leases))

    def compete(candidate: Lease) -> None:
        barrier.wait()
        try:
            candidate.acquire()
            got.append(candidate)
        except LeaseError:
            pass

    threads = [threading.Thread(target=compete, args=(candidate,)) for candidate in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].check()
    got[0].release()


def test_same_job_takes_over_at_once_and_the_old_holder_notices(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_FRESH_S", -1.0)
    first = open_lease(bucket)
    first.acquire()
    with open_lease(bucket, token=first.token) as second:
        with pytest.raises(LeaseError, match=r"this process no longer writes the run: host .* took it over"):
            first.check()
        first.release()
        second.check()
    third, fourth = open_lease(bucket), open_lease(bucket)
    third.acquire()
    rewrite(bucket, **OTHER_MACHINE, token=third.token)
    with pytest.raises(LeaseError):
        third.check()
    third.release(whole_job=True)  # the rank that took it over was killed
    with fourth:
        fourth.check()


@pytest.mark.parametrize(("start", "is_taken"), [(JobStart("job 5", 1), True), (JobStart("job 5", 0), False)])
def test_restarted_job_continues_at_once(
    bucket: Bucket, start: JobStart, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_lease(bucket, start=JobStart("job 5", 0)) as first:
        rewrite(bucket, renewed_s=first._renewed_s)
        if is_taken:
            with open_lease(bucket, start=start) as second:
                second.check()
        else:
            with pytest.raises(LeaseError, match="job 5"):
                open_lease(bucket, start=start).acquire()


def test_dead_process_of_this_machine_holds_nothing(folder: Bucket) -> None:
    process = multiprocessing.get_context("fork").Process(target=_acquire, args=(folder.uri, folder.config))
    process.start()
    process.join()
    with open_lease(folder) as second:
        second.check()


def _acquire(uri: str, config: StoreConfig | None) -> None:
    Lease(Store(uri, config), Store.locate(f"{uri}/runs/a/", config)[1], "run").acquire()
    os._exit(0)


def test_expired_lease_of_another_machine_is_taken_after_its_expiry(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRY_S", 1.0)
    monkeypatch.setattr(lease, "_FRESH_S", -1.0)
    first, lines = open_lease(bucket), list[str]()
    first.acquire()
    rewrite(bucket, **OTHER_MACHINE, token="another")
    with open_lease(bucket, on_wait=lines.append) as second:
        assert "host other, pid 7, since 2026-01-01" in lines[0]
        assert "continuing unless it renews its lease within 1 s" in lines[0]
        with pytest.raises(LeaseError, match="no longer writes the run"):
            first.check()
        second.check()
    first.release()


def test_living_holder_of_another_machine_refuses_with_its_next_beat(
    gcs: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.2)
    monkeypatch.setattr(lease, "_POLL_S", 0.1)
    with open_lease(gcs) as first:
        monkeypatch.setattr(lease, "read_scope", lambda: "this-one")
        with pytest.raises(LeaseError, match=f"pid {os.getpid()}"):
            open_lease(gcs, on_wait=lambda line: None).acquire()
        first.check()


def test_workers_check_the_token(bucket: Bucket) -> None:
    store, prefix = Store(bucket.uri, bucket.config), _prefix(bucket)
    with open_lease(bucket) as held:
        check_token(store, prefix, held.token, "dataset")
        with pytest.raises(LeaseError, match="no longer writes the dataset"):
            check_token(store, prefix, "another", "dataset")
    with pytest.raises(LeaseError, match="its lease was deleted"):
        check_token(store, prefix, held.token, "dataset")


def test_foreign_content_is_replaced(folder: Bucket) -> None:
    Store(folder.uri, folder.config).put(_prefix(folder) + lease.LEASE, b"[]")
    with open_lease(folder) as held:
        held.check()


def test_process_identity() -> None:
    me = ProcessId.current()
    assert ProcessId.parse(str(me)) == me
    assert not me.has_ended()
    assert ProcessId(me.pid, me.started + 1, me.scope).has_ended()
    assert not ProcessId(me.pid, me.started + 1, "elsewhere").has_ended()
    assert ProcessId.parse("mine") is None
