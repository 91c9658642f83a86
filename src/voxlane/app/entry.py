"""The first process of a training container: runs the command, passes its output on, and keeps it in a bucket.

As process 1 it hands signals on, which the kernel keeps from a process 1 that does not ask for them, and takes care of
processes whose parents ended before them.
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

from voxlane.app.hidden import Hider
from voxlane.app.kept import Keeper

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_READ_BYTES = 64 * 1024
_QUIET_S = 0.2
_DRAIN_S = 2.0
"""How long, after the command's end, processes that it left behind may go on printing."""
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # prctl(2)
_MODULES = {"voxlane": "voxlane", "torchrun": "torch.distributed.run"}


def run(command: Sequence[str], secrets: Collection[bytes] = (), keeper: Keeper | None = None) -> int:
    """Run `command` to its end and return its exit status, 128+n if signal n ended it, 127 if there is no such
    program. Must be called from the main thread, before others are started."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    os.set_blocking(told, False)
    before = {number: signal.signal(number, _heard) for number in (*_FORWARDED, signal.SIGCHLD)}
    woken = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    try:
        return _Container(command, secrets, keeper, told).run()
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(told)
        os.close(tell)


def _heard(number: int, frame: FrameType | None) -> None:
    """Nothing: the number arrives through the wake-up pipe."""


class _Container:
    def __init__(self, command: Sequence[str], secrets: Collection[bytes], keeper: Keeper | None, told: int) -> None:
        self._command = _found(command)
        self._hiders = {1: Hider(secrets), 2: Hider(secrets)}
        self._keeper = keeper
        self._told = told
        self._status: int | None = None
        self._stopped = ""
        """The signal that told it to end."""

    def run(self) -> int:
        try:
            self._process = self._start()
        except OSError as error:
            return self._not_run(error)
        if self._keeper is not None:
            self._keeper.start()
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with self._process.stdout as out, self._process.stderr as err, selectors.DefaultSelector() as ready:
            ready.register(self._told, selectors.EVENT_READ, 0)
            ready.register(out, selectors.EVENT_READ, 1)
            ready.register(err, selectors.EVENT_READ, 2)
            self._pass_on(ready)
        for stream, hider in self._hiders.items():
            self._print(stream, hider.end())
        assert self._status is not None
        if self._keeper is not None and self._status:
            after = f" after {self._stopped}" if self._stopped else ""
            self._keeper.note(f"voxlane: the command ended with {_words(self._status)}{after}")
        return self._status

    def _not_run(self, error: OSError) -> int:
        if self._keeper is not None:
            self._keeper.start()
        self._print(2, f"voxlane: {self._command[0]}: cannot be run: {error.strerror}\n".encode())
        return 127 if isinstance(error, FileNotFoundError) else 126

    def _start(self) -> subprocess.Popen[bytes]:
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        if libc:
            libc.prctl(_SUBREAPER, 1)  # also where another process is the first one
        return subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A terminal's Ctrl-C then comes to this process only, and reaches the command once.
            start_new_session=True,
            # No threads run yet. Without a container around, the command must not outlive a killed parent.
            preexec_fn=(lambda: libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)) if libc else None,
        )

    def _pass_on(self, ready: selectors.BaseSelector) -> None:
        """Until the command has ended and nothing more is printed."""
        ended = 0.0
        while self._status is None or len(ready.get_map()) > 1:
            found = ready.select(_QUIET_S if ended else None)
            for key, _ in found:
                if key.data == 0:
                    self._signalled()
                elif data := os.read(key.fd, _READ_BYTES):
                    self._print(key.data, self._hiders[key.data].feed(data))
                else:
                    ready.unregister(key.fileobj)
            if self._status is not None:
                ended = ended or time.monotonic()
                if not found or time.monotonic() - ended > _DRAIN_S:
                    return

    def _signalled(self) -> None:
        for number in os.read(self._told, 1024):
            if number == signal.SIGCHLD:
                self._reap()
            elif self._status is None:
                self._process.send_signal(number)
            if number in (signal.SIGTERM, signal.SIGINT):
                self._stopped = signal.Signals(number).name
                if self._keeper is not None:
                    self._keeper.urge()

    def _reap(self) -> None:
        """Take the status of every process that has ended, ours or left to us."""
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
        if self._keeper is not None:
            self._keeper.add(stream, data)
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(stream, rest) :]
            except BlockingIOError:
                with selectors.DefaultSelector() as free:
                    free.register(stream, selectors.EVENT_WRITE)
                    free.select()
            except OSError:
                return  # nobody reads it any more; the command goes on, as it would under a shell that closed its log


def _found(command: Sequence[str]) -> list[str]:
    """The command; where voxlane or torchrun are not on the PATH, those of this Python."""
    first, *rest = command
    if first in _MODULES and shutil.which(first) is None:
        return [sys.executable, "-m", _MODULES[first], *rest]
    return [first, *rest]


def _words(status: int) -> str:
    try:
        name = signal.Signals(status - 128).name if status > 128 else ""
    except ValueError:
        name = ""
    return f"status {status}" + (
        f" ({name}{', perhaps for lack of memory' if name == 'SIGKILL' else ''})" if name else ""
    )
