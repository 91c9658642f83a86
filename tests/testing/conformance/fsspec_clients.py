"""Operations of gcsfs and s3fs, which have the interface of fsspec in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from .registry import Client, Server, operation

# gcsfs asks for buckets with a hierarchical namespace through gRPC otherwise, which only GCS has.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

BLOCK_BYTES = 5 << 20


@dataclass(frozen=True)
class BucketFolder:
    """A file system and the path of a bucket in it."""

    fs: Any
    path: str

    def __truediv__(self, name: str) -> str:
        return f"{self.path}/{name}"


@contextmanager
def _connect_gcsfs(server: Server) -> Iterator[BucketFolder]:
    from gcsfs.core import GCSFileSystem

    fs = GCSFileSystem(
        project="test", token="anon", endpoint_url=server.url, skip_instance_cache=True, use_listings_cache=False
    )
    yield BucketFolder(fs, server.bucket)
    if fs._session is not None:
        fs.close_session(fs.loop, fs._session)


@contextmanager
def _connect_s3fs(server: Server) -> Iterator[BucketFolder]:
    from s3fs import S3FileSystem

    fs = S3FileSystem(
        key=server.access_key_id,
        secret=server.secret_access_key,
        endpoint_url=server.url,
        client_kwargs={"region_name": "us-east-1"},
        skip_instance_cache=True,
        use_listings_cache=False,
    )
    yield BucketFolder(fs, server.bucket)
    fs.close_session(fs.loop, fs.s3)


GCSFS = Client("gcsfs", "gcs", _connect_gcsfs)
S3FS = Client("s3fs", "s3", _connect_s3fs)
BOTH = (GCSFS, S3FS)


@operation("write, read, delete", *BOTH)
def write_and_read(bucket: BucketFolder) -> None:
    bucket.fs.pipe_file(bucket / "a/b c", b"content")
    assert bucket.fs.cat_file(bucket / "a/b c") == b"content"
    assert bucket.fs.exists(bucket / "a/b c")
    bucket.fs.rm_file(bucket / "a/b c")
    assert not bucket.fs.exists(bucket / "a/b c")


@operation("read ranges", *BOTH)
def read_ranges(bucket: BucketFolder) -> None:
    bucket.fs.pipe({bucket / "a": b"0123456789", bucket / "b": b"abcdefghij"})
    assert bucket.fs.cat_file(bucket / "a", start=2, end=5) == b"234"
    assert bucket.fs.cat_file(bucket / "a", start=-3) == b"789"
    paths = [bucket / "a", bucket / "b", bucket / "a"]
    assert bucket.fs.cat_ranges(paths, [0, 1, 8], [2, 3, 10]) == [b"01", b"bc", b"89"]
    with bucket.fs.open(bucket / "a", "rb", block_size=4, cache_type="readahead") as source:
        source.seek(3)
        assert (source.read(4), source.read()) == (b"3456", b"789")


@operation("missing objects and buckets", *BOTH)
def report_missing(bucket: BucketFolder) -> None:
    for action in (bucket.fs.cat_file, bucket.fs.info, bucket.fs.ls):
        with pytest.raises(FileNotFoundError):
            action(bucket / "none")
    with pytest.raises(FileNotFoundError):
        bucket.fs.ls("no-such-bucket-here/none")


@operation("special characters in keys", *BOTH)
def use_special_keys(bucket: BucketFolder) -> None:
    names = sorted(["Ünï+cödé %", "𝄞#&", "quote'\"<>", "~tilde"], key=str.encode)
    for name in names:
        bucket.fs.pipe_file(bucket / name, name.encode())
    assert sorted(bucket.fs.find(bucket.path), key=str.encode) == [bucket / name for name in names]
    assert [bucket.fs.cat_file(bucket / name).decode() for name in names] == names


@operation("metadata resource", *BOTH)
def describe_object(bucket: BucketFolder) -> None:
    bucket.fs.pipe_file(bucket / "d/k", b"content")
    info = bucket.fs.info(bucket / "d/k")
    assert (info["name"], info["size"], info["type"]) == (bucket / "d/k", 7, "file")
    assert bucket.fs.info(bucket / "d")["type"] == "directory"
    assert bucket.fs.modified(bucket / "d/k").tzinfo is not None
    assert bucket.fs.ls(bucket / "d", detail=True)[0]["size"] == 7


@operation("change metadata", GCSFS)
def patch_metadata(bucket: BucketFolder) -> None:
    bucket.fs.pipe_file(bucket / "k", b"1")
    bucket.fs.setxattrs(bucket / "k", content_type="image/x", a="1")
    assert bucket.fs.getxattr(bucket / "k", "a") == "1"
    assert bucket.fs.info(bucket / "k")["contentType"] == "image/x"


@operation("resumable upload", GCSFS)
@operation("multipart upload", S3FS)
def write_in_blocks(bucket: BucketFolder) -> None:
    data = os.urandom(2 * BLOCK_BYTES + 17)
    with bucket.fs.open(bucket / "big", "wb", block_size=BLOCK_BYTES) as out:
        out.write(data[: BLOCK_BYTES + 1])
        out.write(data[BLOCK_BYTES + 1 :])
    assert bucket.fs.cat_file(bucket / "big") == data


@operation("transactions", *BOTH)
def commit_and_roll_back(bucket: BucketFolder) -> None:
    with bucket.fs.transaction:
        with bucket.fs.open(bucket / "small", "wb") as out:
            out.write(b"1")
        with bucket.fs.open(bucket / "big", "wb", block_size=BLOCK_BYTES) as out:
            out.write(bytes(BLOCK_BYTES + 1))
        assert not bucket.fs.exists(bucket / "big")
    assert bucket.fs.cat_file(bucket / "small") == b"1"
    assert bucket.fs.size(bucket / "big") == BLOCK_BYTES + 1
    with pytest.raises(ZeroDivisionError), bucket.fs.transaction:
        with bucket.fs.open(bucket / "discarded", "wb", block_size=BLOCK_BYTES) as out:
            out.write(bytes(BLOCK_BYTES + 1))
        _ = 1 / 0
    assert not bucket.fs.exists(bucket / "discarded")


@operation("copy and rewrite", *BOTH)
def copy(bucket: BucketFolder) -> None:
    bucket.fs.pipe_file(bucket / "a/1", b"1")
    bucket.fs.cp_file(bucket / "a/1", bucket / "copy")
    bucket.fs.cp(bucket / "a/", bucket / "b/", recursive=True)
    assert bucket.fs.find(bucket.path) == [bucket / "a/1", bucket / "b/1", bucket / "copy"]
    assert bucket.fs.cat_file(bucket / "b/1") == b"1"


@operation("move", *BOTH)
def move(bucket: BucketFolder) -> None:
    bucket.fs.pipe_file(bucket / "a/1", b"1")
    bucket.fs.mv(bucket / "a/1", bucket / "moved")
    assert bucket.fs.find(bucket.path) == [bucket / "moved"]
    assert bucket.fs.cat_file(bucket / "moved") == b"1"


@operation("move a folder", GCSFS)
def move_folder(bucket: BucketFolder) -> None:
    bucket.fs.pipe({bucket / "a/1": b"1", bucket / "a/b/2": b"2"})
    bucket.fs.mv(bucket / "a/", bucket / "c/", recursive=True)
    assert bucket.fs.find(bucket.path) == [bucket / "c/1", bucket / "c/b/2"]


@operation("conditional write", *BOTH)
def write_conditionally(bucket: BucketFolder) -> None:
    bucket.fs.pipe_file(bucket / "k", b"1", mode="create")
    with pytest.raises(OSError):  # noqa: PT011  gcsfs raises FileExistsError, s3fs an error without a type of its own
        bucket.fs.pipe_file(bucket / "k", b"2", mode="create")
    assert bucket.fs.cat_file(bucket / "k") == b"1"


@operation("generations", GCSFS)
def read_generations(bucket: BucketFolder) -> None:
    bucket.fs.pipe_file(bucket / "k", b"1")
    first = bucket.fs.info(bucket / "k")["generation"]
    bucket.fs.pipe_file(bucket / "k", b"2")
    assert int(bucket.fs.info(bucket / "k")["generation"]) > int(first)


@operation("batch delete", *BOTH)
def delete_recursively(bucket: BucketFolder) -> None:
    bucket.fs.pipe({bucket / name: b"x" for name in ("d/1", "d/e/2", "d/ü b", "remaining")})
    bucket.fs.rm(bucket / "d", recursive=True)
    assert bucket.fs.find(bucket.path) == [bucket / "remaining"]


@operation("list with a prefix and a delimiter", *BOTH)
def list_folders(bucket: BucketFolder) -> None:
    bucket.fs.pipe({bucket / name: b"x" for name in ("a", "d/1", "d/e/2", "f")})
    assert sorted(bucket.fs.ls(bucket.path, detail=False)) == [bucket / "a", bucket / "d", bucket / "f"]
    assert sorted(bucket.fs.ls(bucket / "d", detail=False)) == [bucket / "d/1", bucket / "d/e"]
    assert bucket.fs.find(bucket / "d") == [bucket / "d/1", bucket / "d/e/2"]
    assert bucket.fs.glob(bucket / "*/?") == [bucket / "d/1", bucket / "d/e"]
    assert [folder for folder, _, _ in bucket.fs.walk(bucket.path)] == [bucket.path, bucket / "d", bucket / "d/e"]


@operation("list in pages", GCSFS)
def list_pages(bucket: BucketFolder) -> None:
    names = [f"n/{number:04d}" for number in range(1001)]
    bucket.fs.pipe({bucket / name: b"" for name in names})
    assert bucket.fs.find(bucket / "n") == [bucket / name for name in names]


@operation("buckets", *BOTH)
def use_buckets(bucket: BucketFolder) -> None:
    bucket.fs.mkdir(f"{bucket.path}-other")
    assert f"{bucket.path}-other" in [name.strip("/") for name in bucket.fs.ls("", detail=False)]
    bucket.fs.rmdir(f"{bucket.path}-other")
    assert not bucket.fs.exists(f"{bucket.path}-other")
