"""Operations of obstore, with its store of GCS, which uses the XML API, and its store of S3."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, NotModifiedError, PreconditionError
from obstore.store import GCSStore, S3Store

from .registry import Client, Server, operation

PART_BYTES = 5 << 20
# What a server refuses with 5xx is retried; a test waits for the last attempt.
RETRIES = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}


def connect_gcs(server: Server, **options: Any) -> GCSStore:
    client_options = {"allow_http": True, **options.pop("client_options", {})}
    if not options.get("skip_signature"):
        options["bearer_token"] = "fake"
    return GCSStore(server.bucket, base_url=server.url, client_options=client_options, retry_config=RETRIES, **options)


def connect_s3(server: Server, **options: Any) -> S3Store:
    options = {"access_key_id": server.access_key_id, "secret_access_key": server.secret_access_key} | options
    return S3Store(
        server.bucket,
        endpoint=server.url,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config=RETRIES,
        **options,
    )


@contextmanager
def _connect_gcs(server: Server) -> Iterator[GCSStore]:
    yield connect_gcs(server)


@contextmanager
def _connect_s3(server: Server) -> Iterator[S3Store]:
    yield connect_s3(server)


@contextmanager
def _pass_server(server: Server) -> Iterator[Server]:
    yield server


OBSTORE_GCS = Client("obstore", "gcs", _connect_gcs)
OBSTORE_S3 = Client("obstore", "s3", _connect_s3)
BOTH = (OBSTORE_GCS, OBSTORE_S3)
Store = GCSStore | S3Store


def _put(store: Store, *keys: str) -> None:
    for key in keys:
        store.put(key, key.encode())


@operation("write, read, delete", *BOTH)
def write_and_read(store: Store) -> None:
    result = store.put("a/b c", b"hello")
    response = store.get("a/b c")
    assert bytes(response.bytes()) == b"hello"
    assert response.meta["e_tag"] == result["e_tag"]
    store.delete("a/b c")
    with pytest.raises(FileNotFoundError):
        store.head("a/b c")


@operation("read ranges", *BOTH)
def read_ranges(store: Store) -> None:
    store.put("k", b"0123456789")
    assert bytes(store.get_range("k", start=2, end=5)) == b"234"
    assert bytes(obstore.get(store, "k", options={"range": {"suffix": 3}}).bytes()) == b"789"
    assert [bytes(each) for each in store.get_ranges("k", starts=[0, 8], ends=[2, 10])] == [b"01", b"89"]


@operation("missing objects and buckets", *BOTH)
def report_missing(store: Store) -> None:
    for action in (store.get, store.head):
        with pytest.raises(FileNotFoundError):
            action("none")


@operation("special characters in keys", *BOTH)
def use_special_keys(store: Store) -> None:
    keys = sorted(["Ünï+cödé %", "𝄞?#&", "quote'\"<>", "~tilde"], key=str.encode)
    _put(store, *keys)
    assert [meta["path"] for meta in store.list().collect()] == keys
    assert [bytes(store.get(key).bytes()).decode() for key in keys] == keys


@operation("metadata resource", *BOTH)
def describe_object(store: Store) -> None:
    store.put("k", b"content", attributes={"Content-Type": "image/x", "mine": "v"})
    response = obstore.get(store, "k")
    assert (response.attributes["Content-Type"], response.attributes["mine"]) == ("image/x", "v")
    (listed,) = store.list().collect()
    head = store.head("k")
    assert (listed["size"], listed["e_tag"]) == (head["size"], head["e_tag"]) == (7, response.meta["e_tag"])


@operation("multipart upload", *BOTH)
def upload_parts(store: Store) -> None:
    data = os.urandom(2 * PART_BYTES + 17)
    store.put("big", data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=3)
    assert bytes(store.get("big").bytes()) == data
    start, end = PART_BYTES - 3, PART_BYTES + 3
    assert bytes(store.get_range("big", start=start, end=end)) == data[start:end]


@operation("copy and rewrite", *BOTH)
def copy(store: Store) -> None:
    _put(store, "a b%")
    store.copy("a b%", "c")
    assert bytes(store.get("c").bytes()) == b"a b%"
    with pytest.raises(FileNotFoundError):
        store.copy("none", "other")


@operation("copy with preconditions", OBSTORE_GCS)
def copy_if_absent(store: Store) -> None:
    _put(store, "a", "b")
    with pytest.raises(AlreadyExistsError):
        store.copy("a", "b", overwrite=False)
    store.copy("a", "c", overwrite=False)
    assert bytes(store.get("b").bytes()) == b"b"


@operation("move", *BOTH)
def move(store: Store) -> None:
    _put(store, "a b%")
    store.rename("a b%", "d")
    assert [meta["path"] for meta in store.list().collect()] == ["d"]


@operation("conditional write", *BOTH)
def write_conditionally(store: Store) -> None:
    first = store.put("k", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        store.put("k", b"2", mode="create")
    version = {name: value for name, value in first.items() if value is not None}
    store.put("k", b"3", mode=version)
    with pytest.raises(PreconditionError):
        store.put("k", b"4", mode=version)
    assert bytes(store.get("k").bytes()) == b"3"


@operation("conditional read", *BOTH)
def read_conditionally(store: Store) -> None:
    store.put("k", b"1")
    tag = store.head("k")["e_tag"]
    assert bytes(obstore.get(store, "k", options={"if_match": tag}).bytes()) == b"1"
    with pytest.raises(PreconditionError):
        obstore.get(store, "k", options={"if_match": '"other"'})
    with pytest.raises(NotModifiedError):
        obstore.get(store, "k", options={"if_none_match": tag})


@operation("generations", OBSTORE_GCS)
def read_generations(store: GCSStore) -> None:
    first, second = store.put("k", b"1"), store.put("k", b"2")
    assert first["version"] is not None
    assert second["version"] is not None
    assert int(second["version"]) > int(first["version"])
    assert bytes(obstore.get(store, "k", options={"version": second["version"]}).bytes()) == b"2"
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "k", options={"version": first["version"]})


@operation("gzip transcoding", Client("obstore", "gcs", _pass_server))
def transcode(server: Server) -> None:
    compressed = gzip.compress(b"text" * 100)
    accepting = connect_gcs(server, client_options={"default_headers": {"Accept-Encoding": "gzip"}})
    accepting.put("k", compressed, attributes={"Content-Encoding": "gzip"})
    assert bytes(accepting.get("k").bytes()) == compressed
    # GCS sends what it decompresses without Content-Length, which obstore requires.
    with pytest.raises(GenericError, match="Content-Length"):
        connect_gcs(server).get("k")


@operation("batch delete", *BOTH)
def delete_many(store: Store) -> None:
    _put(store, "a", "b/ c", "ü", "remaining")
    store.delete(["a", "b/ c", "ü"])
    assert [meta["path"] for meta in store.list().collect()] == ["remaining"]


@operation("list with a prefix and a delimiter", *BOTH)
def list_prefixes(store: Store) -> None:
    _put(store, "a", "d/1", "d/e/2", "f")
    top = store.list_with_delimiter()
    assert [meta["path"] for meta in top["objects"]] == ["a", "f"]
    assert top["common_prefixes"] == ["d"]
    assert [meta["path"] for meta in store.list("d").collect()] == ["d/1", "d/e/2"]


@operation("list between offsets", *BOTH)
def list_after_key(store: Store) -> None:
    _put(store, "a", "d/1", "d/e/2", "f")
    assert [meta["path"] for meta in store.list(offset="d/1").collect()] == ["d/e/2", "f"]


@operation("list in pages", *BOTH)
def list_pages(store: Store) -> None:
    keys = [f"n/{number:04d}" for number in range(1001)]
    for key in keys:
        store.put(key, b"")
    assert [meta["path"] for meta in store.list().collect()] == keys


@operation("presigned URLs", OBSTORE_S3)
def presign(store: S3Store) -> None:
    import requests

    store.put("k", b"1")
    assert requests.get(obstore.sign(store, "GET", "k", timedelta(minutes=5)), timeout=60).content == b"1"


@operation("anonymous access", Client("obstore", "gcs", _pass_server))
def read_gcs_anonymously(server: Server) -> None:
    connect_gcs(server).put("k", b"1")
    anonymous = connect_gcs(server, skip_signature=True)
    response = anonymous.get("k")
    assert bytes(response.bytes()) == b"1"
    assert response.meta["version"] is not None  # the generation, which only GCS has
    with pytest.raises(FileNotFoundError, match="Details"):
        anonymous.get("none")
