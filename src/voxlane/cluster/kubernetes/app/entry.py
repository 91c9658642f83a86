"""The first process of a training container: it runs the command, prints its output and archives it in a bucket.

As process 1 it forwards signals, which the kernel does not deliver to a process 1 without handlers, and reaps processes
whose parents ended before them.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from types import FrameType

from voxlane.cluster.kubernetes.app.log_archive import LogArchiver
from voxlane.redaction import Redactor

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_READ_BYTES = 64 * 1024
_QUIET_S = 0.2
_DRAIN_S = 2.0
"""How long, after the command has ended, processes that it left behind may continue to print."""
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1  # prctl(2)
_MODULES = {"voxlane": "voxlane", "torchrun": "voxlane.cluster.torchrun"}


def run(command: Sequence[str], secrets: Collection[bytes] = (), archiver: LogArchiver | None = None) -> int:
    """Run `command` to its end and return its exit status: 128+n if signal n ended it, 127 if there is no such program.
    Must be called from the main thread, before other threads are started."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(read_end, False)
    before = {number: signal.signal(number, _ignore) for number in (*_FORWARDED_SIGNALS, signal.SIGCHLD)}
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        return _Container(command, secrets, archiver, read_end).run()
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal's number arrives through the wake-up pipe."""


class _Container:
    def __init__(
        self, command: Sequence[str], secrets: Collection[bytes], archiver: LogArchiver | None, signals: int
    ) -> None:
        self._command = _resolve(command)
        self._redactors = {1: Redactor(secrets), 2: Redactor(secrets)}
        self._archiver = archiver
        self._signals = signals
        self._status: int | None = None
        self._stop_signal = ""

    def run(self) -> int:
        failure = None
        try:
            self._process = self._start()
        except OSError as error:
            failure = error
        if self._archiver is not None:
            self._archiver.start()  # after the fork, which must happen before there are threads
        if failure is not None:
            self._print(2, f"voxlane: {self._command[0]}: cannot be run: {failure.strerror}\n".encode())
            return 127 if isinstance(failure, FileNotFoundError) else 126
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with self._process.stdout as out, self._process.stderr as err, selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ, 0)
            selector.register(out, selectors.EVENT_READ, 1)
            selector.register(err, selectors.EVENT_READ, 2)
            self._relay(selector)
        for stream, redactor in self._redactors.items():
            self._print(stream, redactor.finish())
        assert self._status is not None
        if self._archiver is not None and self._status:
            after = f" after {self._stop_signal}" if self._stop_signal else ""
            self._archiver.note(f"voxlane: the command ended with {_describe_status(self._status)}{after}")
        return self._status

    def _start(self) -> subprocess.Popen[bytes]:
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        if libc:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that this also works if another process is process 1
        return subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C of a terminal then reaches only this process, and the command gets it once.
            start_new_session=True,
            # Without a container around it, the command must not outlive a killed parent.
            preexec_fn=(lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)) if libc else None,
        )

    def _relay(self, selector: selectors.BaseSelector) -> None:
        """Relay output and signals until the command has ended and nothing more is printed."""
        ended_at = 0.0
        while self._status is None or len(selector.get_map()) > 1:
            ready = selector.select(_QUIET_S if ended_at else None)
            for key, _ in ready:
                if key.data == 0:
                    self._handle_signals()
                elif data := os.read(key.fd, _READ_BYTES):
                    self._print(key.data, self._redactors[key.data].feed(data))
                else:
                    selector.unregister(key.fileobj)
            if self._status is not None:
                ended_at = ended_at or time.monotonic()
                if not ready or time.monotonic() - ended_at > _DRAIN_S:
                    return

    def _handle_signals(self) -> None:
        for number in os.read(self._signals, 1024):
            if number == signal.SIGCHLD:
                self._reap()
            elif self._status is None:
                self._process.send_signal(number)
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stop_signal = signal.Signals(number).name
                if self._archiver is not None:
                    self._archiver.urge()

    def _reap(self) -> None:
        """Take the status of every child that has ended, including orphaned descendants."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._process.pid:
                code = os.waitstatus_to_exitcode(status)
                self._process.returncode = code
                self._status = 128 - code if code < 0 else code

    def _print(self, stream: int, data: bytes) -> None:
        if not data:
            return
        if self._archiver is not None:
            self._archiver.add(stream, data)
        remaining = memoryview(data)
        while remaining:
            try:
                remaining = remaining[os.write(stream, remaining) :]
            except BlockingIOError:
                with selectors.DefaultSelector() as selector:
                    selector.register(stream, selectors.EVENT_WRITE)
                    selector.select()
            except OSError:
                return  # nobody reads the stream any more; the command continues


def _resolve(command: Sequence[str]) -> list[str]:
    """Return the command; voxlane and torchrun of this Python, or if there are none on the PATH, run as its modules."""
    first, *rest = command
    if first in _MODULES and shutil.which(first) in (None, os.path.join(os.path.dirname(sys.executable), first)):
        return [sys.executable, "-m", _MODULES[first], *rest]
    return [first, *rest]


def _describe_status(status: int) -> str:
    name = {128 + number: number.name for number in signal.Signals}.get(status, "")
    memory = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return f"status {status}" + (f" ({name}{memory})" if name else "")
