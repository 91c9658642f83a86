"""What the operator's pods run on nodes: the copy and the removal of a dataset, told to the cluster as they go.

A copier says how far it is in `status.nodes[NODE]` of its dataset, once a second at most; how it ended are its last
words, which the kubelet carries. A cluster that does not answer never ends a copy.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voxlane import uri as uris
from voxlane.errors import (
    ChangedError,
    ClusterError,
    CredentialsError,
    DatasetError,
    NoRoomError,
    StoreError,
    TooLargeError,
    VoxlaneError,
)
from voxlane.kube.client import Cluster
from voxlane.operator.pods import status_path

_EVERY_S = 1.0
_LONGEST_WORDS = 3000
"""A kubelet keeps 4096 bytes."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """A copy that the operator asked for."""

    source: str
    folder: str
    """The node's folder, as this process sees it."""
    name: str
    """Of the copy in it."""
    node: str
    namespace: str
    dataset: str
    uid: str
    origin: str | None = None
    """What the source is called, where it is read through a mount."""
    capacity_bytes: int | None = None
    last_words: str | None = None


class Telling(threading.Thread):
    """Patches the newest progress into the dataset's status."""

    def __init__(self, cluster: Cluster | None, order: Order) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._order = order
        self._news: dict[str, Any] = {}
        self._fresh = threading.Event()
        self._over = threading.Event()
        self._silent = False

    def say(self, **news: Any) -> None:
        """From now on this is how far it is; never waits."""
        self._news = {**self._news, **news}
        self._fresh.set()

    def run(self) -> None:
        while not self._over.is_set():
            self._fresh.wait()
            self._fresh.clear()
            self._send()
            self._over.wait(_EVERY_S)
        self._send()

    def close(self) -> None:
        """Send what was said last."""
        self._over.set()
        self._fresh.set()
        self.join(10)

    def _send(self) -> None:
        if self._cluster is None or not self._news:
            return
        order = self._order
        # With the uid: a dataset that was deleted and made again under the same name is not ours.
        said = {"metadata": {"uid": order.uid}, "status": {"nodes": {order.node: self._news}}}
        try:
            self._cluster.patch(status_path(order.namespace, order.dataset), said)
            self._silent = False
        except ClusterError as error:
            if not self._silent:
                print(f"voxlane: progress cannot be told, the copy goes on: {error}", file=sys.stderr, flush=True)
            self._silent = True


def stage(order: Order, cluster: Cluster | None) -> int:
    """Copy; the exit status."""
    from voxlane import staging

    telling = Telling(cluster, order)
    telling.start()
    begin = time.monotonic()
    last: dict[str, Any] = {}

    def progress(now: staging.Progress) -> None:
        last.update(bytes=now.bytes, totalBytes=now.total_bytes, objects=now.objects, totalObjects=now.total_objects)
        # Not the phase: that is the operator's, which may have given up on this copy by now.
        telling.say(**last, message="waits for another copy onto this node" if now.doing == "waiting" else None)

    with _quick_end(), _words(order.last_words, last, telling):
        if order.origin is not None:
            check_links(order.source)
        report = staging.stage(
            order.source,
            order.folder,
            name=order.name,
            origin=order.origin,
            capacity_bytes=order.capacity_bytes,
            progress=progress,
        )
        count, total = report.objects, report.total_bytes
        last.update(bytes=total, totalBytes=total, objects=count, totalObjects=count, version=report.version)
        seconds = time.monotonic() - begin
        source = order.origin or order.source
        print(f"{source}: {count} objects, {total:,} bytes; copied {report.copied_bytes:,} in {seconds:.1f} s")
    return 0


def check_links(mount: str) -> None:
    """Refuse a mounted source with links that lead out of it: what they name here is this pod's own, and other
    datasets'."""
    root = os.path.realpath(f"/{uris.parse(mount).key}")
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = f"{folder}/{name}"
            if os.path.islink(path) and os.path.commonpath((root, os.path.realpath(path))) != root:
                raise DatasetError(
                    f"a link leads out of the source: {os.readlink(path)}",
                    uri=os.path.relpath(path, root),
                    fix="Replace it by what it names",
                )


def remove(folder: str, name: str, last_words: str | None) -> int:
    """Remove a copy; the exit status."""
    from voxlane import staging

    last: dict[str, Any] = {}
    with _quick_end(), _words(last_words, last, None):
        freed = staging.remove(folder, name)
        last["bytes"] = freed
        print(f"{name}: {freed} bytes freed")
    return 0


def outcome(error: BaseException) -> dict[str, Any]:
    """A failure as the operator reads it: its kind, and a sentence."""
    if isinstance(error, NoRoomError):
        return {"reason": "NoRoom", "message": str(error), "lackingBytes": error.lacking_bytes}
    if isinstance(error, TooLargeError):
        reason = "TooLarge"
    elif isinstance(error, ChangedError):
        reason = "Changed"
    elif isinstance(error, CredentialsError):
        # Its own advice is for a person's machine.
        said = str(error).split(": ", 1)[0] + ": the copier has no credentials that the server takes"
        return {"reason": "Source", "message": f"{said}. Name a Secret or a service account in credentials"}
    elif isinstance(error, StoreError | DatasetError):
        reason = "Source"
    else:
        reason = "Disk" if isinstance(error, VoxlaneError | OSError) else "Crash"
    return {"reason": reason, "message": str(error) or type(error).__name__}


@contextmanager
def _words(path: str | None, last: Mapping[str, Any], telling: Telling | None) -> Iterator[None]:
    """Leave how it ended where the kubelet finds it."""
    said: dict[str, Any] = {}
    try:
        yield
    except BaseException as error:
        said = outcome(error)
        raise
    finally:
        if telling is not None:
            telling.close()
        if path:
            said = {**last, **said}
            if "message" in said:
                said["message"] = said["message"][:_LONGEST_WORDS]
            Path(path).write_text(json.dumps(said), encoding="utf-8")


@contextmanager
def _quick_end() -> Iterator[None]:
    """End at once when told to. A container's first process ignores SIGTERM unless it says otherwise, and a copy that
    is cut off anywhere goes on from there."""

    def end(number: int, _: Any) -> None:
        os._exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
