"""Every key that a service allows, compared with the service's own client: listed, read, written, copied, deleted."""

from __future__ import annotations

import gzip
import os
import sys
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import BaseError
from obstore.store import MemoryStore

from tests.conftest import AZURITE_KEY, Bucket
from tests.store.listing.test_parallel import PIECES
from voxlane import MapDataset, Store, errors, list_objects
from voxlane.store import services
from voxlane.store.credentials import s3_client
from voxlane.store.direct import is_addressable
from voxlane.testing import Emulator, Faults
from voxlane.uri import parse

EMPTY_SEGMENTS = ["a//b", "/a", "/", "//", "a//", "//a/b", "a///b"]
DOT_SEGMENTS = ["a/./b", "./a", "a/.", "a/../b", "../../etc/x", "a/..", "../a"]
TRAILING_SLASHES = ["full/", "a/b/"]
CONTROLS = ["tab\tkey", "bell\x07", "delete\x7f", "next\x85line", "\x01", "a\x1f/b"]
LINES = ["line\nfeed", "carriage\rreturn", "\r\n"]
URL_CHARACTERS = [
    "a%20b",
    "a%2Fb",
    "100%",
    "%zz",
    "a+b",
    "a#b?c",
    "a b",
    " a ",
    "=&;",
    "a\\b",
    "<&>'\"",
    "{|}^`[]",
    "~:@!$,*()",
]
UNICODE = [
    unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"), "\u2028", "\u2029x", "\u200b", "😀/🧠",
    "日本語", "\ufeffbom", "\uffee", "\U0010ffff",
]  # fmt: skip
DOTS = ["...", ".hidden", "a.", "a/...", "..a", "a./b"]
LONG = ["k" * 1024, "é" * 512, f"{'d' * 200}/" * 5 + "x"]
KEYS = [
    *EMPTY_SEGMENTS, *DOT_SEGMENTS, *TRAILING_SLASHES, *CONTROLS, *LINES, *URL_CHARACTERS, *UNICODE, *DOTS, *LONG
]  # fmt: skip


class Client(Protocol):
    """A service's own client, the judge of what a key is."""

    def put(self, key: str, body: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def keys(self) -> list[str]: ...


class GoogleClient:
    def __init__(self, bucket: Bucket) -> None:
        options = {"api_endpoint": bucket.config.endpoint}
        self._client = storage.Client("p", AnonymousCredentials(), client_options=options)  # type: ignore[no-untyped-call]
        self._bucket = self._client.bucket("bkt")

    def put(self, key: str, body: bytes) -> None:
        self._bucket.blob(key).upload_from_string(body)

    def get(self, key: str) -> bytes:
        body: bytes = self._bucket.blob(key).download_as_bytes()
        return body

    def keys(self) -> list[str]:
        return [blob.name for blob in self._client.list_blobs("bkt")]

    def close(self) -> None:
        self._client.close()


class Boto3Client:
    def __init__(self, bucket: Bucket) -> None:
        self._client = s3_client(bucket.config)

    def put(self, key: str, body: bytes) -> None:
        self._client.put_object(Bucket="bkt", Key=key, Body=body)

    def get(self, key: str) -> bytes:
        with self._client.get_object(Bucket="bkt", Key=key)["Body"] as body:
            return bytes(body.read())

    def keys(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket="bkt")
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def close(self) -> None:
        self._client.close()


class AzureClient:
    def __init__(self, bucket: Bucket) -> None:
        from azure.storage.blob import ContainerClient

        self._client = ContainerClient(bucket.config.endpoint or "", "bkt", credential=AZURITE_KEY)

    def put(self, key: str, body: bytes) -> None:
        self._client.upload_blob(key, body, overwrite=True)

    def get(self, key: str) -> bytes:
        body: bytes = self._client.download_blob(key).readall()
        return body

    def keys(self) -> list[str]:
        return list(self._client.list_blob_names())

    def close(self) -> None:
        self._client.close()


SERVICES = {"gcs": GoogleClient, "s3_emulator": Boto3Client, "s3": Boto3Client, "azure": AzureClient}


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> Iterator[tuple[Bucket, Any]]:
    bucket: Bucket = request.getfixturevalue(request.param)
    client = SERVICES[request.param](bucket)
    yield bucket, client
    client.close()


REFUSED = {
    # SeaweedFS keeps objects as files: it joins slashes, drops the bytes of a key that ends in one, takes a backslash
    # for a slash, refuses dot segments, and its names have at most 255 bytes.
    "s3": {*EMPTY_SEGMENTS, *DOT_SEGMENTS, *TRAILING_SLASHES, "a\\b", *LONG[:2]},
    # Azure takes a backslash for a slash, its client resolves dot segments, and Azurite cannot list names that XML
    # cannot hold.
    "az": {*DOT_SEGMENTS, *CONTROLS[1:], *LINES, "a\\b"},
}


def test_keys_are_those_of_the_services_own_client(service: tuple[Bucket, Client]) -> None:
    bucket, client = service
    contents = {key: f"content of {key}".encode() for key in KEYS if key not in REFUSED.get(bucket.kind, ())}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client.put, contents, contents.values()))
    assert sorted(client.keys()) == sorted(contents)
    manifest = list_objects(bucket.uri, config=bucket.config)
    assert manifest.keys() == sorted(contents)
    assert manifest.folder_markers == 0
    store = bucket.store
    assert {entry.key: bytes(store.get(entry.key, etag=entry.etag)) for entry in manifest} == contents
    assert [store.head(entry.key).size for entry in manifest] == [entry.size for entry in manifest]
    for prefix in ("a/", "a", "/", "../", "é", "a%", "tab\t"):
        below = list_objects(f"{bucket.uri}/{prefix}", config=bucket.config)
        assert below.keys() == sorted(key for key in contents if key.startswith(prefix))
    assert store.delete_prefix("") == len(contents)
    assert client.keys() == []


@given(st.lists(st.sampled_from([*PIECES, "\x85", "\xa0"]), max_size=6).map("".join))
def test_addressable_keys_are_those_that_the_engine_keeps(key: str) -> None:
    """The engine is asked: it holds a key that it can address, and fails on another or stores it under another."""
    if not key:
        return
    memory = MemoryStore()
    try:
        memory.put(key, b"x")
        listed_keys = [info["path"] for page in memory.list() for info in page]
    except (ValueError, BaseError):
        listed_keys = []
    assert is_addressable(key) == (listed_keys == [key])


ODD = ["a//b", "/a", "tab\tkey", "a/../b", "..", "full/"]
UNADDRESSABLE = (
    [("gcs", key) for key in ODD] + [("s3_emulator", key) for key in ODD] + [("azure", key) for key in ODD[:3]]
)


@pytest.fixture(params=UNADDRESSABLE, ids=lambda case: f"{case[0]}-{case[1]!a}")
def odd_key(request: pytest.FixtureRequest) -> tuple[Store, str]:
    """Return a store, and a key in it that the byte engine cannot address."""
    name, key = request.param
    store: Store = request.getfixturevalue(name).with_config(part_bytes=5 << 20).store
    assert not is_addressable(key)
    return store, key


def put(store: Store, key: str, body: bytes) -> None:
    """Write any key; `Store.put` refuses one that ends in a slash."""
    store.put("source", body)
    store.copy("source", key)
    store.delete("source")


def test_keys_around_the_engine_are_read_as_others_are(odd_key: tuple[Store, str]) -> None:
    store, key = odd_key
    body = bytes(i % 251 for i in range(700_000))
    put(store, key, body)
    info = store.head(key)
    assert (info.key, info.size) == (key, len(body))
    assert info.etag is not None
    [listed] = list_objects(store.root, store=store)
    assert (listed.key, listed.size) == (key, len(body))
    assert (listed.etag or "").strip('"') == info.etag.strip('"')
    assert bytes(store.get(key)) == body
    assert bytes(store.get(key, 5, 9)) == body[5:9]
    assert bytes(store.get(key, 699_990)) == body[-10:]
    assert bytes(store.get(key, 4, 4)) == b""
    target = np.zeros(600_000, np.uint8)
    store.get_into(key, 7, target, etag=info.etag)
    assert target.tobytes() == body[7:600_007]
    assert store.get_chunks(key, 0, 3, lambda offset, chunk: None) == len(body)
    for start, stop in ((699_999, 700_001), (700_000, 700_005)):
        with pytest.raises(errors.RangeError, match="outside the object"):
            store.get_into(key, start, np.zeros(stop - start, np.uint8))
    for read in (store.get, store.head):
        with pytest.raises(errors.NotFoundError, match="no such object"):
            read(f"{key}//missing")
    with pytest.raises(errors.ChangedError):
        store.get(key, etag='"another"')
    assert bytes(store.get(key)) == body  # the connection of the read that was given up is not used again


def test_keys_around_the_engine_are_written_as_others_are(odd_key: tuple[Store, str]) -> None:
    store, key = odd_key
    if key.endswith("/"):
        with pytest.raises(errors.ConfigError, match="no key that ends in a slash"):
            store.put(key, b"x")
        return
    first = store.put(key, b"first", if_absent=True)
    assert first.etag == store.head(key).etag
    with pytest.raises(errors.AlreadyExistsError):
        store.put(key, b"second", if_absent=True)
    second = store.put(key, b"second", if_etag=first.etag)
    with pytest.raises(errors.ChangedError):
        store.put(key, b"third", if_etag=first.etag)
    assert bytes(store.get(key, etag=second.etag)) == b"second"
    store.copy(key, f"{key}.copy")
    store.copy(f"{key}.copy", "plain")
    assert bytes(store.get("plain")) == b"second"
    store.delete([key, f"{key}.copy", f"{key}/never"])
    assert list_objects(store.root, store=store).keys() == ["plain"]
    with pytest.raises(errors.NotFoundError):
        store.get(key)


def test_keys_around_the_engine_are_written_in_parts(odd_key: tuple[Store, str]) -> None:
    store, key = odd_key
    if key.endswith("/"):
        return
    body = bytes(bytearray(range(256))) * (45 << 10)
    with store.open_writer(key) as writer:
        writer.write(body)
    assert bytes(store.get(key)) == body
    assert store.head(key).etag == list_objects(store.root, store=store)[0].etag or store.scheme == "az"
    with pytest.raises(ZeroDivisionError), store.open_writer(f"{key}//half") as writer:
        writer.write(body)
        raise ZeroDivisionError
    assert list_objects(store.root, store=store).keys() == [key]


@pytest.mark.parametrize("dialect", ["gcs", "s3_emulator"])
def test_failures_are_retried_for_keys_around_the_engine(
    dialect: str, request: pytest.FixtureRequest, emulator: Emulator
) -> None:
    """Errors, lost connections and bodies of the wrong length: the right bytes, and every attempt counted."""
    store: Store = request.getfixturevalue(dialect).with_config(part_bytes=5 << 20).store
    contents = {f"a//{i}": bytes([i]) * 100_000 for i in range(20)}
    emulator.put_many("bkt", contents)
    emulator.set_faults(Faults(error_rate=0.2, cut_rate=0.2, truncate_rate=0.2, seed=3))
    assert list_objects(store.root, store=store).keys() == sorted(contents)
    assert {key: bytes(store.get(key)) for key in contents} == contents
    with store.open_writer("b//parts") as writer:
        writer.write(bytes(11 << 20))
    emulator.clear_faults()
    assert emulator.get("bkt", "b//parts") == bytes(11 << 20)
    assert emulator.uploads("bkt") == []
    assert store.counters.read().retries > 5


@pytest.mark.parametrize(
    ("kind", "module"), [("gs", "google.auth"), ("s3", "botocore.exceptions"), ("az", "azure.storage.blob")]
)
def test_only_the_key_fails_without_the_extra(
    kind: str, module: str, gcs: Bucket, s3_emulator: Bucket, azure: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the libraries for a service's credentials the engine lists, and reads all that it can address."""
    bucket = {"gs": gcs, "s3": s3_emulator, "az": azure}[kind]
    store = bucket.store
    put(store, "plain", b"x")
    put(store, "e", b"")
    put(store, "e/x", b"x")
    put(store, "todo/", b"")
    if kind == "s3":  # requests with keys of the config are signed without botocore
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        bucket = bucket.with_config(access_key_id=None, secret_access_key=None)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(services, "gcs_bearer_token", lambda config: None)
    without = bucket.store
    manifest = list_objects(bucket.uri, store=without)
    assert (manifest.keys(), manifest.folder_markers) == (["e", "e/x", "plain"], 1)
    assert bytes(without.get("plain")) == b"x"
    extra = {"gs": "gcs", "s3": "s3", "az": "azure"}[kind]
    with pytest.raises(errors.MissingExtraError, match=rf"{kind}://bkt/a//b: .*voxlane\[{extra}\]"):
        without.get("a//b")
    with monkeypatch.context() as context:
        context.delitem(sys.modules, module)
        put(store, "a//b", b"x")
    monkeypatch.setattr(services, "gcs_bearer_token", lambda config: None)
    with pytest.raises(errors.MissingExtraError, match=rf"a//b.*voxlane\[{extra}\]"):
        list_objects(bucket.uri, config=bucket.config)


def test_names_of_files(folder: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """Names with control characters, links in a circle and unfinished files do not fail the listing of the others."""
    root = Path(parse(folder.uri).key.join(["/", ""]))
    names = ["a#b?c/f%41", "a\tb", "new\nline", "del\x7f", "trail.", " a ", "100%", "a+b", "...", "😀", "é", "e\u0301"]
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(name.encode())
    (root / "loop").symlink_to(".")
    (root / "broken").symlink_to("nowhere")
    (root / "linked").symlink_to("100%")
    (root / "unfinished#1").write_bytes(b"half")
    Path(os.fsdecode(os.fsencode(root) + b"/\xff")).write_bytes(b"not UTF-8")
    manifest = list_objects(folder.uri, config=folder.config)
    prefix = folder.key("")
    contents = {prefix + name: name.encode() for name in names} | {f"{prefix}linked": b"100%"}
    assert manifest.keys() == sorted(contents)
    assert "2 files are not listed" in caplog.text
    store = folder.store
    assert {e.key: bytes(store.get(e.key, etag=e.etag)) for e in manifest} == contents
    assert list_objects(f"{folder.uri}/a#b?c").keys() == [f"{prefix}a#b?c/f%41"]
    tab = f"{prefix}new\ttab"
    assert bytes(store.get(store.put(tab, b"0123456789", if_absent=True).key, 2, 5)) == b"234"
    with pytest.raises(errors.AlreadyExistsError):
        store.put(tab, b"other", if_absent=True)
    store.copy(tab, f"{tab}2")
    with store.open_writer(tab) as writer:
        writer.write(bytes(11 << 20))
    assert store.head(tab).size == 11 << 20
    store.delete([tab, f"{tab}2"])
    assert list_objects(folder.uri).keys() == manifest.keys()


def test_listing_by_the_engine_and_by_us_agree_on_files(folder: Bucket) -> None:
    store = folder.store
    for name in ("a", "b/c", "b/d/e"):
        store.put(folder.key(name), name.encode())
    [page] = store.native.list(folder.key(""), return_arrow=True)
    engine = sorted(
        zip(*(page.column(name).to_pylist() for name in ("path", "size", "e_tag", "last_modified")), strict=True)
    )
    listed_files = [(info.key, info.size, info.etag, info.modified) for info in store.list_folder(folder.key(""))]
    assert [row[:3] for row in listed_files] == [row[:3] for row in engine]
    assert all(
        abs((row[3] - other[3]).total_seconds()) < 1e-3
        for row, other in zip(listed_files, engine, strict=True)
        if row[3]
    )


@pytest.mark.parametrize("key", ["plain.txt", "odd//name"])
def test_object_that_gcs_would_unpack_is_read_as_stored(gcs: Bucket, emulator: Emulator, key: str) -> None:
    stored = gzip.compress(bytes(100_000))
    client = storage.Client("p", AnonymousCredentials(), client_options={"api_endpoint": emulator.url})
    blob = client.bucket("bkt").blob(key)
    blob.content_encoding = "gzip"
    blob.upload_from_string(stored)
    assert blob.download_as_bytes() == bytes(100_000)
    store = gcs.store
    assert store.head(key).size == len(stored)
    assert bytes(store.get(key)) == store.get_bytes(key) == stored
    assert bytes(store.get(key, 5, 20)) == stored[5:20]
    assert bytes(gcs.store.get_end(key, 10)[1]) == stored[-10:]
    assert list(MapDataset(gcs.uri, config=gcs.config)) == [stored]


def test_reading_an_empty_key_says_what_is_missing(bucket: Bucket) -> None:
    for read in (bucket.store.get, bucket.store.get_bytes, bucket.store.head):
        with pytest.raises(errors.ConfigError, match="the URI names no object"):
            read("")
