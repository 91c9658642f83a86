"""Ranks as processes of this machine, for `train devices=N`. They end with the process that started them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

from voxlane.errors import RunError, StoppedError, VoxlaneError
from voxlane.processes import SupervisedContext, SupervisedProcess, ignore_stop_signals
from voxlane.temporary import mark_children

_HOST = "127.0.0.1"
_GRACE_S = 5.0
"""Seconds that the other ranks have to report their errors after one failed."""


def run_on_local_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, uri: str, fix: str) -> Any:
    """Call `function(*arguments)` on `ranks` new processes with the environment that torchrun sets; return the result
    of rank 0. `function` must be importable.

    SIGTERM is passed on to the ranks; once they have ended, StoppedError is raised. Ctrl-C stops them in the same way,
    and a second one ends them at once. A VoxlaneError of a rank is raised here, any other as a RunError about `uri`,
    which `fix` completes.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Ranks connect to this store, so that no port has to be chosen before it is bound.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    context = SupervisedContext()
    mark_children()
    processes: list[SupervisedProcess] = []
    results: list[Any] = []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(sender, rank, ranks, store.port, function, arguments))
        processes.append(process)
        results.append((receiver, sender))
    try:
        with _forward_sigterm(processes) as is_stopping:
            for process, (_, sender) in zip(processes, results, strict=True):
                process.start()
                sender.close()
            if is_stopping():  # the signal came before the last one had started
                _terminate(processes)
            try:
                outcomes = _wait(processes, [receiver for receiver, _ in results])
            except KeyboardInterrupt:
                print("voxlane: stopping; Ctrl-C again ends the ranks at once", file=sys.stderr, flush=True)
                _terminate(processes)
                for process in processes:
                    process.join()
                raise
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    if is_stopping() and any(process.exitcode for process in processes):
        raise StoppedError("stopped by SIGTERM", uri=uri, fix=fix)
    _raise_failure(outcomes, processes, uri, fix)
    return outcomes[0][1]


def _main(
    sender: connection.Connection,
    rank: int,
    ranks: int,
    port: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    variables: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
    }
    variables |= {"MASTER_ADDR": _HOST, "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    try:
        sender.send((True, function(*arguments)))
    except StoppedError as error:
        ignore_stop_signals()
        sender.send((False, error))
        raise SystemExit(128 + signal.SIGTERM) from None
    except Exception as error:  # noqa: BLE001 - a process boundary: the parent raises it
        sender.send((False, _make_sendable(error, rank)))
        raise SystemExit(1) from None


def _make_sendable(error: Exception, rank: int) -> Exception:
    if isinstance(error, VoxlaneError):
        try:
            pickle.loads(pickle.dumps(error))
            return error
        except Exception:  # noqa: BLE001 - any class may refuse pickling; its text must still arrive
            pass
    text = str(error).strip().splitlines()
    return RuntimeError(f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": "))


@contextmanager
def _forward_sigterm(processes: Sequence[SupervisedProcess]) -> Iterator[Callable[[], bool]]:
    """Pass SIGTERM on to `processes`, which may not have started yet; yield whether it was received."""
    received = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield received.is_set
        return

    def forward(*_: Any) -> None:
        received.set()
        _terminate(processes)

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        yield received.is_set
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(processes: Sequence[SupervisedProcess]) -> None:
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            process.terminate()


def _wait(processes: Sequence[SupervisedProcess], receivers: Sequence[Any]) -> dict[int, tuple[bool, Any]]:
    """Return what each rank sent, by rank and in the order in which it came, once all have ended or one failed and the
    others had time to notice. Ranks that stop by SIGTERM may take any time to save."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    failed_at: float | None = None
    while True:
        alive = [process.sentinel for process in processes if process.exitcode is None]
        pending = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in outcomes}
        has_ended = not alive  # what they sent can now be received
        if not has_ended:
            connection.wait([*alive, *pending], timeout=_GRACE_S if failed_at else None)
        for receiver, rank in pending.items():
            if receiver.poll():
                try:
                    outcomes[rank] = receiver.recv()
                except EOFError:
                    outcomes[rank] = False, None
        if has_ended:
            return outcomes
        if failed_at is None and any(_has_failed(outcomes.get(r), p.exitcode) for r, p in enumerate(processes)):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > _GRACE_S:
            return outcomes


def _has_failed(outcome: tuple[bool, Any] | None, exit_code: int | None) -> bool:
    """Return whether a rank failed, other than by SIGTERM."""
    if exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM) or isinstance((outcome or (True, None))[1], StoppedError):
        return False
    return bool(exit_code) or (outcome is not None and not outcome[0])


def _raise_failure(
    outcomes: dict[int, tuple[bool, Any]], processes: Sequence[SupervisedProcess], uri: str, fix: str
) -> None:
    """Raise the error that ended the ranks: a VoxlaneError, else the death of a process, else the first error. The
    other ranks only report that they lost the first."""
    errors = {rank: error for rank, (succeeded, error) in outcomes.items() if not succeeded and error is not None}
    for error in errors.values():
        if isinstance(error, VoxlaneError):
            raise error
    for rank, process in enumerate(processes):
        if rank not in errors and not outcomes.get(rank, (False,))[0] and process.exitcode:
            raise RunError(f"rank {rank} failed: it was killed", uri=uri, fix=fix)
    for rank, error in errors.items():
        raise RunError(f"rank {rank} failed: {error}", uri=uri, fix=fix)
