"""Plain HTTP requests: how responses are parsed, with servers that send exactly the given bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from voxlane.errors import ConfigError
from voxlane.store import StoreConfig
from voxlane.store.http import HttpPool
from voxlane.store.translate import TransientError

Serve = Callable[[bytes], tuple[HttpPool, list[bytes]]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that send the same bytes for each request; `serve(answer)` returns a client of one, and the
    requests that it receives."""
    with contextlib.ExitStack() as stack:

        def start(answer: bytes) -> tuple[HttpPool, list[bytes]]:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            requests: list[bytes] = []

            def run() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        with connection:
                            while request := connection.recv(65536):
                                requests.append(request)
                                connection.sendall(answer)
                                if b"close" in answer or b"HTTP/1.0" in answer:
                                    break

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            return HttpPool(f"http://127.0.0.1:{listener.getsockname()[1]}", StoreConfig(read_timeout_s=5)), requests

        yield start


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200\r\ncontent-length:5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello", b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
def test_bodies_end_where_the_header_says(serve: Serve, answer: bytes, body: bytes) -> None:
    pool, _ = serve(answer)
    for _ in range(3):  # the second request uses the connection of the first, unless it was closed
        with pool.request("GET", "/b/k", {}, uri="gs://b/k") as response:
            assert response.read() == body


def test_headers_are_found_by_their_lower_case_name_and_joined(serve: Serve) -> None:
    lines = b'X-Goog-Hash: crc32c=AAAA\r\nETag:\t"a:b" \r\nx-goog-hash: md5=BBBB\r\n'
    pool, _ = serve(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + lines + b"\r\n")
    with pool.request("GET", "/b/k", {}, uri="gs://b/k") as response:
        assert response.headers["x-goog-hash"] == "crc32c=AAAA, md5=BBBB"
        assert response.headers["etag"] == '"a:b"'


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 okay\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300 + b"\r\n",
    ],
)
def test_a_server_that_speaks_no_http_is_a_transient_error(serve: Serve, answer: bytes) -> None:
    pool, _ = serve(answer)
    with (
        pytest.raises(TransientError, match="the connection failed"),
        pool.request("GET", "/b/k", {}, uri="gs://b/k"),
    ):
        pass


@pytest.mark.parametrize("header", [b"Transfer-Encoding: chunked", b"Connection: close", b"Content-Length: 100000"])
def test_slow_bodies_end_in_an_error(header: bytes) -> None:
    piece = b"1\r\nx\r\n" if b"chunked" in header else b"x"

    def run() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n")
            for _ in range(400):
                connection.sendall(piece)
                time.sleep(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        pool = HttpPool(f"http://127.0.0.1:{listener.getsockname()[1]}", StoreConfig(read_timeout_s=0.5))
        started_s = time.monotonic()
        with (
            pytest.raises(TransientError, match="too slow"),
            pool.request("GET", "/b/k", {}, uri="gs://b/k") as response,
        ):
            response.read()
        assert time.monotonic() - started_s < 5
        thread.join()


def test_endpoints_of_other_schemes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ftp://127.0.0.1: the endpoint must start with http:// or https://"):
        HttpPool("ftp://127.0.0.1", StoreConfig())


def test_requests_carry_host_length_and_the_given_headers(serve: Serve) -> None:
    pool, requests = serve(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    with pool.request("PUT", "/b/k?x=1", {"accept-encoding": "gzip"}, b"", uri="gs://b/k") as response:
        response.read()
    head = requests[0].decode().lower()
    assert head.startswith("put /b/k?x=1 http/1.1\r\nhost: 127.0.0.1:")
    assert "\r\ncontent-length: 0\r\n" in head
    assert head.count("accept-encoding") == 1
    with (
        pytest.raises(ConfigError, match="line break"),
        pool.request("GET", "/b/k", {"Authorization": "Bearer a\r\nX-Other: b"}, uri="gs://b/k"),
    ):
        pass
    assert len(requests) == 1


def test_user_and_password_of_a_url_are_a_header_and_no_host(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were once looked up as a part of the server's name, for the whole deadline of retries."""
    pool, requests = serve(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    host, port = pool.address
    url = f"http://me:p%40ss@{host}:{port}"
    own: dict[str, str] = {"Authorization": "own"}
    for headers, expected in ((dict[str, str](), b"Authorization: Basic bWU6cEBzcw=="), (own, b"Authorization: own")):
        with HttpPool(url, StoreConfig()).request("GET", "/k", headers, uri="gs://b/k") as response:
            response.read()
        assert expected in requests[-1]
        assert requests[-1].count(b"Authorization") == 1
        assert f"Host: {host}:{port}\r\n".encode() in requests[-1]
    monkeypatch.setenv("http_proxy", url)
    monkeypatch.setenv("no_proxy", "")
    with HttpPool("http://server.test", StoreConfig()).request("GET", "/k", {}, uri="gs://b/k") as response:
        response.read()
    assert requests[-1].startswith(b"GET http://server.test/k HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic bWU6cEBzcw==" in requests[-1]
