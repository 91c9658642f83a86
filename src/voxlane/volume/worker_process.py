"""A process that makes calls for this one and can be ended: for work on files that may hang, crash or need too much
memory."""

from __future__ import annotations

import contextlib
import pickle
import signal
from collections.abc import Callable
from typing import Any

from voxlane.errors import VolumeError
from voxlane.processes import SupervisedContext, ignore_stop_signals
from voxlane.sizes import format_bytes
from voxlane.temporary import mark_children
from voxlane.volume.memory import limit_memory

_START_TIMEOUT_S = 300.0
"""Seconds after which a process that does not start is given up; importing the package takes long on a busy machine."""


_END_TIMEOUT_S = 10.0
"""Seconds after which an idle process that does not end is killed."""


class WorkerTimeoutError(VolumeError):
    """Raised when a call took too long; its process was ended."""


class WorkerCrashError(VolumeError):
    """Raised when a process ended during a call."""


class WorkerMemoryError(VolumeError):
    """Raised when a call needed more memory than it may use."""


class WorkerProcess:
    """A process that makes one call at a time. After a call that takes too long or ends the process, the next call
    starts another one. Not for several threads at once."""

    def __init__(self, initializer: Callable[[], None] | None = None, memory_bytes: int = 0) -> None:
        """Prepare a process without starting it. `initializer` runs in the process first; `memory_bytes` limits what a
        call may allocate (0: no limit)."""
        self._initializer = initializer
        self._memory_bytes = memory_bytes
        self._process: Any = None
        self._connection: Any = None
        self._is_ended = False

    def start(self) -> None:
        """Start the process in the background, if it does not run."""
        if self._is_ended:
            raise WorkerCrashError("its process was ended")
        if self._process is not None:
            return
        # Spawned, not forked, because this process's connections would not survive a fork.
        mark_children()
        context = SupervisedContext()
        self._connection, remote = context.Pipe()
        arguments = (remote, self._initializer, self._memory_bytes)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        self._process = process
        remote.close()  # so that the end of the process closes the connection

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
        """Return what `function(*arguments)` returns in the process, or raise what it raises.

        Raises WorkerTimeoutError after `timeout_s` seconds, WorkerMemoryError if it needs too much memory, and
        WorkerCrashError if the process ends. Starting the process does not count.
        """
        try:
            self.start()
            self._connection.send((function, arguments))
            self._wait(_START_TIMEOUT_S)
            self._connection.recv()
            self._wait(timeout_s)
            outcome, value = self._receive()
        except (EOFError, OSError):
            process = self._process
            process.join(10)
            code = process.exitcode
            self.close()
            raise WorkerCrashError(_describe_end(code)) from None
        except BaseException:  # such as KeyboardInterrupt: the answer of this call must not become that of the next
            if self._process is not None:
                self._process.kill()
            self.close()
            raise
        if outcome == "memory":
            self.close()  # what libraries hold after a failed allocation is not known
            raise WorkerMemoryError(f"it needs more than {format_bytes(self._memory_bytes)} of memory")
        if outcome == "error":
            raise value
        return value

    def kill(self) -> None:
        """End the process for good, also during a call of another thread, which then raises WorkerCrashError."""
        self._is_ended = True
        process = self._process
        if process is not None:
            with contextlib.suppress(ValueError):  # the other thread has closed it
                process.kill()

    def close(self) -> None:
        """End the process between calls; the next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            self._connection.close()  # upon which it ends, and removes its semaphores
            process.join(_END_TIMEOUT_S)
            process.kill()
            process.join()
            process.close()

    def _wait(self, timeout_s: float) -> None:
        if not self._connection.poll(timeout_s):
            raise WorkerTimeoutError(f"it took more than {timeout_s:.0f} s")

    def _receive(self) -> Any:
        """Receive a result whose arrays follow it without being copied."""
        body, sizes = self._connection.recv()
        buffers = [bytearray(size) for size in sizes]
        for buffer in buffers:
            self._connection.recv_bytes_into(buffer)
        return pickle.loads(body, buffers=buffers)  # only of our own process


def _serve(connection: Any, initializer: Callable[[], None] | None, memory_bytes: int) -> None:
    """Make calls until the other end of the connection is closed."""
    ignore_stop_signals()
    if initializer is not None:
        initializer()
    is_limited = False
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            function, arguments = connection.recv()
            connection.send("started")
            if memory_bytes and not is_limited:  # what the modules of the function take does not count
                limit_memory(memory_bytes)
                is_limited = True
            _send(connection, *_call(function, arguments))


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "result", function(*arguments)
    except MemoryError:
        return "memory", None
    except Exception as error:  # noqa: BLE001 - a process's boundary: the caller raises it
        if isinstance(error, RuntimeError) and "allocate" in str(error):  # torch has no type for it
            return "memory", None
        return "error", error


def _send(connection: Any, outcome: str, value: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps((outcome, value), protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    connection.send((body, [view.nbytes for view in views]))
    for view in views:
        connection.send_bytes(view)


def _describe_end(exit_code: int | None) -> str:
    if exit_code == -signal.SIGKILL:
        return "its process was killed, most likely because memory ran out"
    if exit_code is not None and exit_code < 0:
        return f"its process crashed ({signal.Signals(-exit_code).name})"
    return f"its process ended with status {exit_code}"
