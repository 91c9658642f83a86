"""Pages of GCS's JSON API: a reference parser in plain Python, and the entity tags that reads report."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane import errors, list_objects
from voxlane.store.gcs_json import GcsJson
from voxlane.store.list_json import parse_page
from voxlane.store.services import GcsService
from voxlane.testing import Emulator

_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
_items = st.fixed_dictionaries(
    {
        "name": _texts,
        "size": st.integers(0, 2**40).map(str),
        "generation": st.integers(1, 2**60).map(str),
        "etag": st.binary(max_size=9).map(lambda tag: base64.b64encode(tag).decode()),
    },
    optional={
        "md5Hash": st.binary(min_size=16, max_size=16).map(lambda digest: base64.b64encode(digest).decode()),
        "kmsKeyName": _texts,
        "customerEncryption": st.just({"encryptionAlgorithm": "AES256"}),
        "metadata": st.just({"unexpected": ["member"]}),
    },
)


def _reference(item: dict[str, Any]) -> dict[str, Any]:
    etag = f'"-{item["etag"]}"'
    if "md5Hash" in item and not {"kmsKeyName", "customerEncryption"} & set(item):
        etag = f'"{base64.b64decode(item["md5Hash"]).hex()}"'
    return {"key": item["name"], "size": int(item["size"]), "etag": etag, "version": item["generation"]}


@given(st.lists(_items, max_size=8), st.none() | _texts, st.booleans(), st.sampled_from([None, 2]))
def test_page_is_parsed_as_plain_python_parses_it(
    items: list[dict[str, Any]], token: str | None, ascii_only: bool, indent: int | None
) -> None:
    page = (
        {"kind": "storage#objects"} | ({"items": items} if items else {}) | ({"nextPageToken": token} if token else {})
    )
    batch, next_token = parse_page(json.dumps(page, ensure_ascii=ascii_only, indent=indent).encode())
    assert batch.to_pylist() == [_reference(item) for item in items]
    assert next_token == token


def test_listed_etags_and_generations_are_those_of_reads(gcs: Bucket, emulator: Emulator) -> None:
    store = gcs.store
    store.put("put", b"one request")
    store.put("empty", b"")
    with store.open_writer("parts") as writer:
        writer.write(bytes(9 << 20))
    GcsJson(store).compose("joined", [("put", None), ("parts", None)])
    emulator.fill("bkt", count=2, key="filled-{}", size_bytes=5)
    listed = list_objects("gs://bkt/", store=store)
    assert listed.keys() == ["empty", "filled-0", "filled-1", "joined", "parts", "put"]
    for entry in listed:
        current = store.head(entry.key)
        assert (entry.size, entry.etag, entry.version) == (current.size, current.etag, current.version)
        store.get(entry.key, etag=entry.etag)
    store.put("put", b"another content")
    with pytest.raises(errors.ChangedError):
        store.get("put", etag=next(entry.etag for entry in listed if entry.key == "put"))


def test_engine_and_json_list_the_same(gcs: Bucket, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.put_many("bkt", {f"d{i % 3}/{i:04d} é&<": bytes(i % 7) for i in range(1, 2_500, 3)})
    by_json = list_objects("gs://bkt/d", config=gcs.config)

    def refuse(service: GcsService) -> dict[str, str]:
        raise errors.MissingExtraError.of("gcs", "a request")

    monkeypatch.setattr(GcsService, "authorization", refuse)  # as if Google's library were not installed
    by_engine = list_objects("gs://bkt/d", config=gcs.config)
    columns = ["key", "size", "etag"]
    assert by_json.table.select(columns).equals(by_engine.table.select(columns))
    assert by_engine.table["version"].null_count == len(by_engine)
    with pytest.raises(errors.MissingExtraError):
        list_objects("gs://bkt/d", config=gcs.config, generations=True)
