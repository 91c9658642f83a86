"""`voxlane app tensorboard`, once its app and cluster are known."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from voxlane.cli.tensorboard import interrupt, open_in_browser

if TYPE_CHECKING:
    from voxlane.app.config import App
    from voxlane.kube.client import Cluster


def run(
    cluster: Cluster, name: str, app: App | None, image: str, port: int, *, stop: bool = False, browser: bool = True
) -> int:
    """Show the TensorBoard of app `name` on `port` of this machine until Ctrl-C; with `stop`, remove it instead. With
    `app` (and the image to run) it is made or brought up to date first; with None, one that is there is shown."""
    from voxlane.app import board

    if stop:
        there = board.stop(cluster, name)
        print(f"{name}: its TensorBoard is removed" if there else f"{name}: no TensorBoard of it was in the cluster")
        return 0

    def opened(url: str) -> None:
        print(f"TensorBoard of {name}: {url}", flush=True)
        _say("Ctrl-C ends the connection; TensorBoard stays in the cluster until voxlane app tensorboard --stop")
        if browser:
            open_in_browser(url)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # the way it is meant to end
            if app is not None:
                board.apply(cluster, app, image)
            board.show(cluster, name, port, say=_say, open_url=opened)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _say(text: str) -> None:
    print(f"voxlane: {text}", file=sys.stderr, flush=True)
