"""Copy or remove a dataset on a node; the operator's pods run this, and report to the cluster.

A copier patches its progress into `status.nodes[NODE]` of its dataset at most once a second. Its result is its
termination message, which the kubelet reports. An unreachable cluster never stops a copy.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from voxlane import uri as uris
from voxlane.cluster.kubernetes.client import Cluster, path_of
from voxlane.cluster.kubernetes.names import API_VERSION, node_folder
from voxlane.cluster.kubernetes.operator.resource import DEFAULT_DISK_RESERVE, OVER_QUOTA, DiskReserve
from voxlane.errors import (
    CacheError,
    ChangedError,
    ClusterError,
    CredentialsError,
    DatasetError,
    NoRoomError,
    OverQuotaError,
    StoreError,
    TooLargeError,
    VoxlaneError,
)
from voxlane.settings import Flag, record
from voxlane.sizes import parse_bytes

_REPORT_INTERVAL_S = 1.0
_MAX_MESSAGE_CHARS = 3000
"""Limit for a message; a kubelet keeps 4096 bytes of a termination message."""
_RESERVED_FILES = 0.06
"""Part of a disk's files (inodes) that is left free; kubelets evict pods below 5%."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FAILURE_REASONS = (
    (OverQuotaError, OVER_QUOTA),
    (NoRoomError, "NoRoom"),
    (TooLargeError, "TooLarge"),
    (ChangedError, "Changed"),
    ((StoreError, DatasetError), "Source"),
    ((VoxlaneError, OSError), "Disk"),
    (BaseException, "Crash"),
)
"""Kind of failure by class of exception; the first class that matches counts."""


@record
class OperatorAgentPrepareCommand:
    """Make the folder of a namespace on this node, for the operator."""

    folder: str
    """Folder on the node that has a folder for each namespace."""
    namespace: str
    """Namespace that gets one."""
    user: int
    """User and group id that own it."""
    last_words: Annotated[str | None, Flag(metavar="FILE")] = None
    """File for the result."""

    def _run(self) -> None:
        with _write_result(self.last_words, {}):
            make_namespace_folder(self.folder, self.namespace, self.user)
            print(f"{self.namespace}: its folder belongs to user {self.user}")


@record
class OperatorAgentRemoveCommand:
    """Remove a dataset from this node, for the operator."""

    folder: str
    """Folder on the node."""
    name: str
    """Name of the copy in it."""
    last_words: Annotated[str | None, Flag(metavar="FILE")] = None
    """File for the result."""

    def _run(self) -> None:
        from voxlane.store import staging

        result: dict[str, Any] = {}
        with _write_result(self.last_words, result):
            result["bytes"] = staging.remove(self.folder, self.name)
            print(f"{self.name}: {result['bytes']} bytes freed")


@record
class OperatorAgentStageCommand(OperatorAgentRemoveCommand):
    """Copy a dataset to this node, for the operator."""

    source: str
    """URI or mounted folder to copy."""
    origin: Annotated[str | None, Flag(metavar="URI")] = None
    """URI of the source, where that is a mount."""
    node: str
    """Name of this node."""
    dataset: Annotated[str, Flag(metavar="NAMESPACE/NAME")]
    """Namespace and name of the StagedDataset."""
    uid: str
    """Uid of the StagedDataset."""
    capacity: Annotated[int | None, Flag(metavar="BYTES")] = None
    """Largest number of bytes to copy."""
    quota: Annotated[int | None, Flag(metavar="BYTES")] = None
    """Largest number of bytes in the folder."""
    disk_reserve: DiskReserve = (DEFAULT_DISK_RESERVE,)
    """Space to leave free on the disk, as a percentage of it or a size (repeatable: the largest counts)."""

    def _run(self) -> None:
        from voxlane.store import staging

        reporter = ProgressReporter(self)
        reporter.start()
        begin = time.monotonic()
        result: dict[str, Any] = {}

        def progress(now: staging.StagingProgress) -> None:
            result.update(
                bytes=now.bytes, totalBytes=now.total_bytes, objects=now.objects, totalObjects=now.total_objects
            )
            # Without the phase: it belongs to the operator, which may have given up on this copy.
            message = "waiting for another copy to this node" if now.activity == "waiting" else None
            reporter.report(**result, message=message)

        with _write_result(self.last_words, result), contextlib.closing(reporter):
            if self.origin is not None:
                check_links(self.source)
            disk = os.statvfs(self.folder)
            report = staging.stage(
                self.source,
                self.folder,
                name=self.name,
                origin=self.origin,
                capacity_bytes=self.capacity,
                progress=progress,
                # Above the kubelet's threshold, because it would evict pods as soon as free space falls below it.
                reserve_bytes=staging.RESERVE_BYTES + compute_reserve(self.disk_reserve, disk.f_blocks * disk.f_frsize),
                reserve_files=int(disk.f_files * _RESERVED_FILES),
                quota_bytes=self.quota,
            )
            count, total = report.objects, report.total_bytes
            result.update(bytes=total, totalBytes=total, objects=count, totalObjects=count, version=report.version)
            seconds = time.monotonic() - begin
            source = self.origin or self.source
            print(f"{source}: {count} objects, {total:,} bytes; copied {report.copied_bytes:,} in {seconds:.1f} s")


class ProgressReporter(threading.Thread):
    """Patches the latest progress into the status of the dataset once a second, if it changed."""

    def __init__(self, request: OperatorAgentStageCommand) -> None:
        super().__init__(daemon=True)
        self._request = request
        self._progress: dict[str, Any] = {}
        self._closed = threading.Event()

    def report(self, **progress: Any) -> None:
        """Replace the progress to be reported; never block."""
        self._progress = {**self._progress, **progress}

    def run(self) -> None:
        """Send progress until closed."""
        namespace, _, name = self._request.dataset.partition("/")
        try:
            cluster = Cluster.connect(namespace=namespace)
        except VoxlaneError as error:
            print(f"voxlane: cannot report progress: {error}", file=sys.stderr)
            return
        path = path_of(API_VERSION, "StagedDataset", namespace, name)
        sent: dict[str, Any] = {}
        has_failed = is_last = False
        while not is_last:
            is_last = self._closed.wait(_REPORT_INTERVAL_S)
            progress = self._progress
            if progress == sent:
                continue
            # The uid protects a dataset that was deleted and created again under the same name.
            status = {"nodes": {self._request.node: progress}}
            try:
                cluster.patch(path, {"metadata": {"uid": self._request.uid}, "status": status}, subresource="status")
                sent, has_failed = progress, False
            except ClusterError as error:
                if not has_failed:
                    print(f"voxlane: cannot report progress, the copy continues: {error}", file=sys.stderr, flush=True)
                has_failed = True

    def close(self) -> None:
        """Send the last progress and stop."""
        self._closed.set()
        self.join(10)


def compute_reserve(sizes: Sequence[str], disk_bytes: int) -> int:
    """Return the largest of several sizes in bytes; a percentage is one of the disk."""
    percentages = [int(size[:-1]) for size in sizes if size.endswith("%")]
    amounts = [parse_bytes(size) for size in sizes if not size.endswith("%")]
    return max([*(disk_bytes * percentage // 100 for percentage in percentages), *amounts], default=0)


def make_namespace_folder(data_path: str, namespace: str, user: int) -> None:
    """Make the folder of a namespace below a data path, and give it to the copiers' user. Links are never followed: who
    could place one would choose what that user gets."""
    opened: list[int] = []
    try:
        opened.append(os.open(data_path, _FOLDER_FLAGS))
        for name in node_folder("", namespace).strip("/").split("/"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=opened[-1])
            opened.append(os.open(name, _FOLDER_FLAGS, dir_fd=opened[-1]))
        owner = os.fstat(opened[1]).st_uid
        if owner != os.geteuid():
            raise CacheError(
                f"user {owner} owns the folder of all namespaces and could replace theirs",
                uri=data_path,
                fix=f"Move it away on the node, or give it to user {os.geteuid()}",
            )
        if os.fstat(opened[2]).st_uid != user:
            os.fchown(opened[2], user, user)
    except OSError as error:
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
        reason = "a file or link is in its place" if is_link else error.strerror
        fix = "Remove that on the node" if is_link else "Check the folder on the node"
        raise CacheError(f"cannot make the folder of namespace {namespace}: {reason}", uri=data_path, fix=fix) from None
    finally:
        for handle in opened:
            os.close(handle)


def check_links(mount: str) -> None:
    """Raise DatasetError if a link of a mounted source leads out of it, to files of this pod or of other datasets."""
    root = os.path.realpath(f"/{uris.parse(mount).key}")
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = f"{folder}/{name}"
            if os.path.islink(path) and os.path.commonpath((root, os.path.realpath(path))) != root:
                raise DatasetError(
                    f"a link leads out of the source: {os.readlink(path)}",
                    uri=os.path.relpath(path, root),
                    fix="Replace it by its target",
                )


@contextlib.contextmanager
def _write_result(path: str | None, result: dict[str, Any]) -> Iterator[None]:
    """Write the result, or the failure, to the file that the kubelet reads.

    On SIGTERM, which the first process of a container ignores by default, exit immediately: an interrupted copy can be
    resumed.
    """
    previous = signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        yield
    except BaseException as error:
        message = str(error) or type(error).__name__
        if isinstance(error, CredentialsError):
            # The fix that the error suggests is for a person's machine.
            message = f"{error.uri or 'the source'}: the server does not accept the copier's credentials"
            message += ". Name a Secret or a service account in credentials"
        if isinstance(error, NoRoomError):
            result["lackingBytes"] = error.lacking_bytes
        result["reason"] = next(reason for kind, reason in _FAILURE_REASONS if isinstance(error, kind))
        result["message"] = message[:_MAX_MESSAGE_CHARS]
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        if path:
            Path(path).write_text(json.dumps(result), encoding="utf-8")
