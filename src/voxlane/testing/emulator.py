"""A handle on an emulator that runs as a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from voxlane.testing import bodies
from voxlane.testing.access import Access
from voxlane.testing.counters import Counters
from voxlane.testing.faults import Faults

_SEND_BYTES = 64 << 20
_ADMIN_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0
_REQUIRED = ("aiohttp", "google_crc32c")


class EmulatorError(RuntimeError):
    """The emulator did not start, or refused an administrative request."""


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """A multipart upload that was neither completed nor aborted."""

    upload_id: str
    key: str
    parts: Mapping[int, int]
    """Size in bytes of each part, by part number."""


class Emulator:
    """An object store in memory that speaks S3, the GCS XML API and the GCS JSON API on one port.

    It runs in a separate process, which ends when :meth:`stop` is called or when this process ends, however
    it ends. Methods may be called from several threads; none of them counts as a request or meets faults::

        with Emulator() as emulator:
            emulator.create_bucket("b")
            store = S3Store("b", endpoint=emulator.url, ...)
    """

    def __init__(self, *, latency_s: float = 0.0, access: Access | None = None, port: int = 0) -> None:
        """Remember the settings; nothing starts before :meth:`start`.

        ``latency_s``: delay of every answer in seconds, until :meth:`set_faults`. ``port`` 0: any free port.
        """
        self._faults = Faults(latency_s=latency_s)
        self._access = access or Access()
        self._wanted_port = port
        self._process: subprocess.Popen[str] | None = None
        self._port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        command = [sys.executable, "-m", "voxlane.testing", "--port", str(self._wanted_port)]
        # A new process, never a fork: the caller may hold threads and clients that do not survive one.
        self._process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_child_environment(),
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
        """End the process and forget all objects. Does nothing when it is not running."""
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
        """``http://127.0.0.1:PORT``, the endpoint for every dialect."""
        if self._port == 0:
            raise EmulatorError("The emulator is not running; call start() or use it in a with statement")
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Process id of the server, for measuring it."""
        if self._process is None:
            raise EmulatorError("The emulator is not running; call start() or use it in a with statement")
        return self._process.pid

    # Content

    def create_bucket(self, bucket: str) -> None:
        """Make an empty bucket; one that exists is left as it is."""
        self._ask("PUT", "bucket", {"bucket": bucket})

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store one object."""
        self.put_many(bucket, {key: data})

    def put_many(self, bucket: str, contents: Mapping[str, bytes]) -> None:
        """Store objects by key, in few requests."""
        for group in _groups(contents):
            header = json.dumps([[key, len(contents[key])] for key in group]).encode()
            self._ask(
                "POST",
                "objects",
                {"bucket": bucket},
                b"".join([header, b"\n", *map(contents.__getitem__, group)]),
            )

    def get(self, bucket: str, key: str) -> bytes:
        """The content of an object; KeyError when there is none."""
        return self._ask("GET", "object", {"bucket": bucket, "key": key})

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """All keys that start with ``prefix``, ascending by UTF-8 bytes; KeyError when there is no such
        bucket."""
        found: list[str] = json.loads(self._ask("GET", "objects", {"bucket": bucket, "prefix": prefix}))
        return found

    def delete(self, bucket: str, key: str) -> None:
        """Remove an object; KeyError when there is none."""
        self._ask("DELETE", "object", {"bucket": bucket, "key": key})

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
        """Store ``count`` synthetic objects, cheaply; returns ``count``.

        ``key`` is a format with one place, for the numbers ``[first, first + count)``. The content of each is
        ``synthetic(key, size_bytes)``, made when it is read. Unless they are empty, such objects state no
        checksums (their ETag is opaque); use :meth:`put_many` where a client should verify.

        ``like``: the key of an object of the bucket whose content they have instead, with its checksums. They share
        its memory, and keep it when that object is replaced or removed; KeyError when there is none.
        """
        order = {"bucket": bucket, "count": count, "key": key, "size_bytes": size_bytes, "first": first, "like": like}
        filled: int = json.loads(self._ask("POST", "fill", {}, json.dumps(order).encode()))
        return filled

    @staticmethod
    def synthetic(key: str, size_bytes: int) -> bytes:
        """The content that :meth:`fill` gives to ``key``."""
        return bodies.synthetic(key, size_bytes)

    def uploads(self, bucket: str) -> list[OpenUpload]:
        """The multipart uploads of a bucket that are still open, oldest first."""
        found = json.loads(self._ask("GET", "uploads", {"bucket": bucket}))
        return [
            OpenUpload(each["upload_id"], each["key"], {int(n): size for n, size in each["parts"].items()})
            for each in found
        ]

    def wipe(self) -> None:
        """Remove all buckets and objects. Faults, access and counters stay."""
        self._ask("POST", "wipe")

    # Behaviour

    def set_faults(self, faults: Faults) -> None:
        """Replace the faults and delays for requests that arrive from now on; seeds and ``fail_next`` start
        anew."""
        self._ask("PUT", "faults", {}, json.dumps(faults.to_json()).encode())

    def faults(self) -> Faults:
        """The faults and delays in force."""
        return Faults.from_json(json.loads(self._ask("GET", "faults")))

    def clear_faults(self) -> None:
        """Go back to what the emulator was started with: no faults, and its ``latency_s``."""
        self.set_faults(self._faults)

    def set_access(self, access: Access) -> None:
        """Replace the credentials asked for and the permissions denied. ``Access()`` accepts everything."""
        self._ask("PUT", "access", {}, json.dumps(access.to_json()).encode())

    def counters(self) -> Counters:
        """What was counted since the start or the last reset."""
        return Counters.from_json(json.loads(self._ask("GET", "counters")))

    def reset_counters(self) -> None:
        """Count from zero again."""
        self._ask("DELETE", "counters")

    def _ask(self, method: str, op: str, query: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
        if self._port == 0:
            raise EmulatorError("The emulator is not running; call start() or use it in a with statement")
        # A connection for each request: callers are many threads and forked workers, and a loopback one is
        # cheap.
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_ADMIN_TIMEOUT_S)
        try:
            connection.request(method, f"/_emulator/{op}?{urlencode(query or {})}", body or None)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status == 404:
            raise KeyError(_message(data))
        if response.status >= 400:
            raise EmulatorError(f"{method} {op}: {_message(data)}")
        return data


def _message(data: bytes) -> str:
    value: Any = json.loads(data)
    return str(value["error"]["message"])


def _groups(contents: Mapping[str, bytes]) -> Iterator[list[str]]:
    """Keys in groups whose contents fit one request."""
    group: list[str] = []
    size = 0
    for key, data in contents.items():
        if group and size + len(data) > _SEND_BYTES:
            yield group
            group, size = [], 0
        group.append(key)
        size += len(data)
    if group:
        yield group


def _child_environment() -> dict[str, str]:
    """This process's environment, with the package importable even when it is not installed."""
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([package_root, inherited] if inherited else [package_root])}
