"""Copies of objects between buckets and disks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket
from voxlane.cli.main import main
from voxlane.errors import ConfigError, EmptyError, PermissionDeniedError, StoreError
from voxlane.store import transfer
from voxlane.store.content import PART_BYTES, ContentHasher, checksum_content
from voxlane.store.staging.local_store import hash_file
from voxlane.store.transfer import copy_objects
from voxlane.testing import Emulator, Faults

LARGE = os.urandom(2 * PART_BYTES + 5)
OBJECTS = {"a": b"1", "b/c": b"22", "b/d": b"", "prepared.json": b"{}", "large": LARGE}


def write(folder: Path, objects: dict[str, bytes] = OBJECTS) -> Path:
    for name, body in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_checksum_is_the_same_for_parts_pieces_and_files(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    (tmp_path / "empty").write_bytes(b"")
    hasher = ContentHasher()
    for start in range(0, len(LARGE), 1_000_003):
        hasher.update(LARGE[start : start + 1_000_003])
    assert hasher.checksum() == checksum_content(LARGE) == hash_file(str(tmp_path / "large"))
    assert ContentHasher().checksum() == checksum_content(b"") == hash_file(str(tmp_path / "empty"))
    assert checksum_content(LARGE[:-1]) != checksum_content(LARGE)


def test_copy_to_a_bucket_and_back(shared_bucket: Bucket, tmp_path: Path) -> None:
    source, target = write(tmp_path / "src"), f"{shared_bucket.uri}/deep/er"
    report = copy_objects(str(source), target, shared_bucket.config)
    assert (report.objects, report.copied, report.copied_bytes) == (5, 5, report.total_bytes)
    assert copy_objects(str(source), f"{target}/", shared_bucket.config, verify=True).copied == 0
    assert copy_objects(str(source), target, shared_bucket.config).copied == 0
    assert copy_objects(target, str(tmp_path / "back"), shared_bucket.config).copied == 5
    assert read(tmp_path / "back") == OBJECTS


def test_only_what_differs_is_copied_again(folder: Bucket, tmp_path: Path) -> None:
    source, target = write(tmp_path / "src"), tmp_path / "dst"
    copy_objects(str(source), str(target))
    (target / "a").unlink()
    (target / "b/c").write_bytes(b"longer")
    assert copy_objects(str(source), str(target)).copied == 2
    (source / "b/c").write_bytes(b"33")  # newer, of the same size
    assert copy_objects(str(source), str(target)).copied == 1
    (target / "a").write_bytes(b"x")  # of the same size, newer than the source
    assert copy_objects(str(source), str(target)).copied == 0
    assert copy_objects(str(source), str(target), verify=True).copied == 1
    assert read(target) == {**OBJECTS, "b/c": b"33"}


def test_interrupted_copy_publishes_no_header_and_continues(gcs: Bucket, emulator: Emulator, tmp_path: Path) -> None:
    source = write(tmp_path / "src")
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(403,), key_prefix="data/b/", kinds=("put",)))
    with pytest.raises(PermissionDeniedError):
        copy_objects(str(source), f"{gcs.uri}/data", gcs.config)
    assert not gcs.store.exists("data/prepared.json")
    emulator.clear_faults()
    copy_objects(str(source), f"{gcs.uri}/data", gcs.config)
    assert gcs.store.exists("data/prepared.json")
    # A header that will be replaced goes first: an interrupted copy leaves none.
    (source / "prepared.json").write_bytes(b"other")
    (source / "b/c").write_bytes(b"other")
    emulator.set_faults(Faults(error_rate=1.0, error_statuses=(403,), key_prefix="data/b/", kinds=("put",)))
    with pytest.raises(PermissionDeniedError):
        copy_objects(str(source), f"{gcs.uri}/data", gcs.config)
    assert not gcs.store.exists("data/prepared.json")


def test_wrong_content_is_not_copied(tmp_path: Path) -> None:
    source = write(tmp_path / "src")
    for name in ("a", "large"):
        checksums = {name: checksum_content(b"another")}
        with pytest.raises(StoreError, match=f"{name}: the object has another content than the dataset's index says"):
            copy_objects(str(source), str(tmp_path / name), checksums=checksums)
        assert name not in read(tmp_path / name)


def test_single_object(gcs: Bucket, tmp_path: Path) -> None:
    source = write(tmp_path / "src")
    assert copy_objects(str(source / "a"), f"{gcs.uri}/x", gcs.config).objects == 1
    assert copy_objects(str(source / "a"), f"{gcs.uri}/below/", gcs.config).copied == 1
    assert copy_objects(f"{gcs.uri}/below/a", f"{tmp_path}/out/", gcs.config).copied == 1
    assert (bytes(gcs.store.get("x")), (tmp_path / "out/a").read_bytes()) == (b"1", b"1")
    assert copy_objects(str(source / "a"), f"{gcs.uri}/x", gcs.config).copied == 0


def test_mistakes(gcs: Bucket, tmp_path: Path) -> None:
    with pytest.raises(EmptyError, match="no objects to copy"):
        copy_objects(f"{gcs.uri}/nothing", str(tmp_path / "x"), gcs.config)
    source = write(tmp_path / "src")
    for inside in (source, source / "below", tmp_path):
        with pytest.raises(ConfigError, match="must not lie in one another"):
            copy_objects(str(source), str(inside))
    for key in ("up/../../x", "a//b"):
        gcs.store.put(f"{key.partition('/')[0]}/{key}", b"x")
        with pytest.raises(ConfigError, match="cannot be the path of a file"):
            copy_objects(f"{gcs.uri}/{key.partition('/')[0]}", str(tmp_path / "out"), gcs.config)
    assert not (tmp_path / "out").exists()


def test_command_between_two_servers(gcs: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "src", {"a": b"1", "b": b"2"})
    (tmp_path / "dst.toml").write_text(f'[store]\nendpoint = "{gcs.config.endpoint}"\n')
    words = ["cp", str(source), f"{gcs.uri}/data", "--dst-config", str(tmp_path / "dst.toml")]
    assert main(words) == 0
    assert "2 objects, 2 B in gs://bkt/data; copied 2" in capsys.readouterr().out
    assert main(words) == 0
    assert "all were there" in capsys.readouterr().out
    assert bytes(gcs.store.get("data/b")) == b"2"


def test_object_that_changes_during_the_copy(gcs: Bucket, emulator: Emulator, tmp_path: Path, monkeypatch: Any) -> None:
    gcs.store.put("src/a", b"old")
    real = transfer._list_existing

    def change(*arguments: Any) -> Any:
        gcs.store.put("src/a", b"new")
        return real(*arguments)

    monkeypatch.setattr(transfer, "_list_existing", change)
    with pytest.raises(StoreError, match=r"src/a: the object changed while it was copied. Run the same command"):
        copy_objects(f"{gcs.uri}/src", str(tmp_path / "out"), gcs.config)
    assert read(tmp_path / "out") == {}
