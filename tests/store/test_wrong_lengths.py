"""Servers whose responses do not have the length or range that was requested: an error or the right bytes."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from voxlane import RetryConfig, Store, StoreConfig, errors
from voxlane.dataset.reading import ObjectReader
from voxlane.store.listing import Entry

BODY = bytes(range(256)) * 40
START, STOP = 100, 5000


class _Server(http.server.ThreadingHTTPServer):
    """Answers every GET with a part of `BODY`, in the way that `fault` says; the first `num_faults` ones only."""

    fault = ""
    num_faults = 10**9
    num_requests = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.num_requests += 1
        fault = self.server.fault if self.server.num_requests <= self.server.num_faults else ""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(match[1]), int(match[2] or len(BODY) - 1) + 1) if match else (0, len(BODY))
        data, size = BODY[start:stop], stop - start
        content_range = f"bytes {start}-{stop - 1}/{len(BODY)}"
        if fault in ("body too short", "length too small", "chunked"):
            data = data[:-10]
        if fault in ("body too long", "length too large"):
            data += b"x" * 10
        if fault == "other range":
            content_range = f"bytes {start + 1}-{stop}/{len(BODY)}"
        if fault == "smaller range":
            data, size, content_range = data[:-10], size - 10, f"bytes {start}-{stop - 11}/{len(BODY)}"
        if fault == "whole object":
            data, size, match = BODY, len(BODY), None
        self.send_response(206 if match else 200)
        if match and fault != "no range":
            self.send_header("Content-Range", content_range)
        if fault == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        elif fault != "no length":
            self.send_header("Content-Length", str(len(data) if fault.startswith("length") else size))
        self.send_header("ETag", '"tag"')
        self.send_header("x-goog-generation", "1")
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _store(server: _Server, scheme: str, deadline_s: float) -> Store:
    config = StoreConfig(
        endpoint=f"http://127.0.0.1:{server.server_port}",
        access_key_id="k",
        secret_access_key="s",
        retry=RetryConfig(deadline_s=deadline_s, initial_delay_s=0.01),
    )
    return Store(f"{scheme}://bkt", config)


def _read_range(store: Store) -> bytes:
    return bytes(store.get("k", START, STOP))


def _read_into(store: Store) -> bytes:
    target = np.zeros(STOP - START, np.uint8)
    store.get_into("k", START, target)
    return target.tobytes()


_FAULTS = {
    "body too short": "the connection failed",
    "length too small": "got 4890 of 4900 bytes",
    "length too large": "got 4910 of 4900 bytes",
    "other range": "the response is not the requested range",
    "smaller range": "the response is not the requested range",
    "whole object": "the response is not the requested range",
    "no range": "the response is not the requested range",
}


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("read", [_read_range, _read_into])
@pytest.mark.parametrize("fault", _FAULTS)
def test_wrong_response_to_a_range_is_fetched_again(server: _Server, scheme: str, read: Any, fault: str) -> None:
    server.fault, server.num_faults = fault, 2
    assert read(_store(server, scheme, deadline_s=60)) == BODY[START:STOP]
    assert server.num_requests == 3
    server.num_faults = 10**9
    with pytest.raises(errors.UnavailableError, match=rf"{scheme}://bkt/k: {_FAULTS[fault]}.* attempt"):
        read(_store(server, scheme, deadline_s=0.1))


@pytest.mark.parametrize("fault", ["no length", "chunked"])
@pytest.mark.parametrize("read", [_read_range, _read_into, lambda store: store.get("k")])
def test_response_without_a_length_is_an_error(server: _Server, read: Any, fault: str) -> None:
    server.fault = fault
    with pytest.raises(errors.StoreError, match=r"gs://bkt/k: the response has no Content-Length"):
        read(_store(server, "gs", deadline_s=60))


def test_bytes_after_the_announced_length_are_ignored(server: _Server) -> None:
    server.fault = "body too long"
    store = _store(server, "gs", deadline_s=60)
    assert bytes(store.get("k")) == BODY
    assert _read_into(store) == BODY[START:STOP]


@pytest.mark.parametrize("fault", ["length too small", "length too large"])
def test_sample_of_another_size_than_listed_is_an_error(server: _Server, fault: str) -> None:
    server.fault = fault
    pending = ObjectReader(_store(server, "gs", deadline_s=60)).submit([Entry("k", len(BODY), '"tag"', "1")])
    with pytest.raises(errors.ChangedError, match=r"gs://bkt/k.*listed with 10240 bytes"):
        pending[0].result()
