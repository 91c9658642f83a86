"""Records that come with data name nothing outside it. test_dataset_discovery.py has the layouts of datasets."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.conftest import Bucket
from voxlane.checkpoint import list_checkpoints, load_sharded
from voxlane.checkpoint.lifecycle import find_checkpoint, remove_checkpoint
from voxlane.errors import CacheError, ConfigError, PreparedError, UnsafeError
from voxlane.store import staging
from voxlane.store.listing import Entry, Manifest
from voxlane.store.staging.local_store import MANIFEST
from voxlane.train.tensorboard import local_name
from voxlane.uri import stays_below
from voxlane.volume.dataset_index import encode_header
from voxlane.volume.prepared_dataset import HEADER, Prepared


@pytest.mark.parametrize("path", ["", "/a", "..", "../a", "a/../../b", "a/..", "a\0b"])
def test_paths_that_leave_their_folder(path: str) -> None:
    assert not stays_below(path)
    assert stays_below("a/b..c/...d")


def test_metadata_of_a_checkpoint_names_only_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"x" * 1000)
    folder = tmp_path / "run/step-1"
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({"w": torch.zeros(8)}, storage_writer=dcp.FileSystemWriter(folder))
    metadata: Any = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../../precious"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeError, match=r"'../../precious', which is outside the checkpoint"):
        load_sharded({"w": torch.zeros(8)}, str(folder))
    assert "outside the checkpoint" in list_checkpoints(str(folder))[0].problem
    remove_checkpoint(find_checkpoint(str(folder)))
    assert (tmp_path / "precious").exists()


def test_header_of_a_prepared_dataset(tmp_path: Path, tiny_prepared: str) -> None:
    header = json.loads(Path(tiny_prepared, HEADER).read_text())
    for cases in ("../cases.parquet", "/etc/hostname", 5):
        fields = {name: value for name, value in header.items() if name not in ("version", "checksum")}
        (tmp_path / HEADER).write_bytes(encode_header({**fields, "cases": cases}))
        with pytest.raises(PreparedError, match="the dataset's header is damaged"):
            Prepared.load(str(tmp_path))


@pytest.fixture(scope="module")
def tiny_prepared(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.train import tiny_runs

    return tiny_runs.prepare_balls(tmp_path_factory.mktemp("balls")).removeprefix("file://")


def test_manifests(gcs: Bucket, tmp_path: Path) -> None:
    def save(target: str, listed: str, key: str) -> None:
        Manifest.of(listed, [Entry(key, 1, None, None)]).save(target, gcs.config)

    save("gs://bkt/m", f"file://{tmp_path}", f"{tmp_path}/a".lstrip("/"))
    with pytest.raises(ConfigError, match="gs://bkt/m: the manifest is in a bucket, but lists files of this machine"):
        Manifest.load("gs://bkt/m", gcs.config)
    for key in ("etc/hostname", f"{tmp_path}/../b".lstrip("/")):
        save(f"{tmp_path}/m", f"file://{tmp_path}", key)
        with pytest.raises(ConfigError, match=f"the manifest names '{key}', which is outside file://{tmp_path}"):
            Manifest.load(f"{tmp_path}/m")
    save("gs://bkt/m", "gs://bkt/data/", "other/a")
    with pytest.raises(ConfigError, match="the manifest names 'other/a', which is outside gs://bkt/data/"):
        Manifest.load("gs://bkt/m", gcs.config)


@pytest.mark.parametrize("name", ["../../../precious", "/etc/hostname"])
def test_record_of_a_staged_copy(tmp_path: Path, name: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/a").write_bytes(b"1")
    (tmp_path / "precious").write_bytes(b"1")
    folder = staging.stage(str(tmp_path / "source"), tmp_path / "root").folder
    manifest = Path(folder, MANIFEST)
    header, line = manifest.read_text().splitlines()
    manifest.write_text(f"{header}\n{json.dumps({**json.loads(line), 'name': name})}\n")
    with pytest.raises(CacheError, match=f"the record of the copy names '{name}'"):
        staging.stage(str(tmp_path / "source"), tmp_path / "root")
    assert (tmp_path / "precious").exists()


def test_copies_of_event_files_stay_in_their_folder() -> None:
    assert local_name("runs/", "runs/a/../../../x.tfevents") == "runs/a/x.tfevents"
