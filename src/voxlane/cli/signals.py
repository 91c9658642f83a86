"""What commands that run until Ctrl-C share: signals, the browser, messages on stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


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
