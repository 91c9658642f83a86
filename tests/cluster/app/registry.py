"""An in-memory image registry on a free port: the part of the OCI distribution API that push and inspect need."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Registry:
    """The images that were pushed."""

    address: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Media type and content of manifests, by NAME:TAG and NAME:DIGEST."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    puts: int = 0
    """Number of manifests that were pushed."""


@contextmanager
def serving() -> Iterator[Registry]:
    """Serve a registry until the block ends."""
    registry = Registry()

    class Handler(_Handler):
        state = registry

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Registry
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/v2/(.+)/blobs/(.+)", path):
            blob = self.state.blobs.get(match[2])
            self._answer(404) if blob is None else self._answer(200, blob, Docker_Content_Digest=match[2])
        elif match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", path):
            kind, body = self.state.manifests.get(f"{match[1]}:{match[2]}", ("", b""))
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            self._answer(200, body, Content_Type=kind, Docker_Content_Digest=digest) if kind else self._answer(404)
        else:
            self._answer(200, b"{}", Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._body()
        upload = secrets.token_hex(8)
        self.state.uploads[upload] = b""
        self._answer(202, Location=f"{self.path.partition('?')[0].rstrip('/')}/{upload}", Docker_Upload_UUID=upload)

    def do_PATCH(self) -> None:
        upload = self.path.partition("?")[0].rsplit("/", 1)[1]
        self.state.uploads[upload] += self._body()
        size = len(self.state.uploads[upload])
        self._answer(202, Location=self.path.partition("?")[0], Range=f"0-{size - 1}", Docker_Upload_UUID=upload)

    def do_PUT(self) -> None:
        path, _, query = self.path.partition("?")
        body = self._body()
        if match := re.fullmatch(r"/v2/(.+)/manifests/(.+)", path):
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            for name in (match[2], digest):
                self.state.manifests[f"{match[1]}:{name}"] = (self.headers["Content-Type"], body)
            self.state.puts += 1
            self._answer(201, Location=path, Docker_Content_Digest=digest)
            return
        content = self.state.uploads.pop(path.rsplit("/", 1)[1]) + body
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if digest != query.removeprefix("digest=").replace("%3A", ":"):
            self._answer(400)
            return
        self.state.blobs[digest] = content
        self._answer(201, Location=path, Docker_Content_Digest=digest)
