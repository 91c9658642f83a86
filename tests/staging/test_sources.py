"""What lies below a source, and sizes as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Bucket
from voxlane.errors import BucketNotFoundError, ConfigError, EmptyError, NotFoundError, StoreError
from voxlane.sizes import bytes_of, written
from voxlane.staging import Survey, default_name, survey
from voxlane.staging.sources import PART_BYTES, Wanted
from voxlane.testing import Access, Emulator


def test_a_survey_lists_by_name(gcs: Bucket) -> None:
    for key in ("src/b", "src/a/1", "srcs/not", "src/.voxlane/manifest.jsonl"):
        gcs.store.put(key, b"123")
    found = survey("gs://bkt/src/", gcs.config)
    assert [one.name for one in found.objects] == ["a/1", "b"]
    assert (found.source, found.total_bytes) == ("gs://bkt/src", 6)
    assert all(one.etag and '"' not in one.etag for one in found.objects)
    assert len(survey("gs://bkt", gcs.config).objects) == 4  # only a source's own records are left out
    before = found.version
    gcs.store.put("src/b", b"124")
    assert survey("gs://bkt/src", gcs.config).version != before


def test_sources_that_cannot_be_read(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    gcs.store.put("one", b"1")
    with pytest.raises(EmptyError, match="gs://bkt/none: no objects are here"):
        survey("gs://bkt/none", gcs.config)
    with pytest.raises(ConfigError, match="this is one object"):
        survey("gs://bkt/one", gcs.config)
    with pytest.raises(BucketNotFoundError):
        survey("gs://none/x", gcs.config)
    with pytest.raises(NotFoundError, match="no such folder"):
        survey(str(tmp_path / "none"))
    emulator.set_access(Access(bearer_token="other"))
    with pytest.raises(StoreError, match="credentials"):
        survey("gs://bkt/one", gcs.config)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["a/../../etc/passwd"], r"part of its name is '\.\.'"),
        (["/etc/passwd"], "empty part"),
        (["a//b"], "empty part"),
        (["a/./b"], r"part of its name is '\.'"),
        (["folder/"], "empty part"),
        (["a\0b"], "zero byte"),
        (["x" * 256], "longer than 255"),
        (["é" * 128], "longer than 255"),
        (["a/b", "a"], "'a' is an object, and the start of other objects' names"),
        (["a/b/c", "a/b"], "'a/b' is an object"),
    ],
)
def test_names_that_no_folder_can_hold(names: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Survey.of("gs://bkt/src", [(name, 1, None) for name in names])


def test_names() -> None:
    assert default_name("gs://bkt/data/kits19/") == default_name("gs://bkt/data/kits19")
    assert default_name("gs://bkt/data/kits19").startswith("kits19-")
    assert default_name("gs://bkt/other/kits19") != default_name("gs://bkt/data/kits19")
    assert default_name("gs://bkt").startswith("bkt-")
    assert default_name("nfs://server/a b/ü").startswith("data-")
    assert len(default_name("s3://b/" + "x" * 400)) < 63


def test_parts_cover_an_object_once() -> None:
    assert Wanted("a", 0, None).parts() == []
    assert Wanted("a", 5, None).parts() == [(0, 5)]
    assert Wanted("a", PART_BYTES + 1, None).parts() == [(0, PART_BYTES), (PART_BYTES, PART_BYTES + 1)]


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("100Gi", 100 << 30), ("1.5Ti", 3 << 39), ("5G", 5 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "-1Gi", "1i", "ten", "1Qi", "1 G i", "1e3", "1GiGi"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        bytes_of(text)


def test_sizes_are_written() -> None:
    assert [written(n) for n in (0, 1023, 1536, 5 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "3072.0 TiB",
    ]
