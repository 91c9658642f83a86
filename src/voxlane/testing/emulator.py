"""Start and control an emulator in a separate process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

from voxlane.testing.access import Access
from voxlane.testing.counters import Counters
from voxlane.testing.faults import Faults

_SEND_BYTES = 64 << 20
_ADMIN_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_REQUIRED = ("aiohttp", "google_crc32c")


class EmulatorError(RuntimeError):
    """Raised when the emulator does not start or rejects an administrative request."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that was neither completed nor aborted."""

    upload_id: str
    key: str
    parts: Mapping[int, int]
    """Size in bytes of each part, by part number."""


class Emulator:
    """An in-memory object store that serves S3, the GCS XML API and the GCS JSON API on one port.

    It runs in a separate process, which exits when :meth:`stop` is called or when this process exits in any way.
    Methods may be called from several threads. They are not counted as requests and not subject to faults::

        with Emulator() as emulator:
            emulator.create_bucket("b")
            store = S3Store("b", endpoint=emulator.url, ...)
    """

    def __init__(self, *, latency_s: float = 0.0, access: Access | None = None, port: int = 0) -> None:
        """Store the settings; :meth:`start` starts the process.

        ``latency_s``: delay of every response in seconds, until :meth:`set_faults`. ``port``: 0 chooses a free port.
        """
        self._faults = Faults(latency_s=latency_s)
        self._access = access or Access()
        self._requested_port = port
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the process and return once it accepts connections."""
        if self._process is not None:
            raise EmulatorError("The emulator is already started; call stop() first")
        missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
        if missing:
            raise EmulatorError(
                f"The emulator needs {' and '.join(missing)}, not installed: pip install 'voxlane[testing]'"
            )
        command = [sys.executable, "-m", "voxlane.testing", "--port", str(self._requested_port)]
        # The package must be importable even if it is not installed.
        python_path = filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")])
        # A new process, not a fork: the caller may have threads and clients that do not survive one.
        self._process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(python_path)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("http://"):
            code = self._process.wait()
            self._release()
            raise EmulatorError(f"The emulator did not start (exit status {code}); its error output says why")
        self._port = int(line.strip().rpartition(":")[2])
        self.clear_faults()
        self.set_access(self._access)
        return self

    def stop(self) -> None:
        """Stop the process and discard all objects; do nothing if it is not running."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._release()

    def _release(self) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process, self._port = None, 0

    @property
    def url(self) -> str:
        """Endpoint for every dialect, ``http://127.0.0.1:PORT``."""
        self._check_running()
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._check_running().pid

    def _check_running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise EmulatorError("The emulator is not running; call start() or use it in a with statement")
        return self._process

    # Content

    def create_bucket(self, bucket: str) -> None:
        """Create an empty bucket; do nothing if it exists."""
        self._request("PUT", "bucket", bucket=bucket)

    def put(self, bucket: str, key: str, data: bytes, *, storage_class: str = "") -> None:
        """Store one object; its storage class is by default that of the bucket, which is STANDARD unless changed."""
        self.put_many(bucket, {key: data}, storage_class=storage_class)

    def put_many(self, bucket: str, contents: Mapping[str, bytes], *, storage_class: str = "") -> None:
        """Store objects by key, with one request per 64 MiB."""
        ends = accumulate(map(len, contents.values()))
        for _, group in groupby(zip(contents, ends, strict=True), lambda item: item[1] // _SEND_BYTES):
            keys = [key for key, _ in group]
            header = json.dumps([[key, len(contents[key])] for key in keys]).encode()
            body = b"".join([header, b"\n", *map(contents.__getitem__, keys)])
            self._request("POST", "objects", body, bucket=bucket, storage_class=storage_class)

    def get(self, bucket: str, key: str) -> bytes:
        """Return the content of an object; raise KeyError if it does not exist."""
        return self._request("GET", "object", bucket=bucket, key=key)

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the keys that start with ``prefix`` in UTF-8 order; raise KeyError if there is no such bucket."""
        keys: list[str] = json.loads(self._request("GET", "objects", bucket=bucket, prefix=prefix))
        return keys

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object; raise KeyError if it does not exist."""
        self._request("DELETE", "object", bucket=bucket, key=key)

    def fill(
        self,
        bucket: str,
        count: int,
        *,
        key: str = "img-{:08d}.bin",
        size_bytes: int = 0,
        first: int = 0,
        like: str | None = None,
    ) -> int:
        """Store ``count`` synthetic objects without holding their contents; return ``count``.

        ``key`` is a format string for the numbers ``[first, first + count)``. The content of each object is
        ``synthetic(key, size_bytes)``, generated when it is read. Unless they are empty, such objects have no
        checksums and an opaque ETag; use :meth:`put_many` if a client should verify them.

        ``like``: key of an object of the bucket whose content and checksums they have instead. They share its memory,
        and keep it if that object is replaced or removed; raise KeyError if it does not exist.
        """
        query: dict[str, Any] = {"bucket": bucket, "count": count, "key": key, "size_bytes": size_bytes, "first": first}
        return int(self._request("POST", "fill", **query, like=like or ""))

    def uploads(self, bucket: str) -> list[OpenUpload]:
        """Return the open multipart uploads of a bucket, oldest first."""
        uploads = json.loads(self._request("GET", "uploads", bucket=bucket))
        return [OpenUpload(upload["upload_id"], upload["key"], dict(upload["parts"])) for upload in uploads]

    def wipe(self) -> None:
        """Remove all buckets and objects, but keep faults, access settings and counters."""
        self._request("POST", "wipe")

    # Behaviour

    def set_faults(self, faults: Faults) -> None:
        """Replace the faults and delays for future requests; restart seeds and ``fail_next``."""
        self._request("PUT", "faults", json.dumps(asdict(faults)).encode())

    def faults(self) -> Faults:
        """Return the current faults and delays."""
        return Faults(**json.loads(self._request("GET", "faults")))

    def clear_faults(self) -> None:
        """Remove all faults and restore the ``latency_s`` that the emulator was created with."""
        self.set_faults(self._faults)

    def set_access(self, access: Access) -> None:
        """Replace the required credentials and denied permissions; ``Access()`` accepts every request."""
        self._request("PUT", "access", json.dumps(asdict(access), default=sorted).encode())

    def counters(self) -> Counters:
        """Return the counters since the start or the last reset."""
        return Counters.from_json(json.loads(self._request("GET", "counters")))

    def reset_counters(self) -> None:
        """Reset all counters to zero."""
        self._request("DELETE", "counters")

    def _request(self, method: str, op: str, body: bytes | None = None, **query: str | int) -> bytes:
        self._check_running()
        # A new connection per request: callers are threads and forked workers, and loopback connections are cheap.
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_ADMIN_TIMEOUT_S)
        try:
            connection.request(method, f"/_emulator/{op}?{urlencode(query)}", body)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status >= 400:
            message = json.loads(data)["error"]["message"]
            raise KeyError(message) if response.status == 404 else EmulatorError(f"{method} {op}: {message}")
        return data
