"""Folders that other users could change are refused, and new ones belong to this user alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Bucket
from voxlane.dataset import samples
from voxlane.dataset.cache import DiskCache
from voxlane.dataset.samples import SampleSource
from voxlane.errors import CacheError
from voxlane.store import staging
from voxlane.store.private_folder import check_private_folder, make_private_folder

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


def write_to_cache(folder: Path) -> None:
    DiskCache(folder, 1 << 20).put("gs://b/a", "1", b"abc")


def read_from_cache(folder: Path) -> None:
    DiskCache(folder, 1 << 20).get("gs://b/a", "1", 3)


def stage(folder: Path) -> None:
    source = folder.parent / "source"
    source.mkdir(exist_ok=True)
    (source / "a").write_bytes(b"1")
    staging.stage(str(source), folder)


USERS = [write_to_cache, read_from_cache, stage]


def make_foreign(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "planted").touch()
    os.chown(folder, 12345, 12345)


def make_writable(folder: Path) -> None:
    folder.mkdir()
    (folder / "planted").touch()
    folder.chmod(0o777)


def make_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("use", USERS)
def test_new_folders_are_private_whatever_the_umask(tmp_path: Path, use: Any) -> None:
    before = os.umask(0)
    try:
        use(tmp_path / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    for path in (tmp_path / "folder").iterdir():
        assert not path.stat().st_mode & 0o022
        assert not path.is_dir() or stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("use", USERS)
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        pytest.param(make_foreign, r"another user \(uid 12345\)", marks=NEEDS_ROOT),
        (make_writable, "other users may write to it"),
        (make_link, "symbolic link"),
    ],
)
def test_folders_of_others_are_refused(tmp_path: Path, use: Any, make: Any, problem: str) -> None:
    make(tmp_path / "folder")
    with pytest.raises(CacheError, match=f"{tmp_path}/folder: the folder is not private: .*{problem}"):
        use(tmp_path / "folder")


def test_an_empty_folder_of_ones_own_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o775)
    make_private_folder(tmp_path / "folder")
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    check_private_folder(tmp_path / "folder")


def test_the_listing_that_workers_share_is_private(
    gcs: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples.tempfile, "gettempdir", lambda: str(tmp_path))
    gcs.store.put("data/a", b"1")
    source = SampleSource("gs://bkt/data/", config=gcs.config)
    make_writable(tmp_path / f"voxlane-{os.getuid()}")
    with pytest.raises(CacheError, match="the folder is not private"):
        source._list_once_per_node()


def test_a_read_only_mount_may_belong_to_anybody(tmp_path: Path) -> None:
    code = (
        "import sys, os; from voxlane.store.private_folder import check_private_folder as check\n"
        "check(sys.argv[1], is_mounted=True)\n"
    )
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    tmp_path.chmod(0o777)
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    ran = subprocess.run([*command, "true"], capture_output=True)
    if ran.returncode:
        pytest.skip("mounting needs user namespaces")
    result = subprocess.run([*command, sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
