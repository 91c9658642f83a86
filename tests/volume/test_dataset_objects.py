"""Prepared datasets that were copied to other disks and buckets, and those that did not arrive whole."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch

from tests.conftest import Bucket
from tests.train import tiny_runs
from voxlane.cli.main import main
from voxlane.errors import PermissionDeniedError, PreparedError, StoreError
from voxlane.store import StoreConfig
from voxlane.testing import Emulator, Faults
from voxlane.train.fit import train
from voxlane.volume.case_volumes import Cases
from voxlane.volume.dataset_index import OBJECT_LISTS
from voxlane.volume.dataset_objects import check_complete, compare_contents, copy_dataset
from voxlane.volume.patch_stream import PatchStream
from voxlane.volume.prepared_dataset import HEADER, Prepared
from voxlane.volume.staged_dataset import stage


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny prepared dataset, which tests must not change."""
    folder = tmp_path_factory.mktemp("source")
    tiny_runs.prepare_balls(folder)
    return folder / "prepared"


@pytest.fixture
def copied(source: Path, tmp_path: Path) -> Path:
    """Return the folder of a plain copy of the dataset, whose files are new ones."""
    shutil.copytree(source, tmp_path / "data", copy_function=shutil.copyfile)
    return tmp_path / "data"


def read_patches(prepared: Prepared) -> list[torch.Tensor]:
    samples = list(PatchStream(prepared, samples=8, seed=3))
    return [sample[name] for sample in samples for name in ("image", "label")]


def assert_same_dataset(actual: Prepared, source: Path) -> None:
    expected = Prepared.load(str(source))
    assert actual.digest == expected.digest
    assert all(torch.equal(a, b) for a, b in zip(read_patches(actual), read_patches(expected), strict=True))
    assert compare_contents(actual, read=True).problem == ""


def upload(folder: Path, bucket: Bucket) -> str:
    """Upload a folder by boto3 alone, and return its URI."""
    config = bucket.config
    client = boto3.client(
        "s3",
        endpoint_url=config.endpoint,
        region_name="us-east-1",
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=config.secret_access_key,
    )
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            client.upload_file(str(path), "bkt", f"up/{path.relative_to(folder)}")
    client.close()
    return f"{bucket.uri}/up"


def train_tiny(data: str, run: Path, config: StoreConfig | None = None) -> dict[str, torch.Tensor]:
    values = {**tiny_runs.CONFIG, "fold": 0}
    train(data, str(run), values, config, progress=False)
    weights: dict[str, torch.Tensor] = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return weights


def test_copies_train_to_the_same_bits(source: Path, copied: Path, s3: Bucket, tmp_path: Path) -> None:
    staged = stage(Prepared.load(str(source)), tmp_path / "disk").folder
    expected = train_tiny(str(source), tmp_path / "original")
    for name, data, config in (
        ("copied", str(copied), None),
        ("staged", staged, None),
        ("uploaded", upload(source, s3), s3.config),
    ):
        weights = train_tiny(data, tmp_path / name, config)
        assert all(torch.equal(weights[key], expected[key]) for key in expected), name


@pytest.mark.parametrize("kind", ["s3", "s3_emulator"])
def test_plain_upload_is_the_same_dataset(kind: str, source: Path, request: pytest.FixtureRequest) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    assert_same_dataset(Prepared.load(upload(source, bucket), bucket.config), source)


def test_copied_and_staged_folders_are_the_same_dataset(source: Path, copied: Path, tmp_path: Path) -> None:
    assert_same_dataset(Prepared.load(str(copied)), source)
    report = stage(Prepared.load(str(copied)), tmp_path / "disk")
    shutil.rmtree(copied)
    staged = Prepared.load(report.folder)
    assert_same_dataset(staged, source)
    copy_dataset(staged, str(tmp_path / "again"))
    assert_same_dataset(Prepared.load(str(tmp_path / "again")), source)
    with pytest.raises(PreparedError, match=r"copies made by voxlane stage.*Name one of them, below datasets/"):
        Prepared.load(str(tmp_path / "disk"))


def test_moved_dataset_is_read_once_beyond_its_index(source: Path, gcs: Bucket, emulator: Emulator) -> None:
    copy_dataset(Prepared.load(str(source)), f"{gcs.uri}/data", gcs.config)
    emulator.reset_counters()
    prepared = Prepared.load(f"{gcs.uri}/data", gcs.config)
    check_complete(prepared)
    assert emulator.counters().counts_of("get").requests == 2  # the header and the table of cases
    cases = Cases(prepared)
    for row in range(len(prepared)):
        cases.open(row).read_whole()
    objects = [item for item in prepared.objects() if "/foreground/" not in item.key]
    assert emulator.counters().counts_of("get").requests == 2 + len(objects)


def test_cp_to_a_bucket_and_back(
    source: Path, gcs: Bucket, emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    emulator.set_faults(Faults(error_rate=1, error_statuses=(403,), key_prefix="data/cases/case_1", kinds=("put",)))
    with pytest.raises(PermissionDeniedError):
        copy_dataset(Prepared.load(str(source)), f"{gcs.uri}/data", gcs.config)
    with pytest.raises(PreparedError, match=r"incomplete: its header is missing.*voxlane cp SRC DST; it will resume"):
        Prepared.load(f"{gcs.uri}/data", gcs.config)
    emulator.clear_faults()
    partial = len(list(gcs.store.list_folder("data/")))
    assert main(["cp", str(source), f"{gcs.uri}/data"]) == 0
    output = capsys.readouterr().out
    prepared = Prepared.load(f"{gcs.uri}/data", gcs.config)
    total = len(list(gcs.store.list_folder("data/")))
    assert f"{total} objects, " in output
    assert f"copied {total - partial}, " in output
    assert f"Balls: 6 cases, complete, digest {prepared.digest}" in output
    assert_same_dataset(prepared, source)
    assert main(["cp", f"{gcs.uri}/data/", str(tmp_path / "back")]) == 0
    assert_same_dataset(Prepared.load(str(tmp_path / "back")), source)
    assert not (tmp_path / "back/work").exists()
    emulator.reset_counters()
    assert main(["cp", str(source), f"{gcs.uri}/data", "--verify"]) == 0
    assert "all were there" in capsys.readouterr().out
    assert emulator.counters().bytes_in == 0


def test_killed_cp_leaves_no_dataset_and_continues(source: Path, gcs: Bucket, emulator: Emulator) -> None:
    emulator.set_faults(Faults(latency_s=0.3, kinds=("put",)))
    words = ["cp", str(source), f"{gcs.uri}/data", "--endpoint", emulator.url]
    child = subprocess.Popen([sys.executable, "-m", "voxlane", *words])
    try:
        while not (arrived := list(gcs.store.list_folder("data/"))):
            assert child.poll() is None
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    emulator.clear_faults()
    expected = list(Prepared.load(str(source)).objects(OBJECT_LISTS))
    assert len(arrived) < len(expected)
    with pytest.raises(PreparedError, match="incomplete"):
        Prepared.load(f"{gcs.uri}/data", gcs.config)
    report = copy_dataset(Prepared.load(str(source)), f"{gcs.uri}/data", gcs.config)
    assert 0 < report.copied < report.objects
    assert_same_dataset(Prepared.load(f"{gcs.uri}/data", gcs.config), source)


def test_copy_replaces_no_other_dataset(source: Path, tmp_path: Path) -> None:
    tiny_runs.prepare_balls(tmp_path, tiny_runs.case_ids(4))
    with pytest.raises(PreparedError, match=r"DST already holds another dataset: Balls of 4 cases. Choose another DST"):
        copy_dataset(Prepared.load(str(source)), str(tmp_path / "prepared"))


# -- datasets that are not whole ---------------------------------------------------------------------------------------


def object_path(folder: Path) -> Path:
    return folder / "cases" / f"{tiny_runs.case_ids()[0]}.zarr" / "image/c/0/0/0/0"


def remove(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))


def exchange(path: Path) -> None:
    """Replace the object by that of another case, all of whose checksums are right."""
    other = path.parents[6] / f"{tiny_runs.case_ids()[1]}.zarr" / path.relative_to(path.parents[5])
    shutil.copy(other, path)


@pytest.mark.parametrize(
    ("damage", "listed", "found_without_reading"),
    [
        (remove, "missing       ", True),
        (shorten, "wrong size    ", True),
        (change, "wrong content ", False),
        (exchange, "wrong ", None),
    ],
)
def test_check_names_what_is_wrong(
    damage: Callable[[Path], None], listed: str, found_without_reading: bool | None, copied: Path, capsys: Any
) -> None:
    assert main(["check", str(copied)]) == 0
    assert "Balls: 6 cases, " in capsys.readouterr().out
    path = object_path(copied)
    damage(path)
    if found_without_reading is not None:
        assert main(["check", str(copied)]) == int(found_without_reading)
        capsys.readouterr()
    assert main(["check", str(copied), "--bytes"]) == 1
    captured = capsys.readouterr()
    assert f"{listed}" in captured.out
    assert str(path.relative_to(copied)) in captured.out
    assert "INCOMPLETE" in captured.out
    (line,) = captured.err.splitlines()
    assert "the dataset is incomplete: of " in line
    assert "Copy the dataset again (voxlane cp SRC DST), or run voxlane prepare again" in line
    with pytest.raises(PreparedError, match=r"missing|shorter|not the one that was prepared"):
        read_patches(Prepared.load(str(copied)))


def test_check_of_a_whole_dataset(copied: Path, capsys: Any) -> None:
    (copied / "cases/extra.bin").write_bytes(b"x")
    (copied / "notes.txt").write_bytes(b"x")
    assert main(["check", str(copied), "--bytes"]) == 0
    output = capsys.readouterr().out
    assert "extra         cases/extra.bin\n" in output
    assert "notes" not in output
    assert "every byte compared; digest " in output
    assert main(["check", str(copied), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["missing"], facts["extra"], facts["bytes_compared"]) == ([], ["cases/extra.bin"], False)
    assert main(["check", str(copied), "-o", "x"]) == 1
    assert "--out is for scans" in capsys.readouterr().err
    assert main(["check", str(copied.parent), "--bytes"]) == 1
    assert "--bytes is for prepared datasets" in capsys.readouterr().err


def test_damaged_and_half_copied_index(copied: Path, capsys: Any) -> None:
    header = copied / HEADER
    body = header.read_text()
    for damaged, problem in (
        (body.replace('"folds": 2', '"folds": 3'), "the dataset's header is damaged. Copy the dataset again"),
        (json.dumps({**json.loads(body), "version": 9}), "newer version of voxlane (format 9, "),
        (None, "the dataset is incomplete: its header is missing"),
    ):
        if damaged is None:
            header.unlink()
            shutil.rmtree(copied / "work")
        else:
            header.write_text(damaged)
        for words in (["check", str(copied)], ["cp", str(copied), str(copied.parent / "x")]):
            assert main(words) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert problem in line


def test_training_refuses_half_a_dataset(copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "cases" / f"{tiny_runs.case_ids()[0]}.zarr")
    with pytest.raises(PreparedError, match=r"the dataset is incomplete: of \d+ objects, \d+ missing, such as cases/"):
        train_tiny(str(copied), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_copy_of_a_damaged_dataset_ends_without_a_header(copied: Path, tmp_path: Path) -> None:
    change(object_path(copied))
    with pytest.raises(StoreError, match=r"image/c/0/0/0/0: the object has another content than the dataset's index"):
        copy_dataset(Prepared.load(str(copied)), str(tmp_path / "x"))
    assert not (tmp_path / "x" / HEADER).exists()
    remove(object_path(copied))
    with pytest.raises(PreparedError, match=r"the dataset is incomplete: of \d+ objects, 1 missing"):
        copy_dataset(Prepared.load(str(copied)), str(tmp_path / "y"))


def test_format_1_stays_where_it_was_prepared(copied: Path, tmp_path: Path) -> None:
    make_format_1(copied)
    prepared = Prepared.load(str(copied))
    assert prepared.format == 1
    read_patches(prepared)
    assert compare_contents(prepared).problem == ""
    with pytest.raises(PreparedError, match=r"stored no checksums, so no copy can be verified\. Run voxlane prepare"):
        copy_dataset(prepared, str(tmp_path / "x"))
    moved = tmp_path / "moved"
    shutil.copytree(copied, moved)
    with pytest.raises(PreparedError, match=r"changed or copied after an earlier version.*Use the dataset where"):
        read_patches(Prepared.load(str(moved)))
    assert "of another content" in compare_contents(Prepared.load(str(moved))).problem


def make_format_1(folder: Path) -> None:
    """Rewrite the index of a dataset as earlier versions wrote it."""
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    from voxlane.store import Store

    header = json.loads((folder / HEADER).read_text())
    table = pq.read_table(folder / header["cases"])
    store, volumes = Store(str(folder)), []
    for name, text in zip(table["id"].to_pylist(), table["volume"].to_pylist(), strict=True):
        volume = json.loads(text)
        del volume["documents"]
        below = f"{folder}/cases/{name}.zarr".lstrip("/")
        volume["objects"] = [[n, size, store.head(f"{below}/{n}").etag] for n, size, *_ in volume["objects"]]
        volumes.append(json.dumps(volume))
    (folder / header["cases"]).unlink()
    pq.write_table(table.set_column(table.schema.get_field_index("volume"), "volume", pa.array(volumes)), folder / "t")
    name = f"cases-{hashlib.sha256((folder / 't').read_bytes()).hexdigest()[:16]}.parquet"
    (folder / "t").rename(folder / name)
    del header["checksum"]
    (folder / HEADER).write_text(json.dumps({**header, "version": 1, "digest": "0" * 16, "cases": name}))
