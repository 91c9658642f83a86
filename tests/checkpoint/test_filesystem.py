"""Buckets as an fsspec file system: modes, transactions, everyday operations, and Lightning without gcsfs or s3fs."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.core import OpenFile

from tests.conftest import Bucket
from voxlane import Checkpoint, errors
from voxlane.checkpoint.filesystem import BucketFileSystem
from voxlane.testing import Access, Emulator

MIB = 1 << 20


LARGE = 6 * MIB
"""Size of a file that is uploaded in parts."""


def _open(bucket: Bucket) -> BucketFileSystem:
    return BucketFileSystem(bucket.with_config(part_bytes=5 * MIB).config)


def _names(fs: BucketFileSystem, bucket: Bucket) -> list[str]:
    return [name.removeprefix(bucket.uri + "/") for name in fs.find(bucket.uri)]


# -- transactions ------------------------------------------------------------------------------------------------------


def test_files_of_a_transaction_appear_at_its_end(bucket: Bucket) -> None:
    fs = _open(bucket)
    with fs.transaction:
        with fs.open(f"{bucket.uri}/small", "wb") as file:
            file.write(b"small")
        large = fs.open(f"{bucket.uri}/large", "wb")
        large.write(bytes(LARGE))
        large.close()
        large.close()
        with pytest.raises(errors.ClosedWriterError, match="large"):
            large.write(b"more")
        with fs.open(f"{bucket.uri}/text", "w", newline="") as text:
            csv.writer(text).writerows([["a", "é"], [1, 2]])
        fs.pipe(f"{bucket.uri}/piped", b"piped")
        assert _names(fs, bucket) == []
    assert _names(fs, bucket) == ["large", "piped", "small", "text"]
    assert fs.cat(f"{bucket.uri}/text") == "a,é\r\n1,2\r\n".encode()
    assert fs.cat(f"{bucket.uri}/large") == bytes(LARGE)
    fs.pipe(f"{bucket.uri}/after", b"a file after the transaction appears at once")
    assert fs.exists(f"{bucket.uri}/after")


def test_exception_discards_all_files_of_a_transaction(gcs: Bucket, emulator: Emulator) -> None:
    fs = _open(gcs)
    fs.pipe("gs://bkt/a", b"old")

    def fail(large_file: str = "gs://bkt/b") -> None:
        with fs.transaction:
            fs.pipe("gs://bkt/a", b"new")
            if large_file:
                fs.pipe(large_file, bytes(LARGE))
            raise ZeroDivisionError

    with (
        pytest.warns(errors.DiscardedWarning, match="2 files were discarded.*: gs://bkt/a, gs://bkt/b"),
        pytest.raises(ZeroDivisionError),
    ):
        fail()
    assert _names(fs, gcs) == ["a"]
    assert fs.cat("gs://bkt/a") == b"old"
    assert emulator.uploads("bkt") == []
    with (
        pytest.warns(errors.DiscardedWarning, match="1 file was discarded.*: gs://bkt/a"),
        pytest.raises(ZeroDivisionError),
    ):
        fail(large_file="")
    fs.pipe("gs://bkt/c", b"outside of the transaction")
    assert fs.exists("gs://bkt/c")


def test_file_that_is_still_open_fails_its_transaction(gcs: Bucket) -> None:
    fs = _open(gcs)
    with pytest.raises(errors.StoreError, match=r"gs://bkt/b: the file is still open.*Close it"), fs.transaction:
        fs.pipe("gs://bkt/a", b"complete")
        text = fs.open("gs://bkt/b", "w")
        text.write("not flushed yet")
    assert _names(fs, gcs) == []
    assert text.closed


def test_file_that_failed_inside_a_transaction_is_left_out(gcs: Bucket) -> None:
    fs = _open(gcs)
    with fs.transaction:
        fs.pipe("gs://bkt/a", b"complete")
        with pytest.raises(ZeroDivisionError), fs.open("gs://bkt/b", "wb") as file:
            file.write(b"half")
            raise ZeroDivisionError
    assert _names(fs, gcs) == ["a"]


def test_failing_transaction_names_the_published_files(gcs: Bucket, emulator: Emulator) -> None:
    fs = _open(gcs)
    transaction = fs.start_transaction()
    fs.pipe("gs://bkt/a", b"a")
    fs.pipe("gs://no-such-bucket/b", b"b")
    fs.pipe("gs://bkt/c", b"c")
    with pytest.raises(errors.BucketNotFoundError) as caught:
        transaction.complete()
    assert caught.value.__notes__ == ["Of the 3 files of the transaction these were published: gs://bkt/a"]
    assert _names(fs, gcs) == ["a"]


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, LARGE])
def test_append_and_create_only(bucket: Bucket, size: int) -> None:
    fs, uri = _open(bucket), f"{bucket.uri}/log"
    for _ in range(2):
        with fs.open(uri, "ab") as file:
            file.write(bytes(size))
    with fs.open(uri, "a", encoding="utf-8") as file:
        file.write("é")
    assert fs.cat(uri) == bytes(2 * size) + "é".encode()
    with pytest.raises(FileExistsError, match="log: the file exists already"):
        fs.open(uri, "xb")
    first, second = fs.open(f"{bucket.uri}/new", "xb"), fs.open(f"{bucket.uri}/new", "xb")
    first.write(bytes(size))
    second.write(b"b")
    first.close()
    with pytest.raises(FileExistsError, match="new"):
        second.close()
    assert fs.cat(f"{bucket.uri}/new") == bytes(size)
    with pytest.raises(FileExistsError):
        fs.pipe_file(uri, b"", mode="create")


@pytest.mark.parametrize("size", [3, LARGE])
def test_append_does_not_lose_the_lines_of_another_process(bucket: Bucket, size: int) -> None:
    fs, uri = _open(bucket), f"{bucket.uri}/log"
    fs.pipe(uri, bytes(size))
    first, second = fs.open(uri, "ab"), fs.open(uri, "ab")
    first.write(b"first")
    second.write(b"second")
    first.close()
    with pytest.raises(errors.ChangedError, match="log: another process changed the file"):
        second.close()
    assert fs.cat(uri) == bytes(size) + b"first"


def test_other_modes_are_refused(gcs: Bucket) -> None:
    fs = _open(gcs)
    for mode in ("r+b", "w+b", "a+", "r+"):
        with pytest.raises(ValueError, match=r"gs://bkt/a: mode .* in place.*rb, wb, xb or ab"):
            fs.open("gs://bkt/a", mode)
    with pytest.raises(ValueError, match=r"gs://bkt/a.*fsspec\.open"):
        fs.open("gs://bkt/a", "wb", compression="gzip")


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_exception_in_a_file_of_fsspec_publishes_nothing(gcs: Bucket, mode: str) -> None:
    fs = _open(gcs)
    fs.pipe("gs://bkt/a.gz", b"old")
    content: Any = "half" if mode == "w" else b"half"

    def fail(compression: str | None) -> None:
        with OpenFile(fs, "gs://bkt/a.gz", mode, compression=compression) as file:
            file.write(content)
            raise ZeroDivisionError

    for compression in ("gzip", None):
        with pytest.warns(errors.DiscardedWarning, match="ZeroDivisionError"), pytest.raises(ZeroDivisionError):
            fail(compression)
    assert fs.cat("gs://bkt/a.gz") == b"old"
    with OpenFile(fs, "gs://bkt/a.gz", mode, compression="gzip") as file:
        file.write(content)
    with fs.open("gs://bkt/a.gz", "rt", compression="infer") as file:
        assert file.read() == "half"


# -- everyday operations -----------------------------------------------------------------------------------------------


def test_everyday_operations(bucket: Bucket, tmp_path: Path) -> None:
    fs, root = _open(bucket), f"{bucket.uri}/run"
    (tmp_path / "up/deep").mkdir(parents=True)
    (tmp_path / "up/a.txt").write_text("a")
    (tmp_path / "up/deep/b.txt").write_text("b")
    fs.put(f"{tmp_path}/up/", root, recursive=True)
    assert fs.find(root) == [f"{root}/a.txt", f"{root}/deep/b.txt"]
    assert fs.find(root, maxdepth=1, withdirs=True) == [f"{root}/a.txt", f"{root}/deep"]
    assert fs.find(f"{root}/a.txt") == [f"{root}/a.txt"]
    assert fs.find(f"{root}/nothing") == []
    assert fs.glob(f"{root}/*.txt") == [f"{root}/a.txt"]
    assert fs.glob(f"{root}/**/*.txt") == [f"{root}/a.txt", f"{root}/deep/b.txt"]
    assert list(fs.walk(root)) == [(root, ["deep"], ["a.txt"]), (f"{root}/deep", [], ["b.txt"])]
    assert fs.ls(root, detail=False) == [f"{root}/a.txt", f"{root}/deep"]
    assert [entry["type"] for entry in fs.ls(root)] == ["file", "directory"]
    assert fs.cat(f"{root}/*.txt") == {f"{root}/a.txt": b"a"}
    assert fs.cat_file(f"{root}/a.txt", start=0, end=1) == b"a"
    assert (fs.isdir(root), fs.isfile(root), fs.exists(f"{root}/none"), fs.size(f"{root}/a.txt")) == (
        True,
        False,
        False,
        1,
    )
    fs.get(root, f"{tmp_path}/down", recursive=True)
    assert (tmp_path / "down/deep/b.txt").read_text() == "b"
    fs.mv(f"{root}/a.txt", f"{root}/c.txt")
    fs.copy(f"{root}/deep", f"{root}/copied", recursive=True)
    fs.touch(f"{root}/empty")
    assert fs.find(root) == [f"{root}/{name}" for name in ("c.txt", "copied/b.txt", "deep/b.txt", "empty")]
    with pytest.raises(IsADirectoryError, match="recursive=True"):
        fs.rm(root)
    fs.rm([f"{root}/c.txt", f"{root}/emp*"])
    fs.rm(root, recursive=True)
    assert list(bucket.store.list_folder(bucket.key(""))) == []  # the checksums too
    with pytest.raises(FileNotFoundError):
        fs.rm(root, recursive=True)


def test_arrow_writes_through_the_file_system(gcs: Bucket) -> None:
    fs, table = _open(gcs), pa.table({"key": ["a", "b"], "size": [1, 2]})
    pq.write_table(table, "gs://bkt/t.parquet", filesystem=fs)
    assert pq.read_table("gs://bkt/t.parquet", filesystem=fs) == table
    pq.write_to_dataset(table, "gs://bkt/parts", partition_cols=["key"], filesystem=fs)
    assert sorted(pq.read_table("gs://bkt/parts", filesystem=fs)["size"].to_pylist()) == [1, 2]


def test_torch_saves_with_a_file_of_fsspec(gcs: Bucket) -> None:
    fs = _open(gcs)
    with fs.open("gs://bkt/a.ckpt", "wb") as file:
        torch.save({"w": torch.arange(5)}, file)
    assert torch.equal(Checkpoint("gs://bkt", gcs.config).load("a.ckpt")["w"], torch.arange(5))


def test_storage_options_are_fields_of_the_config(gcs: Bucket, emulator: Emulator) -> None:
    emulator.set_access(Access(bearer_token="secret"))
    fs = BucketFileSystem(endpoint=emulator.url, token="secret", use_listings_cache=False)
    fs.pipe("gs://bkt/a", b"a")
    assert fs.cat("gs://bkt/a") == b"a"
    with pytest.raises(errors.ConfigError, match="anonymous"):
        BucketFileSystem(anonymus=True)
    with pytest.raises(errors.ConfigError, match="both a config and options"):
        BucketFileSystem(gcs.config, token="secret")


# -- registration ------------------------------------------------------------------------------------------------------

_PACKAGES = {"gcsfs": "GCSFileSystem", "s3fs": "S3FileSystem", "adlfs": "AzureBlobFileSystem"}


def _environment(folder: Path, *, installed: bool, **variables: str) -> dict[str, str]:
    """Return an environment with the project's entry points, in which the usual packages are installed or not."""
    entry_points = tomllib.loads(Path("pyproject.toml").read_text())["project"]["entry-points"]["fsspec.specs"]
    info = folder / "entry_points-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-points\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[fsspec.specs]\n" + "".join(f"{name} = {value}\n" for name, value in entry_points.items())
    )
    if installed:
        for package, name in _PACKAGES.items():
            source = f"import fsspec\n__version__ = '9'\n\n\nclass {name}(fsspec.AbstractFileSystem):\n    pass\n"
            (folder / f"{package}.py").write_text(source)
    else:
        (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({[*_PACKAGES]}))\n")
    path = os.pathsep.join([str(folder), os.path.abspath("src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **variables}


@pytest.mark.parametrize("installed", [False, True])
def test_scheme_is_served_unless_another_package_is_installed(tmp_path: Path, installed: bool) -> None:
    program = (
        "import fsspec, sys\n"
        "for scheme in ('gs', 'gcs', 's3', 's3a', 'az'): print(fsspec.get_filesystem_class(scheme).__module__)\n"
        "print('torch' in sys.modules)\n"
        "from voxlane.checkpoint.filesystem import register_filesystem\n"
        "register_filesystem(override=True)\n"
        "print(fsspec.get_filesystem_class('gs').__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=_environment(tmp_path, installed=installed),
        capture_output=True,
        text=True,
        check=True,
    )
    if installed:
        assert done.stdout.split() == ["gcsfs", "gcsfs", "s3fs", "s3fs", "adlfs", "False", "BucketFileSystem"]
    else:
        assert done.stdout.split() == ["voxlane.checkpoint.filesystem"] * 5 + ["True", "BucketFileSystem"]


_TRAINING = """
import sys
import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        if self.current_epoch == 1:
            self.log("later", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


root, logger = sys.argv[1:]
path = None
for num_epochs in (1, 2):
    trainer = pl.Trainer(
        default_root_dir=root,
        logger=CSVLogger(root, version="v", flush_logs_every_n_steps=3) if logger == "csv" else True,
        max_epochs=num_epochs,
        log_every_n_steps=1,
        accelerator="cpu",
        enable_progress_bar=False,
    )
    data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
    trainer.fit(Model(), data, ckpt_path=path)
    path = trainer.checkpoint_callback.best_model_path
print(trainer.global_step, path)
"""


@pytest.mark.parametrize(("scheme", "logger"), [("gs", "default"), ("s3", "csv")])
def test_plain_trainer_writes_and_resumes_without_another_package(
    emulator: Emulator, tmp_path: Path, scheme: str, logger: str
) -> None:
    """The script imports nothing of voxlane; the environment tells where the bucket is."""
    environment = _environment(
        tmp_path,
        installed=False,
        STORAGE_EMULATOR_HOST=emulator.url,
        AWS_ENDPOINT_URL=emulator.url,
        AWS_ACCESS_KEY_ID="k",
        AWS_SECRET_ACCESS_KEY="s",
    )
    root = f"{scheme}://bkt/run"
    done = subprocess.run(
        [sys.executable, "-c", _TRAINING, root, logger],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    num_steps, path = done.stdout.split()[-2:]
    assert num_steps == "8"
    assert path.startswith(root)
    keys = emulator.keys("bkt")
    assert path.removeprefix(f"{scheme}://bkt/") in keys
    assert not (tmp_path / f"{scheme}:").exists()
    if logger == "csv":
        text = emulator.get("bkt", "run/lightning_logs/v/metrics.csv").decode()
        rows = list(csv.DictReader(text.splitlines()))
        assert [row["step"] for row in rows] == ["4", "5", "6", "7"]
        assert all(row["later"] for row in rows)
    else:
        assert any("tfevents" in key for key in keys)
