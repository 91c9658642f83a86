"""The emulator's HTTP server: reads requests, meets them with faults, has a dialect answer, counts.

Built on aiohttp's low-level server. Answers are written to the transport as one header block and a list of
views, because aiohttp's own response costs as much as everything else together.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from voxlane.testing import json_api, refusals, xml_api
from voxlane.testing.access import check_access_key, check_bearer, check_permission
from voxlane.testing.admin import Admin
from voxlane.testing.calls import Call, sort_call
from voxlane.testing.counters import Injected, Ledger
from voxlane.testing.envelopes import batch_reply, split_batch
from voxlane.testing.faults import UNHARMED, Fate
from voxlane.testing.json_api import JsonApi
from voxlane.testing.objects import Objects
from voxlane.testing.refusals import RefusedError
from voxlane.testing.replies import Chunk, Reply, unchunked
from voxlane.testing.xml_api import XmlApi

# From this size on, hashing a body in a thread (hashlib lets go of the GIL) beats stopping all other
# connections.
_HASH_IN_THREAD_BYTES = 1 << 20
_PACED_CHUNK_BYTES = 64 << 10
_STALL_CHECK_S = 0.1
_READ_BUFFER_BYTES = 4 << 20
_MAX_LINE_BYTES = 64 << 10


class Outgoing(web.StreamResponse):
    """Writes a :class:`Reply` to the connection, harmed as its fate demands."""

    def __init__(self, reply: Reply, fate: Fate, ledger: Ledger | None) -> None:
        super().__init__(status=reply.status)
        self._reply = reply
        self._fate = fate
        self._ledger = ledger
        self._stay = True
        self.bytes_out = 0

    @property
    def keep_alive(self) -> bool | None:
        return self._stay

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to do for aiohttp: :meth:`send` came before."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""

    async def send(self, request: web.BaseRequest) -> None:
        """Hand the answer to the connection."""
        transport = request.transport
        self._stay = request.keep_alive
        if transport is None or transport.is_closing():
            self._stay = False
            return
        head = self._reply.wire_head(self._stay)
        if self._fate is UNHARMED:
            self.bytes_out = self._reply.length if self._reply.chunks else 0
            transport.writelines([head, *self._reply.chunks])
        else:
            await self._harmed(transport, head)

    async def _harmed(self, transport: asyncio.Transport, head: bytes) -> None:
        fate, chunks = self._fate, self._reply.chunks
        size = sum(map(len, chunks))
        if fate.cut:
            self._note("cut")
            # Half of the body, or nothing at all of an answer that has none: the client learns no outcome.
            await self._paced(transport, [head, *_first_bytes(chunks, size // 2)] if size else [])
            self.bytes_out = size // 2
            self._stay = False
            _reset(transport)
            return
        if fate.truncate and size:
            self._note("truncate")
            await self._paced(transport, [head, *_first_bytes(chunks, size // 2)])
            self.bytes_out = size // 2
            self._stay = False
            return
        if fate.stall_s:
            self._note("stall")
            transport.write(head)
            await _stalled(transport, fate.stall_s)
            head = b""
        await self._paced(transport, [head, *chunks])
        self.bytes_out = size

    async def _paced(self, transport: asyncio.Transport, chunks: Sequence[Chunk]) -> None:
        """Write, no faster than the connection's own cap and the one it shares with others."""
        rate, link = self._fate.bandwidth_bytes_per_s, self._fate.link
        if not rate and link is None:
            if not transport.is_closing():
                transport.writelines(chunks)
            return
        loop = asyncio.get_running_loop()
        begin_s, sent = loop.time(), 0
        if link is not None:
            link.join()
        try:
            for piece in _pieces(chunks):
                sent += len(piece)
                if rate:
                    await asyncio.sleep(begin_s + sent / rate - loop.time())
                if link is not None:
                    # Also when there is nothing to wait for: the others' turns come while this one sleeps.
                    await asyncio.sleep(link.turn(len(piece)))
                if transport.is_closing():
                    return
                transport.write(piece)
        finally:
            if link is not None:
                link.leave()

    def _note(self, fault: Injected) -> None:
        if self._ledger is not None:
            self._ledger.inject(fault)


async def _stalled(transport: asyncio.Transport, stall_s: float) -> None:
    """Wait, but not for a client that has left: its request would count as in progress until the end."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + stall_s
    while loop.time() < end_s and not transport.is_closing():
        await asyncio.sleep(min(_STALL_CHECK_S, max(0.0, end_s - loop.time())))


def _reset(transport: asyncio.Transport) -> None:
    """Close with a TCP reset, as a crashed server or a broken network does, instead of an orderly end."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _pieces(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
    """The same bytes in pieces that are small enough to take turns with others'."""
    for chunk in chunks:
        for start in range(0, len(chunk), _PACED_CHUNK_BYTES):
            yield chunk[start : start + _PACED_CHUNK_BYTES]


def _first_bytes(chunks: Sequence[Chunk], count: int) -> list[Chunk]:
    kept: list[Chunk] = []
    for chunk in chunks:
        if count <= 0:
            break
        kept.append(chunk[:count])
        count -= len(chunk)
    return kept


class Emulation:
    """All state of one emulator and the path of a request through it."""

    def __init__(self, base_url: str) -> None:
        self.objects = Objects()
        self.ledger = Ledger()
        self.admin = Admin(self.objects, self.ledger)
        self._xml = XmlApi(self.objects)
        self._json = JsonApi(self.objects, base_url)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            call = sort_call(request.method, request.raw_path, request.headers)
        except RefusedError as refused:
            lost = Call("s3", "unknown", "other", request.method, "", "", {}, request.headers)
            return await _sent(request, xml_api.error_reply(refused, lost))
        if call.dialect == "admin":
            call.body = await _body(request)
            return await _sent(request, self._admin_reply(call))
        return await self._handle_counted(request, call)

    async def _handle_counted(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        ledger, kind = self.ledger, call.kind
        ledger.begin(kind)
        status, bytes_in, outgoing = 0, 0, None
        try:
            detail = call.headers.get("Range", "") or call.arg("partNumber")
            prefix = call.key or (call.arg("prefix") if kind == "list" else "")
            fate = self.admin.dice.roll(kind, call.bucket, prefix, detail)
            refused: RefusedError | None = None
            if request.body_exists:
                try:
                    call.body = await _body(request)
                except RefusedError as bad_body:
                    refused = bad_body
                bytes_in = len(call.body)
                if bytes_in >= _HASH_IN_THREAD_BYTES and (kind == "put" or call.dialect == "s3"):
                    await _hash_in_thread(call)
            delay_s = fate.delay_s
            if bytes_in and fate.bandwidth_bytes_per_s:
                delay_s += bytes_in / fate.bandwidth_bytes_per_s
            if delay_s:
                await asyncio.sleep(delay_s)
            if fate.throttled:
                ledger.inject("throttle")
                refused = refusals.throttled(call.dialect)
            elif fate.error_status:
                ledger.inject("error")
                refused = refusals.injected(fate.error_status)
            reply = self._error_reply(call, refused) if refused else self.reply(call)
            status = reply.status
            outgoing = Outgoing(reply, fate, ledger)
            # Written here rather than by aiohttp, so that a request counts as in progress until its last byte
            # is handed over, and bytes are known when it ends.
            await outgoing.send(request)
            return outgoing
        finally:
            ledger.end(kind, status, bytes_in, outgoing.bytes_out if outgoing else 0)

    def reply(self, call: Call) -> Reply:
        """Check credentials and permissions and carry out the call."""
        try:
            self._check_access(call)
            if call.op == "batch":
                return self._batch(call)
            return self._json.answer(call) if call.dialect == "json" else self._xml.answer(call)
        except RefusedError as refused:
            return self._error_reply(call, refused)

    def _batch(self, call: Call) -> Reply:
        answers: list[tuple[str, Reply]] = []
        for each in split_batch(call.body, call.headers.get("Content-Type", "")):
            headers = {name.title(): value for name, value in each.headers.items()}
            inner = sort_call(each.method, each.target, {"Authorization": _authorization(call)} | headers)
            inner.body = each.body
            reply = self.reply(inner)
            self.ledger.inner(inner.kind, reply.status)
            answers.append((each.content_id, reply))
        return batch_reply(answers)

    def _check_access(self, call: Call) -> None:
        access = self.admin.access
        self._json.access = access
        authorization = _authorization(call)
        if call.dialect == "s3" and not (access.bearer_token and not access.access_key_id and not authorization):
            check_access_key(access, _access_key_id(authorization, call))
        else:
            # Also an anonymous XML request where only a token is configured: it could be of either service,
            # and must not get in by saying nothing.
            check_bearer(access, authorization)
        if access.denied_permissions:
            check_permission(access, call.kind)

    def _error_reply(self, call: Call, refused: RefusedError) -> Reply:
        if call.dialect == "json":
            return json_api.error_reply(refused, call)
        return xml_api.error_reply(refused, call)

    def _admin_reply(self, call: Call) -> Reply:
        try:
            return self.admin.answer(call)
        except RefusedError as refused:
            return json_api.error_reply(refused, call)
        except (ValueError, KeyError, TypeError, IndexError) as bad:
            return json_api.error_reply(refusals.invalid(f"{type(bad).__name__}: {bad}"), call)


async def _sent(request: web.BaseRequest, reply: Reply) -> Outgoing:
    """An answer that is neither counted nor harmed."""
    outgoing = Outgoing(reply, UNHARMED, None)
    await outgoing.send(request)
    return outgoing


async def _body(request: web.BaseRequest) -> bytes:
    """The whole body, without aws-chunked framing."""
    headers = request.headers
    if "Expect" in headers and request.transport is not None:
        # boto3 waits a second for this before it sends a body.
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        body = await request.content.read()
    except ConnectionResetError:
        raise refusals.invalid("The connection was lost before the whole body came", "IncompleteBody") from None
    framed = headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
    if framed or "aws-chunked" in headers.get("Content-Encoding", ""):
        return unchunked(body)
    return body


async def _hash_in_thread(call: Call) -> None:
    digest = await asyncio.get_running_loop().run_in_executor(None, hashlib.md5, call.body)
    call.know_md5(digest.digest())


def _authorization(call: Call) -> str:
    return call.headers.get("Authorization", "")


def _access_key_id(authorization: str, call: Call) -> str:
    """The access key id of a signed S3 request, from its header or its presigned query; "" when anonymous."""
    _, _, credential = authorization.partition("Credential=")
    # boto3 still presigns with version 2, which names the key differently.
    return (credential or call.arg("X-Amz-Credential")).partition("/")[0] or call.arg("AWSAccessKeyId")


async def serve(sock: socket.socket, emulation: Emulation) -> asyncio.Server:
    """Start serving on a bound socket."""
    server = web.Server(
        emulation.handle,
        access_log=None,
        auto_decompress=False,
        read_bufsize=_READ_BUFFER_BYTES,
        max_line_size=_MAX_LINE_BYTES,
        max_field_size=_MAX_LINE_BYTES,
    )
    # What exists now lives as long as the process, and requests make few cycles: collect seldom.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    loop = asyncio.get_running_loop()
    return await loop.create_server(cast("type[asyncio.Protocol]", server), sock=sock, backlog=1024)
