"""Processes that end with the process that started them, whatever ends it, and names by which their files are told
from those of processes that still run.

The kernel sends a child SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG). The request is made in the
child, so the parent may have ended before: the child then ends itself. Where the thread may end before its process, or
another process started the child (multiprocessing's forkserver), the child watches the parent from a thread instead.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import multiprocessing.process
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)
_POLL_S = 0.5
_STATUS_OF_ORPHAN = 1


@dataclass(frozen=True)
class ProcessId:
    """A process, which no later process can be mistaken for."""

    pid: int
    started: int
    """When it started, in clock ticks since the machine did; 0 where the system does not tell."""
    scope: str
    """Digest of the boot and the pid namespace in which `pid` and `started` count."""

    @classmethod
    def current(cls) -> ProcessId:
        """Return the identity of this process."""
        return cls(os.getpid(), _read_start(os.getpid()) or 0, read_scope())

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Return the process that `str` wrote as `text`; None for any other text."""
        pid, _, rest = text.partition("-")
        started, _, scope = rest.partition("-")
        return cls(int(pid), int(started), scope) if pid.isdecimal() and started.isdecimal() and scope else None

    def __str__(self) -> str:
        return f"{self.pid}-{self.started}-{self.scope}"

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended. Of a process of another machine or container, nothing is
        known."""
        if self.scope != read_scope() or not self.started:
            return False
        started = _read_start(self.pid)
        return started != self.started and (started is not None or not _exists(self.pid))


@functools.cache
def read_scope() -> str:
    """Return a digest of what makes process ids unique: the machine's boot and this process's pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
    except OSError:
        return "unknown"


def _read_start(pid: int) -> int | None:
    """Return when a process started; None if it has ended, or if the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> bool:
    """Return whether there is a process, possibly one that /proc hides because it is another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return os.path.exists("/proc/self/stat") and not os.path.exists(f"/proc/{pid}/stat")


# -- children that end with their parent -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parent:
    """The process, and kind of thread, that starts a child."""

    process: ProcessId
    is_main_thread: bool
    """Whether the thread that starts the child lives as long as its process."""

    @classmethod
    def current(cls) -> Parent:
        """Return this process and thread."""
        return cls(ProcessId.current(), threading.current_thread() is threading.main_thread())


def end_with_parent(parent: Parent) -> None:
    """Let the kernel end this process when `parent` ends. Called in the child as early as possible."""
    if os.getppid() == parent.process.pid and parent.is_main_thread and _request_death_signal():
        if os.getppid() != parent.process.pid:  # it ended before the request
            os._exit(_STATUS_OF_ORPHAN)
        return
    if parent.process.has_ended():  # at once: a thread might have to wait while this one imports torch
        os._exit(_STATUS_OF_ORPHAN)
    threading.Thread(target=_watch, args=(parent.process,), name="voxlane-parent", daemon=True).start()


def end_with_launcher() -> None:
    """Let the kernel end this process when the program that started it ends, from its main thread, as torchrun does."""
    _request_death_signal()


def _request_death_signal() -> bool:
    return sys.platform == "linux" and int(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)) == 0


def _watch(process: ProcessId) -> None:
    """End this process once `process` has ended."""
    is_child = os.getppid() == process.pid
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # another system, or it has ended
        while not process.has_ended() and (not is_child or os.getppid() == process.pid):
            time.sleep(_POLL_S)
    else:
        if not process.has_ended():  # else the handle may be that of a later process with the same id
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            poller.poll()
    os._exit(_STATUS_OF_ORPHAN)


def make_death_hook() -> Callable[[], None]:
    """Return a `preexec_fn` for subprocess.Popen, with which the program is killed when this process ends. Call it and
    Popen in the main thread."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: a forked child must not load anything
    parent = os.getpid()

    def request() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(_STATUS_OF_ORPHAN)

    return request


class SupervisedProcess(SpawnProcess):
    """A spawned process that ends with its parent from before its target is imported, which may take seconds.

    Like a forked process, it ends without dismantling the interpreter: that unwinds threads of torch and gloo which
    still run, and std::terminate then ends a process whose work is done with SIGABRT.
    """

    def start(self) -> None:
        """Start the process. Ctrl-C reaches all processes of a terminal, and this one would print a traceback if it
        still imports its target: its parent, which ends it, handles it alone."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        status: int = super()._bootstrap(parent_sentinel=parent_sentinel)  # type: ignore[misc]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # nobody reads, or they are closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)

    def __reduce__(self) -> Any:
        return _rebuild_process, (Parent.current(), bytes(ForkingPickler.dumps(self.__dict__)))


def _rebuild_process(parent: Parent, state: bytes) -> SupervisedProcess:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    process = SupervisedProcess.__new__(SupervisedProcess)
    process.__dict__.update(ForkingPickler.loads(state))
    return process


class SupervisedContext(SpawnContext):
    """multiprocessing's `spawn` with processes that end with their parent."""

    Process = SupervisedProcess


def ignore_stop_signals() -> None:
    """Ignore Ctrl-C and SIGTERM, which may reach all processes of a job: the parent handles them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def init_loader_worker(parent: Parent, init: Callable[[int], None] | None, worker: int) -> None:
    """Set up a worker of torch's DataLoader: it ends with its parent, and by SIGTERM only if the parent sent it.

    A job's SIGTERM reaches workers too. It must not end them, because the parent trains on until it has saved.
    """
    end_with_parent(parent)
    if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, args=(os.getppid(),), name="voxlane-sigterm", daemon=True).start()
    if init is not None:
        init(worker)


def _end_when_told(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def mark_multiprocessing_files(folder: str | None) -> None:
    """Let multiprocessing put this process's identity into the names of the semaphores that it and its children create,
    and their sockets into `folder`. It has no public way to set either."""
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/voxlane-{ProcessId.current()}"
    if folder is not None:
        config["tempdir"] = folder
