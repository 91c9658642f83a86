"""Dataflux's checkpoints, its file system and its upload function: what its tests ask of them."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from google.cloud import storage

from voxlane import errors
from voxlane.compat.dataflux import dataflux_checkpoint, multipart_upload
from voxlane.compat.dataflux.dataflux_checkpoint import DatafluxCheckpoint, DatafluxCheckpointBuffer
from voxlane.compat.dataflux.lightning import path_utils
from voxlane.compat.dataflux.lightning.gcs_filesystem import GCSFileSystem
from voxlane.testing import Emulator

from .conftest import BUCKET_NAME, PROJECT_NAME

PATH = "checkpoints/epoch0.ckpt"
STATE = {"w": torch.arange(1000.0)}


@pytest.fixture(params=["a client", "no client"])
def checkpoint(request: pytest.FixtureRequest, environment: Emulator, client: storage.Client) -> DatafluxCheckpoint:
    passed = client if request.param == "a client" else None
    return DatafluxCheckpoint(PROJECT_NAME, BUCKET_NAME, storage_client=passed)


# -- DatafluxCheckpoint --------------------------------------------------------------------------------------------


def test_with_block_publishes(checkpoint: DatafluxCheckpoint) -> None:
    with checkpoint.writer(PATH) as writer:
        torch.save(STATE, writer)
    with checkpoint.reader(PATH) as reader:
        assert torch.equal(torch.load(reader)["w"], STATE["w"])


def test_close_publishes(checkpoint: DatafluxCheckpoint, emulator: Emulator) -> None:
    writer = checkpoint.writer(PATH)
    assert isinstance(writer, DatafluxCheckpointBuffer)
    assert writer.blob.name == PATH
    torch.save(STATE, writer)
    assert PATH not in emulator.keys(BUCKET_NAME)
    writer.close()
    assert torch.equal(torch.load(checkpoint.reader(PATH))["w"], STATE["w"])
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"more")


def test_overwriting_replaces(checkpoint: DatafluxCheckpoint) -> None:
    for value in (1, 2, 3):  # also with the anonymous credentials of the client
        with checkpoint.writer(PATH) as writer:
            writer.write(b"%d" % value)
        assert checkpoint.reader(PATH).read() == b"%d" % value


def test_exception_in_the_block_publishes_nothing(checkpoint: DatafluxCheckpoint, emulator: Emulator) -> None:
    with pytest.raises(ZeroDivisionError), checkpoint.writer(PATH) as writer:
        torch.save(STATE, writer)
        raise ZeroDivisionError
    assert emulator.keys(BUCKET_NAME) == []


def test_writer_that_is_dropped_publishes_nothing_and_says_so(
    checkpoint: DatafluxCheckpoint, emulator: Emulator
) -> None:
    writer: Any = checkpoint.writer(PATH)
    writer.write(b"half")
    with pytest.warns(errors.DiscardedWarning, match=r"epoch0\.ckpt"):
        del writer  # the last reference
    assert emulator.keys(BUCKET_NAME) == []


def test_writer_takes_any_format(checkpoint: DatafluxCheckpoint) -> None:
    with checkpoint.writer("a.npz") as writer:
        numpy.savez(writer, x=numpy.arange(5))
    with checkpoint.writer("a.pickle") as writer:
        pickle.dump([1, 2], writer)
    with checkpoint.writer("a.zip") as writer, zipfile.ZipFile(writer, "w") as archive:
        archive.writestr("name", "text")
    assert numpy.load(checkpoint.reader("a.npz"))["x"].tolist() == [0, 1, 2, 3, 4]
    assert pickle.load(checkpoint.reader("a.pickle")) == [1, 2]
    assert zipfile.ZipFile(checkpoint.reader("a.zip")).read("name") == b"text"


def test_reader_has_the_methods_of_a_buffer(checkpoint: DatafluxCheckpoint) -> None:
    with checkpoint.writer(PATH) as writer:
        writer.write(b"0123456789")
    with checkpoint.reader(PATH) as reader:
        reader.seek(4)
        assert (reader.getvalue(), bytes(reader.getbuffer()), reader.read()) == (
            b"0123456789",
            b"0123456789",
            b"456789",
        )


def test_missing_checkpoint_is_an_error(checkpoint: DatafluxCheckpoint) -> None:
    with pytest.raises(FileNotFoundError, match=r"gs://bkt/missing\.ckpt: no such object"):
        checkpoint.reader("missing.ckpt")


def test_attributes_of_the_client(checkpoint: DatafluxCheckpoint) -> None:
    assert (checkpoint.project_name, checkpoint.bucket_name) == (PROJECT_NAME, BUCKET_NAME)
    assert checkpoint.bucket.name == BUCKET_NAME
    assert checkpoint.storage_client.project == PROJECT_NAME
    assert checkpoint.storage_client._connection.user_agent.startswith("dataflux/1.0")
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert copy.bucket.name == BUCKET_NAME
    for client in {copy.storage_client, checkpoint.storage_client}:
        client.close()


class FakeBlob:
    """A Blob of a fake client, as in users' unit tests: it stores its content in its bucket."""

    def __init__(self, bucket: FakeBucket, name: str) -> None:
        self.bucket, self.name = bucket, name

    def open(self, mode: str, ignore_flush: bool = False) -> Any:
        blob = self

        class File(io.BytesIO):
            def close(self) -> None:
                blob.bucket.contents[blob.name] = self.getvalue()
                super().close()

        return File()

    def download_to_file(self, file: io.BytesIO) -> None:
        file.write(self.bucket.contents[self.name])


class FakeBucket:
    """A bucket in memory."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.contents: dict[str, bytes] = {}

    def blob(self, name: str) -> FakeBlob:
        return FakeBlob(self, name)


class FakeClient:
    """A client with the methods of google-cloud-storage that a test needs."""

    _connection = None

    def __init__(self) -> None:
        self.only_bucket = FakeBucket(BUCKET_NAME)

    def bucket(self, name: str) -> FakeBucket:
        return self.only_bucket


def test_fake_client_is_used_through_its_own_methods() -> None:
    client = FakeClient()
    checkpoint = DatafluxCheckpoint(PROJECT_NAME, BUCKET_NAME, client)
    with checkpoint.writer(PATH) as writer:
        assert isinstance(writer, DatafluxCheckpointBuffer)
        torch.save(STATE, writer)
    with pytest.raises(ZeroDivisionError), checkpoint.writer("broken") as writer:
        raise ZeroDivisionError
    assert list(client.only_bucket.contents) == [PATH]
    assert torch.equal(torch.load(checkpoint.reader(PATH))["w"], STATE["w"])


# -- upload_chunks_concurrently_from_bytesio -----------------------------------------------------------------------


def test_upload_of_a_buffer(client: storage.Client, environment: Emulator) -> None:
    body = bytes(range(256)) * (80 << 10)  # 20 MiB, several parts
    blob = client.bucket(BUCKET_NAME).blob("large")
    buffer = io.BytesIO(body)
    buffer.seek(100)  # the position does not matter
    multipart_upload.multipart.upload_chunks_concurrently_from_bytesio(buffer, blob, chunk_size=8 << 20, max_workers=2)
    assert client.bucket(BUCKET_NAME).blob("large").download_as_bytes() == body
    multipart_upload.multipart.upload_chunks_concurrently_from_bytesio(io.BytesIO(b"small"), blob, deadline=60)
    assert blob.download_as_bytes() == b"small"


def test_settings_of_the_blob_are_not_dropped(client: storage.Client, environment: Emulator) -> None:
    blob = client.bucket(BUCKET_NAME).blob("with-metadata")
    blob.metadata = {"step": "12"}
    dataflux_checkpoint.upload(io.BytesIO(b"abc"), blob, content_type="text/plain")
    stored = client.bucket(BUCKET_NAME).get_blob("with-metadata")
    assert (stored.metadata, stored.content_type, stored.download_as_bytes()) == ({"step": "12"}, "text/plain", b"abc")


# -- paths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
@pytest.mark.parametrize("kind", [str, Path])
def test_paths_in_gcs(scheme: str, kind: Any) -> None:
    assert path_utils.parse_gcs_path(kind(f"{scheme}://bucket/a/b.ckpt")) == ("bucket", "a/b.ckpt")
    assert path_utils.parse_gcs_path(kind(f"{scheme}://bucket")) == ("bucket", "")
    assert path_utils.process_input_path(kind(f"{scheme}://bucket/a")) == f"{scheme}://bucket/a"


@pytest.mark.parametrize("path", ["", "bucket/a", "/bucket/a", "gcs://", "gs:///a", "s3://bucket/a", Path("bucket/a")])
def test_other_paths_are_value_errors(path: Any) -> None:
    with pytest.raises(ValueError, match=r"does not begin with gs://|names no bucket"):
        path_utils.parse_gcs_path(path)


def test_path_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="got dict"):
        path_utils.parse_gcs_path({})  # type: ignore[arg-type]


# -- GCSFileSystem -------------------------------------------------------------------------------------------------


@pytest.fixture
def files(client: storage.Client, environment: Emulator) -> GCSFileSystem:
    return GCSFileSystem(PROJECT_NAME, False, client)  # the order of Dataflux's arguments


@pytest.mark.parametrize("kind", [str, Path])
def test_streams(files: GCSFileSystem, kind: Any) -> None:
    path = kind(f"gs://{BUCKET_NAME}/dir/file")
    with files.create_stream(path, "wb") as stream:
        stream.write(b"abc")
    assert files.exists(path)
    with files.create_stream(path, "rb") as stream:
        assert stream.read() == b"abc"
    with (
        pytest.raises(ValueError, match=r"only supports rb \(read mode\) & wb \(write mode\)"),
        files.create_stream(path, "ab"),
    ):
        pass
    files.rename(path, kind(f"gs://{BUCKET_NAME}/dir/new"))
    assert (files.exists(path), files.exists(f"gs://{BUCKET_NAME}/dir/new")) == (False, True)
    files.rm_file(kind(f"gs://{BUCKET_NAME}/dir/new"))
    assert not files.exists(f"gs://{BUCKET_NAME}/dir/new")
    with pytest.raises(FileNotFoundError):
        files.rm_file(path)


def test_exception_in_a_stream_publishes_nothing(files: GCSFileSystem, emulator: Emulator) -> None:
    with pytest.raises(ZeroDivisionError), files.create_stream(f"gs://{BUCKET_NAME}/file", "wb") as stream:
        stream.write(b"abc")
        raise ZeroDivisionError
    assert emulator.keys(BUCKET_NAME) == []


def test_paths_of_the_file_system(files: GCSFileSystem) -> None:
    assert files.concat_path("/base/path", "file.txt") == Path("/base/path/file.txt")
    assert files.concat_path(Path("/base/path"), "file.txt") == Path("/base/path/file.txt")
    path = Path("/some/path")
    assert files.init_path(path) is path
    assert files.init_path("/some/path") == path
    files.mkdir(f"gs://{BUCKET_NAME}/folder")
    assert not files.exists(f"gs://{BUCKET_NAME}/folder")
    assert GCSFileSystem.validate_checkpoint_id(Path("any"))
    assert GCSFileSystem.validate_checkpoint_id(f"gs://{BUCKET_NAME}")


@pytest.mark.parametrize("path", ["bucket/file", Path("bucket/file")])
def test_paths_without_a_scheme_are_errors(files: GCSFileSystem, path: Any) -> None:
    for call in (files.exists, files.rm_file, lambda p: files.rename(p, p)):
        with pytest.raises(ValueError, match="does not begin with gs://"):
            call(path)
    with pytest.raises(ValueError, match="does not begin with gs://"), files.create_stream(path, "wb"):
        pass
    with pytest.raises(ValueError, match="does not begin with gs://"):
        GCSFileSystem.validate_checkpoint_id(str(path))


def test_rename_stays_in_its_bucket(files: GCSFileSystem) -> None:
    with pytest.raises(errors.ConfigError, match="from bucket bkt to bucket other"):
        files.rename(f"gs://{BUCKET_NAME}/a", "gs://other/a")


def test_debug_prints_each_stream(
    client: storage.Client, environment: Emulator, capsys: pytest.CaptureFixture[str]
) -> None:
    files = GCSFileSystem(project_name=PROJECT_NAME, debug=True, storage_client=client)
    with files.create_stream(f"gs://{BUCKET_NAME}/file", "wb") as stream:
        stream.write(b"abc")
    assert capsys.readouterr().out == "Creating Stream, Write Mode: Rank: 0 Bucket: bkt path: file\n"
