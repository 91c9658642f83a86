"""``python -m voxlane.testing``: run the emulator in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import NoReturn

from voxlane.errors import ConfigError
from voxlane.sizes import parse_bytes
from voxlane.testing.access import Access
from voxlane.testing.faults import FaultInjector, Faults

_PARENT_CHECK_S = 1.0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}. See: {self.prog} --help\n")


def _parse_arguments(argv: Sequence[str] | None, program: str) -> argparse.Namespace:
    parser = _Parser(prog=program, description="An object store in memory.")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 (default) chooses a free port")
    parser.add_argument("--bucket", action="append", default=[], help="bucket to create; may be repeated")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="delay of every response, in milliseconds")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="maximum random delay in addition (ms)")
    parser.add_argument("--bandwidth", type=_size, default=0, help="bytes per second per connection, such as 100MB")
    parser.add_argument("--total-bandwidth", type=_size, default=0, help="bytes per second of all responses together")
    parser.add_argument("--requests-per-s", type=float, default=0.0, help="refuse requests above this rate")
    parser.add_argument("--bearer-token", help="token that GCS requests must have")
    parser.add_argument("--access-key-id", help="access key that S3 requests must be signed with")
    # Set by the Emulator class: exit with that process, and print only the URL.
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        arguments.faults = Faults(
            latency_s=arguments.latency_ms / 1000,
            jitter_s=arguments.jitter_ms / 1000,
            bandwidth_bytes_per_s=arguments.bandwidth,
            total_bandwidth_bytes_per_s=arguments.total_bandwidth,
            requests_per_s=arguments.requests_per_s,
        )
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _size(text: str) -> int:
    try:
        return parse_bytes(text.removesuffix("B"))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 100MB or 1GiB") from error


async def _serve(arguments: argparse.Namespace) -> None:
    # Imported here, so that a missing aiohttp is reported by main().
    from voxlane.testing.server import EmulatorServer, serve

    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", arguments.port))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = EmulatorServer(url)
    server.admin.injector = FaultInjector(arguments.faults)
    server.admin.access = Access(bearer_token=arguments.bearer_token, access_key_id=arguments.access_key_id)
    for bucket in arguments.bucket:
        server.objects.create(bucket, exist_ok=True)
    await serve(sock, server)
    print(url, flush=True)
    if arguments.parent:
        await _wait_for_parent(arguments.parent)
        return
    print(f"export STORAGE_EMULATOR_HOST={url}\nexport AWS_ENDPOINT_URL={url}", flush=True)
    await asyncio.Event().wait()


async def _wait_for_parent(parent: int) -> None:
    """Return when standard input closes or the parent has exited.

    Two signs, because a forked child of the parent keeps the pipe open after the parent died.
    """
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), closed.set)
    while not closed.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(closed.wait(), _PARENT_CHECK_S)
        except TimeoutError:
            continue


def main(argv: Sequence[str] | None = None, *, program: str = "python -m voxlane.testing") -> None:
    """Serve until interrupted, or until the parent exits; `program` is the name of the command in usage errors."""
    arguments = _parse_arguments(argv, program)
    try:
        import aiohttp  # noqa: F401
        import google_crc32c  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"The emulator needs {error.name}: pip install 'voxlane[testing]'") from None
    run: Callable[[Coroutine[None, None, None]], None] = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        run = uvloop.run
    try:
        run(_serve(arguments))
    except KeyboardInterrupt:
        pass
    except (OSError, OverflowError) as error:
        raise SystemExit(
            f"The emulator cannot serve on port {arguments.port}: {str(error).rstrip('.')}. Choose another --port"
        ) from None
    # Freeing a million keys one by one at exit would take seconds for nothing.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
