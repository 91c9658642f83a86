"""Strategies that save and load a checkpoint. Each takes the state of this rank and the checkpoint's URI."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from posixpath import basename, dirname
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from voxlane import uri as uris
from voxlane.bench.checkpoint.settings import CheckpointSettings
from voxlane.checkpoint import Checkpoint
from voxlane.checkpoint.async_save import AsyncSaver
from voxlane.checkpoint.distributed_reader import load_sharded
from voxlane.checkpoint.distributed_writer import save_sharded
from voxlane.errors import CheckpointError, MissingExtraError, VoxlaneError
from voxlane.store import Store

State = dict[str, torch.Tensor]
_Calls = tuple[Callable[[State, str], Any], Callable[[State, str], State | None]]
"""A save and a load function; a load that fills the given state returns None."""
_FSSPEC_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}


class Strategy:
    """A named strategy. `save` and `load` are called on every rank; `load` fills `state` (distributed) or returns a new
    one."""

    def __init__(self, name: str, settings: CheckpointSettings) -> None:
        self.name = name
        self._settings = settings
        self._save, self._load = _MAKE_CALLS[name](settings)
        self._background: Callable[[State, str], Future[Any]] | None = None

    def location(self, uri: str) -> str:
        """Return the URI or path at which this strategy finds `uri`."""
        return self._settings.local_folder(uri) if self.name == "filesystem" else uri

    def save(self, state: State, uri: str) -> None:
        """Save `state` to `uri`."""
        self._run("save", lambda: self._save(state, self.location(uri)))

    def start_save(self, state: State, uri: str) -> Future[Any]:
        """Copy `state` and begin to save it to `uri`; the future ends when the checkpoint is complete."""
        if self._background is None:
            self._background = _make_background_save(self._settings)
        return self._background(state, self.location(uri))

    def load(self, state: State, uri: str) -> State:
        """Load `uri` and return the loaded state."""
        return self._run("load", lambda: self._load(state, self.location(uri))) or state

    def _run(self, operation: str, call: Callable[[], State | None]) -> State | None:
        try:
            return call()
        except VoxlaneError:
            raise
        except BaseException as error:
            # Other libraries fail in many ways, and torch wraps them; the run ends with one line that names it.
            if not isinstance(error, Exception | CheckpointException):
                raise
            causes = [f[0] for f in error.failures.values()] if isinstance(error, CheckpointException) else [error]
            text = (str(causes[0]).strip().splitlines() or [""])[0]
            problem = f"the strategy {self.name!r} could not {operation}: {type(causes[0]).__name__}: {text}"
            raise CheckpointError(problem) from error


def _make_voxlane(settings: CheckpointSettings) -> _Calls:
    store = settings.store
    if settings.format == "distributed":
        return lambda state, uri: save_sharded(state, uri, store), lambda state, uri: load_sharded(state, uri, store)

    def save(state: State, uri: str) -> None:
        if not settings.disable_multipart:
            Checkpoint(dirname(uri), store).save(state, basename(uri))
            return
        file = io.BytesIO()
        torch.save(state, file)
        bucket, key = Store.locate(uri, store)
        bucket.put(key, file.getbuffer())

    return save, lambda state, uri: Checkpoint(dirname(uri), store).load(basename(uri))


def _make_background_save(settings: CheckpointSettings) -> Callable[[State, str], Future[Any]]:
    if settings.format == "distributed":
        return AsyncSaver(settings.store).save
    executor = ThreadPoolExecutor(1, thread_name_prefix="voxlane-save")
    save, _ = _make_voxlane(settings)

    def start_save(state: State, uri: str) -> Future[Any]:
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        return executor.submit(save, copied, uri)

    return start_save


def _make_fsspec(settings: CheckpointSettings) -> _Calls:
    options = _fsspec_options(settings)
    import fsspec
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    if settings.format == "distributed":
        return (
            lambda state, uri: dcp_save(state, storage_writer=FsspecWriter(uri, **options)),
            lambda state, uri: dcp_load(state, storage_reader=FsspecReader(uri, **options)),
        )

    def save(state: State, uri: str) -> None:
        with fsspec.open(uri, "wb", **options) as file:
            torch.save(state, file)

    def load(state: State, uri: str) -> Any:
        with fsspec.open(uri, "rb", **options) as file:
            return torch.load(file, weights_only=True)

    return save, load


def _make_filesystem(settings: CheckpointSettings) -> _Calls:
    if settings.format == "distributed":
        return (
            lambda state, path: dcp_save(state, storage_writer=FileSystemWriter(path)),
            lambda state, path: dcp_load(state, storage_reader=FileSystemReader(path)),
        )

    def save(state: State, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)

    return save, lambda _, path: torch.load(path, weights_only=True)


_MAKE_CALLS = {"voxlane": _make_voxlane, "fsspec": _make_fsspec, "filesystem": _make_filesystem}


def _fsspec_options(settings: CheckpointSettings) -> dict[str, Any]:
    """Return the arguments with which fsspec's file system reaches the same server as voxlane."""
    scheme = uris.parse(settings.save_folder or settings.restore).scheme
    store = settings.store
    endpoint = store.endpoint or os.environ.get("STORAGE_EMULATOR_HOST")
    if scheme == "gs" and endpoint:
        # No emulator answers gcsfs's search for hierarchical buckets by gRPC, which takes minutes to give up.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import fsspec

        fsspec.get_filesystem_class({"az": "abfs"}.get(scheme, scheme))
    except ImportError:
        raise MissingExtraError(
            f"the strategy 'fsspec' needs packages that are not installed for {scheme}://",
            fix=f"Run: pip install {_FSSPEC_PACKAGES.get(scheme, 'fsspec')}",
        ) from None
    arguments: dict[str, Any] = {}
    if scheme == "gs":
        token = "anon" if store.anonymous or (endpoint and not store.token) else store.service_account or store.token
        arguments = {"endpoint_url": endpoint, "token": token}
    elif scheme == "s3":
        arguments = {"key": store.access_key_id, "secret": store.secret_access_key, "token": store.session_token}
        arguments |= {"anon": store.anonymous or None, "profile": store.profile, "endpoint_url": store.endpoint}
        arguments["client_kwargs"] = {"region_name": store.region} if store.region else None
    elif scheme == "az":
        arguments = {"account_name": store.account, "account_key": store.account_key}
    return {name: value for name, value in arguments.items() if value is not None}
