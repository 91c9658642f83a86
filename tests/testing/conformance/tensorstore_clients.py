"""Operations of tensorstore, which reads the endpoint of GCS from the environment when it is first used.

Each operation therefore runs in a process of its own: ``python -m tests.testing.conformance.tensorstore_clients``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .registry import Client, Server, operation

Spec = dict[str, Any]


@contextmanager
def _connect_gcs(server: Server) -> Iterator[tuple[Spec, dict[str, str]]]:
    environment = {"TENSORSTORE_GCS_HTTP_URL": server.url, "TENSORSTORE_GOOGLE_AUTH_TOKEN_FOR_TESTING": "fake"}
    yield {"driver": "gcs", "bucket": server.bucket}, environment


@contextmanager
def _connect_s3(server: Server) -> Iterator[tuple[Spec, dict[str, str]]]:
    keys = {"AWS_ACCESS_KEY_ID": server.access_key_id, "AWS_SECRET_ACCESS_KEY": server.secret_access_key}
    spec = {"driver": "s3", "bucket": server.bucket, "endpoint": server.url, "aws_region": "us-east-1"}
    yield spec | {"aws_credentials": {"type": "environment"}}, keys


BOTH = (Client("tensorstore", "gcs", _connect_gcs), Client("tensorstore", "s3", _connect_s3))
STEPS: dict[str, Callable[[Spec], None]] = {}


def _in_own_process(name: str) -> Callable[[Callable[[Spec], None]], Callable[[Spec], None]]:
    """Register the decorated function as an operation that runs in another process."""

    def register(steps: Callable[[Spec], None]) -> Callable[[Spec], None]:
        STEPS[name] = steps

        @operation(name, *BOTH)
        def run(connection: tuple[Spec, dict[str, str]]) -> None:
            spec, environment = connection
            command = [sys.executable, "-W", "error", "-m", __name__, name, json.dumps(spec)]
            result = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
            )
            assert result.returncode == 0, result.stderr

        return steps

    return register


def _open_keys(spec: Spec) -> Any:
    import tensorstore

    return tensorstore.KvStore.open(spec).result()


@_in_own_process("write, read, delete")
def write_and_read(spec: Spec) -> None:
    keys = _open_keys(spec)
    keys.write("a/b c", b"content").result()
    assert keys.read("a/b c").result().value == b"content"
    keys.write("a/b c", None).result()
    assert keys.read("a/b c").result().state == "missing"


@_in_own_process("list with a prefix and a delimiter")
def list_keys(spec: Spec) -> None:
    import tensorstore

    keys = _open_keys(spec)
    for name in ("a", "d/1", "d/e/2", "f"):
        keys.write(name, b"x").result()
    assert sorted(keys.list().result()) == [b"a", b"d/1", b"d/e/2", b"f"]
    assert sorted(keys.list(tensorstore.KvStore.KeyRange("d/", "d0")).result()) == [b"d/1", b"d/e/2"]
    keys.delete_range(tensorstore.KvStore.KeyRange("d/", "d0")).result()
    assert sorted(keys.list().result()) == [b"a", b"f"]


@_in_own_process("conditional write")
def write_conditionally(spec: Spec) -> None:
    keys = _open_keys(spec)
    absent = keys.read("k").result().stamp.generation
    first = keys.write("k", b"1", if_equal=absent).result().generation
    assert keys.write("k", b"2", if_equal=absent).result().generation != first
    assert keys.read("k").result().value == b"1"
    keys.write("k", b"3", if_equal=first).result()
    assert keys.read("k").result().value == b"3"


@_in_own_process("conditional read")
def read_conditionally(spec: Spec) -> None:
    keys = _open_keys(spec)
    generation = keys.write("k", b"1").result().generation
    assert keys.read("k", if_not_equal=generation).result().state == "unspecified"
    keys.write("k", b"2").result()
    assert keys.read("k", if_not_equal=generation).result().value == b"2"


@_in_own_process("zarr array")
def write_zarr(spec: Spec) -> None:
    import numpy
    import tensorstore

    array_spec = {"driver": "zarr3", "kvstore": spec | {"path": "array/"}}
    metadata = {
        "shape": [40, 30],
        "data_type": "uint16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [16, 16]}},
    }
    written = tensorstore.open(array_spec | {"metadata": metadata}, create=True).result()
    values = numpy.arange(1200, dtype="uint16").reshape(40, 30)
    written.write(values).result()
    written[10:20, 5:25].write(values[10:20, 5:25] + 1).result()
    values[10:20, 5:25] += 1
    assert (tensorstore.open(array_spec, open=True).result().read().result() == values).all()


if __name__ == "__main__":
    STEPS[sys.argv[1]](json.loads(sys.argv[2]))
