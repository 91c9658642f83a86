"""HTTP server of the emulator: read requests, inject faults, let a dialect respond, and count.

It uses the low-level server of aiohttp. Responses are written to the transport as one header block and a list of views,
because the response class of aiohttp costs as much as all the rest.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from voxlane.testing import errors, json_api, xml_api
from voxlane.testing.access import check_access
from voxlane.testing.admin import Admin
from voxlane.testing.counters import RequestRecorder
from voxlane.testing.errors import RequestError
from voxlane.testing.faults import NO_FAULT, FaultDecision
from voxlane.testing.json_api import JsonApi
from voxlane.testing.multipart import build_batch_response, split_batch
from voxlane.testing.objects import ObjectStore
from voxlane.testing.request_parsing import ApiRequest, parse_request
from voxlane.testing.responses import Chunk, Response, decode_aws_chunked
from voxlane.testing.scope import check_scope
from voxlane.testing.xml_api import XmlApi, needs_part_md5

# From this size on, bodies are hashed in a thread (hashlib releases the GIL), to not block other connections.
_HASH_IN_THREAD_BYTES = 1 << 20
_PACED_CHUNK_BYTES = 64 << 10
_STALL_CHECK_S = 0.1
_READ_BUFFER_BYTES = 4 << 20
_MAX_LINE_BYTES = 64 << 10


class ServerResponse(web.StreamResponse):
    """Write a :class:`Response` to the connection with the faults that were decided."""

    def __init__(self, response: Response, decision: FaultDecision, recorder: RequestRecorder) -> None:
        super().__init__(status=response.status)
        self._response = response
        self._decision = decision
        self._recorder = recorder
        self._keep_connection = True
        self.bytes_out = 0

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection stays open after this response."""
        return self._keep_connection

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Do nothing, because :meth:`send` has written the response."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing, because :meth:`send` has written the response."""

    async def send(self, request: web.BaseRequest) -> None:
        """Write the response to the connection."""
        transport = request.transport
        self._keep_connection = request.keep_alive
        if transport is None or transport.is_closing():
            self._keep_connection = False
            return
        head = self._response.encode_head(self._keep_connection)
        if self._decision is NO_FAULT:
            length, chunks = self._response.length, self._response.chunks
            self.bytes_out = 0 if not chunks else sum(map(len, chunks)) if length < 0 else length
            transport.writelines([head, *chunks])
        else:
            await self._send_with_fault(transport, head)

    async def _send_with_fault(self, transport: asyncio.Transport, head: bytes) -> None:
        decision, chunks = self._decision, self._response.chunks
        size = sum(map(len, chunks))
        if decision.cut or (decision.truncate and size):
            self._recorder.inject("cut" if decision.cut else "truncate")
            # Half of the body, or nothing of a response without one, so that the client does not learn the result.
            await self._send_paced(transport, [head, b"".join(chunks)[: size // 2]] if size else [])
            self.bytes_out = size // 2
            self._keep_connection = False
            if decision.cut:
                _reset_connection(transport)
            return
        if decision.stall_s:
            self._recorder.inject("stall")
            transport.write(head)
            await _stall(transport, decision.stall_s)
            head = b""
        await self._send_paced(transport, [head, *chunks])
        self.bytes_out = size

    async def _send_paced(self, transport: asyncio.Transport, chunks: Sequence[Chunk]) -> None:
        """Write within the limits of the connection and of the shared link."""
        rate, link = self._decision.bandwidth_bytes_per_s, self._decision.link
        if not rate and link is None:
            if not transport.is_closing():
                transport.writelines(chunks)
            return
        loop = asyncio.get_running_loop()
        begin_s, sent = loop.time(), 0
        if link is not None:
            link.join()
        try:
            for piece in _split_chunks(chunks):
                sent += len(piece)
                if rate:
                    await asyncio.sleep(begin_s + sent / rate - loop.time())
                if link is not None:
                    # Also without a delay, so that other responses get their turns.
                    await asyncio.sleep(link.reserve(len(piece)))
                if transport.is_closing():
                    return
                transport.write(piece)
        finally:
            if link is not None:
                link.leave()


async def _stall(transport: asyncio.Transport, stall_s: float) -> None:
    """Wait while the client is connected; otherwise its request would count as in progress until the end."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + stall_s
    while loop.time() < end_s and not transport.is_closing():
        await asyncio.sleep(min(_STALL_CHECK_S, max(0.0, end_s - loop.time())))


def _reset_connection(transport: asyncio.Transport) -> None:
    """Close the connection with a TCP reset, like a crashed server or a broken network."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _split_chunks(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the bytes in pieces that are small enough to take turns with other responses."""
    for chunk in chunks:
        for start in range(0, len(chunk), _PACED_CHUNK_BYTES):
            yield chunk[start : start + _PACED_CHUNK_BYTES]


class EmulatorServer:
    """State of an emulator, and the path of a request through it."""

    def __init__(self, base_url: str) -> None:
        self.objects = ObjectStore()
        self.recorder = RequestRecorder()
        self.admin = Admin(self.objects, self.recorder)
        self._xml = XmlApi(self.objects)
        self._json = JsonApi(self.objects, base_url)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request."""
        try:
            anonymous_dialect = self.admin.access.anonymous_dialect
            api_request = parse_request(request.method, request.raw_path, request.headers, anonymous_dialect)
        except RequestError as error:
            unparsed = ApiRequest("s3", "unknown", "other", request.method, "", "", {}, request.headers)
            return await self._send_plain(request, xml_api.build_error_response(error, unparsed))
        if api_request.dialect == "admin":
            api_request.body = await _read_body(request)
            return await self._send_plain(request, self._handle_admin(api_request))
        return await self._handle_counted(request, api_request)

    async def _send_plain(self, request: web.BaseRequest, response: Response) -> ServerResponse:
        """Send a response without counters and faults."""
        outgoing = ServerResponse(response, NO_FAULT, self.recorder)
        await outgoing.send(request)
        return outgoing

    async def _handle_counted(self, request: web.BaseRequest, api_request: ApiRequest) -> web.StreamResponse:
        recorder, kind = self.recorder, api_request.kind
        recorder.begin(kind)
        status, bytes_in, outgoing = 0, 0, None
        try:
            detail = api_request.headers.get("Range", "") or api_request.param("partNumber")
            prefix = api_request.key or (api_request.param("prefix") if kind == "list" else "")
            decision = self.admin.injector.decide(kind, api_request.bucket, prefix, detail)
            error: RequestError | None = None
            if request.body_exists:
                try:
                    api_request.body = await _read_body(request)
                except RequestError as invalid_body:
                    error = invalid_body
                bytes_in = len(api_request.body)
                if bytes_in >= _HASH_IN_THREAD_BYTES and (kind == "put" or needs_part_md5(api_request)):
                    await asyncio.get_running_loop().run_in_executor(None, api_request.md5)
            delay_s = decision.delay_s
            if bytes_in and decision.bandwidth_bytes_per_s:
                delay_s += bytes_in / decision.bandwidth_bytes_per_s
            if delay_s:
                await asyncio.sleep(delay_s)
            if decision.throttled:
                recorder.inject("throttle")
                error = errors.throttled(api_request.dialect)
            elif decision.error_status:
                recorder.inject("error")
                error = errors.injected(decision.error_status)
            response = self._build_error_response(api_request, error) if error else self.respond(api_request)
            status = response.status
            outgoing = ServerResponse(response, decision, recorder)
            # Written here rather than by aiohttp, so that a request counts as in progress until its last byte is
            # written, and the number of bytes is known at its end.
            await outgoing.send(request)
            return outgoing
        finally:
            recorder.end(kind, status, bytes_in, outgoing.bytes_out if outgoing else 0)

    def respond(self, api_request: ApiRequest) -> Response:
        """Check credentials and permissions, and execute the request."""
        try:
            self._json.access = self.admin.access
            check_access(self.admin.access, api_request)
            check_scope(api_request)
            if api_request.op == "batch":
                return self._batch(api_request)
            return self._json.handle(api_request) if api_request.dialect == "json" else self._xml.handle(api_request)
        except RequestError as error:
            return self._build_error_response(api_request, error)

    def _batch(self, api_request: ApiRequest) -> Response:
        responses: list[tuple[str, Response]] = []
        for content_id, batched in split_batch(api_request):
            response = self.respond(batched)
            self.recorder.record_batched(batched.kind, response.status)
            responses.append((content_id, response))
        return build_batch_response(responses)

    def _build_error_response(self, api_request: ApiRequest, error: RequestError) -> Response:
        if error.status == 304:
            return Response(304)
        if api_request.dialect in ("json", "admin"):
            return json_api.build_error_response(error)
        return xml_api.build_error_response(error, api_request)

    def _handle_admin(self, api_request: ApiRequest) -> Response:
        try:
            return self.admin.handle(api_request)
        except RequestError as error:
            return self._build_error_response(api_request, error)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return self._build_error_response(api_request, errors.invalid(f"{type(error).__name__}: {error}"))


async def _read_body(request: web.BaseRequest) -> bytes:
    """Return the body, decoded from aws-chunked."""
    headers = request.headers
    if "Expect" in headers and request.transport is not None:
        # boto3 waits a second for this before it sends the body.
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        body = await request.content.read()
    except ConnectionResetError:
        raise errors.invalid("The connection was lost before the complete body arrived", "IncompleteBody") from None
    framed = headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
    if framed or "aws-chunked" in headers.get("Content-Encoding", ""):
        return decode_aws_chunked(body)
    return body


async def serve(sock: socket.socket, emulator: EmulatorServer) -> asyncio.Server:
    """Start serving on a bound socket."""
    server = web.Server(
        emulator.handle,
        access_log=None,
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
        max_line_size=_MAX_LINE_BYTES,
        max_field_size=_MAX_LINE_BYTES,
    )
    # Existing objects live as long as the process, and requests create few cycles, so collect rarely.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    loop = asyncio.get_running_loop()
    return await loop.create_server(cast("type[asyncio.Protocol]", server), sock=sock, backlog=1024)
