"""What commands that run until Ctrl-C share: signals, the browser, messages on stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


class TerminatedError(KeyboardInterrupt):
    """Raised on SIGTERM, so that a command ends as by Ctrl-C: it removes its temporary files and ends its processes."""


@contextlib.contextmanager
def terminated_by_sigterm() -> Iterator[None]:
    """Raise TerminatedError on SIGTERM, unless the signal has a handler already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(*_: object) -> None:
    raise TerminatedError


@contextlib.contextmanager
def interrupted_by(*names: str) -> Iterator[None]:
    """Raise KeyboardInterrupt on these signals too, such as SIGTERM, as Ctrl-C does."""
    handlers = {name: signal.signal(getattr(signal, name), _interrupt) for name in names}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)


def _interrupt(number: int, _: object) -> None:
    if number == signal.SIGHUP:  # the terminal is closed, and printing to it would be an error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    raise KeyboardInterrupt


def print_note(text: str) -> None:
    """Print a message of voxlane on stderr at once."""
    print(f"voxlane: {text}", file=sys.stderr, flush=True)


def open_in_browser(url: str) -> None:
    """Open a page if there is a screen. Without one, a browser for terminals might start and take over this one."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        import webbrowser

        webbrowser.open(url)
