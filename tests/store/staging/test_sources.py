"""Listing sources, and parsing and formatting sizes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Bucket
from voxlane.errors import BucketNotFoundError, ConfigError, EmptyError, NotFoundError, StoreError
from voxlane.sizes import format_bytes, parse_bytes
from voxlane.store.content import PART_BYTES
from voxlane.store.ranges import Span, split
from voxlane.store.staging import SourceListing, default_name, list_source
from voxlane.store.staging.sources import file_paths
from voxlane.testing import Access, Emulator


def test_source_is_listed_by_name(gcs: Bucket) -> None:
    for key in ("src/b", "src/a/1", "srcs/not", "src/.voxlane/manifest.jsonl"):
        gcs.store.put(key, b"123")
    listing = list_source("gs://bkt/src/", gcs.config)
    assert [item.name for item in listing.objects] == ["a/1", "b"]
    assert (listing.source, listing.total_bytes) == ("gs://bkt/src", 6)
    assert all(item.etag and '"' not in item.etag for item in listing.objects)
    assert len(list_source("gs://bkt", gcs.config).objects) == 4  # only records directly below the source are skipped
    before = listing.version
    gcs.store.put("src/b", b"124")
    assert list_source("gs://bkt/src", gcs.config).version != before


def test_unreadable_sources_are_refused(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    gcs.store.put("one", b"1")
    with pytest.raises(EmptyError, match="gs://bkt/none: the source contains no objects"):
        list_source("gs://bkt/none", gcs.config)
    with pytest.raises(ConfigError, match="the source is a single object"):
        list_source("gs://bkt/one", gcs.config)
    with pytest.raises(BucketNotFoundError):
        list_source("gs://none/x", gcs.config)
    with pytest.raises(NotFoundError, match="no such folder"):
        list_source(str(tmp_path / "none"))
    emulator.set_access(Access(bearer_token="other"))
    with pytest.raises(StoreError, match="credentials"):
        list_source("gs://bkt/one", gcs.config)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("a/../../etc/passwd", "a/%voxlane-%2E%2E/%voxlane-%2E%2E/etc/passwd"),
        ("/etc/passwd", "%voxlane-/etc/passwd"),
        ("a//b", "a/%voxlane-/b"),
        ("a/./b", "a/%voxlane-%2E/b"),
        ("folder/", "folder/%voxlane-"),
        ("a\0b", "%voxlane-a%00b"),
        ("é" * 128, f"%voxlane-{hashlib.sha256(('é' * 128).encode()).hexdigest()}"),
        ("%voxlane-/x", "%voxlane-%25voxlane-/x"),
    ],
)
def test_names_that_no_file_can_have_are_escaped(name: str, path: str) -> None:
    [item] = SourceListing.of("gs://bkt/src", [(name, 1, None)]).objects
    assert (item.name, item.file) == (name, path)


def test_object_that_is_also_a_folder_is_stored_in_it() -> None:
    assert file_paths(["a", "a/b", "a/b/c"]) == {"a": "a/%voxlane-object", "a/b": "a/b/%voxlane-object"}
    assert file_paths(["a", "b"]) == {}


PARTS = ["", ".", "..", "a", "b", "%voxlane-", "%voxlane-object", "%2E", "\0", "\t", "x" * 256]


@given(st.sets(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("/".join).filter(bool), max_size=30))
def test_every_name_has_a_file_of_its_own_inside_the_folder(names: set[str]) -> None:
    escaped = file_paths(names)
    paths = [escaped.get(name, name) for name in names]
    assert len(set(paths)) == len(names)
    folders = {path[:index] for path in paths for index, character in enumerate(path) if character == "/"}
    assert not folders.intersection(paths)
    for path in paths:
        assert os.path.normpath(path) == path
        assert not path.startswith(("/", ".."))
        assert all(len(part.encode()) <= 255 and "\0" not in part for part in path.split("/"))


def test_default_names() -> None:
    assert default_name("gs://bkt/data/kits19/") == default_name("gs://bkt/data/kits19")
    assert default_name("gs://bkt/data/kits19").startswith("kits19-")
    assert default_name("gs://bkt/other/kits19") != default_name("gs://bkt/data/kits19")
    assert default_name("gs://bkt").startswith("bkt-")
    assert default_name("nfs://server/a b/ü").startswith("data-")
    assert len(default_name("s3://b/" + "x" * 400)) < 63


def test_parts_cover_an_object_once() -> None:
    assert split(0, PART_BYTES) == []
    assert split(5, PART_BYTES) == [Span(0, 5)]
    assert split(PART_BYTES + 1, PART_BYTES) == [Span(0, PART_BYTES), Span(PART_BYTES, PART_BYTES + 1)]


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("100Gi", 100 << 30), ("1.5Ti", 3 << 39), ("5G", 5 * 10**9)],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "1i", "ten", "1Qi", "1 G i", "1e3", "1GiGi"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        parse_bytes(text)


def test_sizes_are_formatted() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3072.0 TiB",
    ]
