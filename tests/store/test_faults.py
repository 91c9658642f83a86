"""Failing servers: retries, errors and counters."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.conftest import Bucket
from voxlane import RetryConfig, Store, StoreConfig, errors, list_objects
from voxlane.store.translate import TransientError, translate
from voxlane.testing import Access, Emulator, Faults


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_transient_statuses_are_retried_and_counted(gcs: Bucket, emulator: Emulator, status: int) -> None:
    store = gcs.store
    store.put("k", b"body")
    emulator.set_faults(Faults(fail_next=2, error_statuses=(status,)))
    assert bytes(store.get("k")) == b"body"
    assert store.counters.read().by_kind["get"]["requests"] == 3
    assert store.counters.read().retries == 2


@pytest.mark.parametrize("fault", ["cut_rate", "truncate_rate"])
def test_broken_bodies_are_fetched_again(gcs: Bucket, emulator: Emulator, fault: str) -> None:
    store = gcs.store
    body = bytes(range(256)) * 4096
    store.put("k", body)
    emulator.set_faults(Faults(**{fault: 0.5}, kinds=("get",), seed=3))
    for start in range(20):
        assert bytes(store.get("k")) == body
        target = np.zeros(len(body) - start, np.uint8)
        store.get_into("k", start, target)
        assert target.tobytes() == body[start:]
    assert store.counters.read().retries > 0
    assert store.counters.read().bytes_read == 40 * len(body) - sum(range(20))


def test_stalled_body_times_out_and_is_fetched_again(gcs: Bucket, emulator: Emulator) -> None:
    store = gcs.with_config(read_timeout_s=0.3).store
    store.put("k", b"x" * 100_000)
    emulator.set_faults(Faults(stall_rate=0.5, stall_s=60.0, kinds=("get",), seed=1))
    start = time.monotonic()
    for _ in range(6):
        assert len(store.get("k")) == 100_000
    assert store.counters.read().retries > 0
    assert time.monotonic() - start < 55  # no read waited for a stall to end


def test_error_after_the_deadline_names_the_failure(gcs: Bucket, emulator: Emulator) -> None:
    store = gcs.with_config(retry=RetryConfig(deadline_s=0.2, initial_delay_s=0.05)).store
    store.put("k", b"x")
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(503,)))
    with pytest.raises(errors.UnavailableError, match=r"gs://bkt/k: the service answered 503.*attempts"):
        store.get("k")


def test_retries_can_be_turned_off(gcs: Bucket, emulator: Emulator) -> None:
    store = gcs.with_config(retry=RetryConfig(deadline_s=0)).store
    emulator.set_faults(Faults(fail_next=1))
    with pytest.raises(errors.UnavailableError, match="1 attempt"):
        store.get("k")
    assert store.counters.read().requests == 1


def test_listing_survives_failures(gcs: Bucket, emulator: Emulator) -> None:
    emulator.fill("bkt", count=20_000, key="img-{:06d}", size_bytes=1)
    emulator.set_faults(Faults(error_rate=0.2, cut_rate=0.1, kinds=("list",), seed=5))
    store = gcs.store
    keys = list_objects("gs://bkt/", store=store).keys()
    assert keys == [f"img-{i:06d}" for i in range(20_000)]
    assert store.counters.read().retries > 0


def test_multipart_upload_survives_failures(gcs: Bucket, emulator: Emulator) -> None:
    store = gcs.with_config(part_bytes=5 << 20).store
    body = bytes(range(256)) * (12 << 12)
    emulator.set_faults(Faults(error_rate=0.3, kinds=("part",), seed=2))
    with store.open_writer("big") as writer:
        writer.write(body)
    emulator.clear_faults()
    assert bytes(store.get("big")) == body
    assert emulator.uploads("bkt") == []


@pytest.mark.parametrize("dialect", ["gcs", "s3_emulator"])
def test_aborted_upload_leaves_nothing_billable(
    dialect: str, request: pytest.FixtureRequest, emulator: Emulator
) -> None:
    store = request.getfixturevalue(dialect).with_config(part_bytes=5 << 20).store
    writer = store.open_writer("big")
    writer.write(bytes(16 << 20))
    writer.abort()
    dropped = store.open_writer("dropped")
    dropped.write(bytes(16 << 20))
    with pytest.warns(errors.DiscardedWarning, match="dropped"):
        del dropped
    while emulator.uploads("bkt"):  # a finalizer does not wait
        time.sleep(0.01)
    assert emulator.keys("bkt") == []
    assert emulator.uploads("bkt") == []


def test_part_that_fails_permanently_fails_the_writer(gcs: Bucket, emulator: Emulator) -> None:
    store = gcs.with_config(part_bytes=5 << 20, retry=RetryConfig(deadline_s=0.3, initial_delay_s=0.05)).store
    emulator.set_faults(Faults(error_rate=1.0, kinds=("part",)))
    with pytest.raises(errors.UnavailableError, match="gs://bkt/big"), store.open_writer("big") as writer:
        for _ in range(100):
            writer.write(bytes(1 << 20))
    emulator.clear_faults()
    assert emulator.keys("bkt") == []


_NOT_FOUND = "Client error with status code: 404 Not Found: <Error><Code>{}</Code></Error>"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Exception(_NOT_FOUND.format("NoSuchBucket")), errors.BucketNotFoundError),
        (Exception(_NOT_FOUND.format("NoSuchKey")), errors.NotFoundError),
        (Exception("performing token request"), errors.CredentialsError),
        (Exception("status code: 403 <Code>SignatureDoesNotMatch</Code>"), errors.CredentialsError),
        (Exception("status code: 403 <Code>AccessDenied</Code>"), errors.PermissionDeniedError),
        (Exception("status code: 412"), errors.ChangedError),
        (Exception("status code: 416"), errors.RangeError),
        (Exception("status code: 501"), errors.UnsupportedError),
        (Exception("status code: 503"), TransientError),
        (Exception("Error performing GET http://host/oranges/k: status code: 503"), TransientError),
        (Exception("Generic LocalFileSystem error: Requested range was invalid"), errors.RangeError),
        (Exception("Generic InMemory error: Invalid range: Range started at 1 and ended at 1"), errors.RangeError),
        (Exception("HTTP error: Connection refused"), TransientError),
        (Exception("No space left on device (os error 28)"), errors.StoreError),
        (FileExistsError(), errors.AlreadyExistsError),
        (ValueError("Path contained empty path segment"), errors.InvalidKeyError),
        (Exception("something else"), errors.StoreError),
    ],
)
def test_engine_errors_are_translated(error: Exception, expected: type[Exception]) -> None:
    assert type(translate(error, "s3://bkt/key")) is expected


def test_missing_bucket(gcs: Bucket, s3: Bucket, azure: Bucket) -> None:
    for bucket, root in ((gcs, "gs://no-such"), (s3, "s3://no-such"), (azure, "az://no-such")):
        store = Store(root, bucket.config)
        for call in (lambda s=store: s.get("k"), lambda s=store, r=root: list_objects(f"{r}/", store=s)):
            with pytest.raises(errors.BucketNotFoundError, match=f"{root}: no such bucket"):
                call()


def test_wrong_credentials(gcs: Bucket, s3: Bucket, azure: Bucket, emulator: Emulator) -> None:
    emulator.set_access(Access(bearer_token="right"))
    cases = [
        (gcs, {"token": "wrong"}),
        (s3, {"secret_access_key": "wrong"}),
        (s3, {"access_key_id": "nobody", "secret_access_key": "x"}),
    ]
    for bucket, changes in cases:
        store = bucket.with_config(**changes).store
        for call in (lambda s=store: s.get("k"), lambda s=store, b=bucket: list_objects(b.uri, store=s)):
            with pytest.raises((errors.CredentialsError, errors.PermissionDeniedError), match=bucket.uri):
                call()


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for uri in ("gs://some-bucket", "s3://some-bucket"):
        with pytest.raises(errors.CredentialsError, match=f"{uri}/k: no credentials were found"):
            Store(uri, StoreConfig(connect_timeout_s=1.0, retry=RetryConfig(deadline_s=0))).get("k")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(errors.CredentialsError, match="az://c: no Azure storage account"):
        Store("az://c").get("k")


def test_unreachable_server() -> None:
    config = StoreConfig(endpoint="http://127.0.0.1:9", retry=RetryConfig(deadline_s=0.1))
    with pytest.raises(errors.UnavailableError, match="connection refused"):
        Store("gs://b", config).get("k")


def test_anonymous_requests_carry_no_credentials(emulator: Emulator) -> None:
    emulator.put("bkt", "k", b"public")
    emulator.set_access(Access(access_key_id="somebody"))
    public = Store("s3://bkt", StoreConfig(endpoint=emulator.url, anonymous=True))
    with pytest.raises((errors.CredentialsError, errors.PermissionDeniedError)):
        public.get("k")
    emulator.set_access(Access())
    assert bytes(public.get("k")) == b"public"
