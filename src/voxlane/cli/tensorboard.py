"""`voxlane tensorboard`: TensorBoard of a run in a bucket."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from types import FrameType

from voxlane.cli.store_options import add_store_options, store_config
from voxlane.errors import ConfigError

Commands = argparse._SubParsersAction


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tensorboard",
        help="TensorBoard of a run in a bucket",
        description="Show a run in TensorBoard: its curves, and validation cases as rows of ground truth, scan and "
        "prediction. RUN is a run, a search with all its trials, or a folder of runs. Its event files are copied to a "
        "temporary folder as they grow. TensorBoard listens on this machine's loopback address only; Ctrl-C ends it.",
        epilog="examples:\n  voxlane tensorboard gs://work/runs/a\n  voxlane tensorboard s3://work/search --port 7000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("uri", metavar="RUN", help="URI or folder of a run, a search or many runs")
    parser.add_argument(
        "--port", metavar="PORT", type=int, default=6006, help="the first port to try (default 6006; 0: any)"
    )
    parser.add_argument(
        "--every", metavar="SECONDS", type=float, default=10.0, help="how often the bucket is looked at (default 10)"
    )
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--wait", action="store_true", help="wait for a run that is not there yet")
    add_store_options(parser)
    parser.set_defaults(run=_tensorboard)


def _tensorboard(options: argparse.Namespace) -> int:
    from voxlane.train.board import show

    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}", fix="Give 0 to 65535")
    if not 1 <= options.every <= 3600:
        raise ConfigError(f"--every {options.every:g}", fix="Give seconds, 1 to 3600")

    def ready(url: str) -> None:
        print(f"TensorBoard of {options.uri}: {url}", flush=True)
        if not options.no_open:
            open_in_browser(url)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # the way it is meant to end
            show(
                options.uri,
                store_config(options),
                port=options.port,
                every_s=options.every,
                say=_say,
                ready=ready,
                wait=options.wait,
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _say(text: str) -> None:
    print(f"voxlane: {text}", file=sys.stderr, flush=True)


def open_in_browser(url: str) -> None:
    """Open a page where there is a screen: without one, a browser for terminals may come up and take this one."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        import webbrowser

        webbrowser.open(url)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A signal that ends a command as Ctrl-C does."""
    raise KeyboardInterrupt
