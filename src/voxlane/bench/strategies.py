"""The ways to save and load that are compared. Each takes the state of this rank and the checkpoint's URI."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from voxlane import uri as uris
from voxlane.bench.setting import Setting
from voxlane.errors import CheckpointError, MissingExtraError, VoxlaneError
from voxlane.store import StoreConfig

State = dict[str, torch.Tensor]
_Calls = tuple[Callable[[State, str], None], Callable[[State, str], State | None]]
"""Save and load; a load that fills the state it was given returns None."""
_FSSPEC_PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs"}


class Strategy:
    """One way. `save` and `load` are called on every rank; `load` fills `state` (distributed) or gives a new one."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self._setting = setting
        self._save, self._load = _CALLS[name, setting.format](setting)

    def location(self, uri: str) -> str:
        """Where this strategy finds what is at `uri`."""
        return self._setting.local_folder(uri) if self.name == "filesystem" else uri

    def save(self, state: State, uri: str) -> None:
        """Save."""
        self._run("save", lambda: self._save(state, self.location(uri)))

    def load(self, state: State, uri: str) -> State:
        """Load; the state that was loaded."""
        return self._run("load", lambda: self._load(state, self.location(uri))) or state

    def _run(self, what: str, call: Callable[[], State | None]) -> State | None:
        try:
            return call()
        except VoxlaneError:
            raise
        except BaseException as error:
            # Other libraries fail in many ways, and torch wraps them; the run ends with one line that says which did.
            if not isinstance(error, Exception | CheckpointException):
                raise
            causes = [f[0] for f in error.failures.values()] if isinstance(error, CheckpointException) else [error]
            text = (str(causes[0]).strip().splitlines() or [""])[0]
            raise CheckpointError(
                f"the strategy {self.name!r} could not {what}: {type(causes[0]).__name__}: {text}"
            ) from (error)


def _voxlane_sharded(setting: Setting) -> _Calls:
    from voxlane.checkpoint.distributed_reader import load_sharded
    from voxlane.checkpoint.distributed_writer import save_sharded

    def save(state: State, uri: str) -> None:
        save_sharded(state, uri, setting.store)

    def load(state: State, uri: str) -> None:
        load_sharded(state, uri, setting.store)

    return save, load


def _voxlane_single(setting: Setting) -> _Calls:
    from voxlane.checkpoint import Checkpoint

    def save(state: State, uri: str) -> None:
        folder, _, name = uri.rpartition("/")
        Checkpoint(folder, setting.store).save(state, name)

    def load(state: State, uri: str) -> Any:
        folder, _, name = uri.rpartition("/")
        return Checkpoint(folder, setting.store).load(name)

    return save, load


def _fsspec_sharded(setting: Setting) -> _Calls:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options = _fsspec_options(setting)

    def save(state: State, uri: str) -> None:
        dcp_save(state, storage_writer=FsspecWriter(uri, **options))

    def load(state: State, uri: str) -> None:
        dcp_load(state, storage_reader=FsspecReader(uri, **options))

    return save, load


def _fsspec_single(setting: Setting) -> _Calls:
    options = _fsspec_options(setting)
    import fsspec

    def save(state: State, uri: str) -> None:
        with fsspec.open(uri, "wb", **options) as file:
            torch.save(state, file)

    def load(state: State, uri: str) -> Any:
        with fsspec.open(uri, "rb", **options) as file:
            return torch.load(file, weights_only=True)

    return save, load


def _filesystem_sharded(setting: Setting) -> _Calls:
    def save(state: State, path: str) -> None:
        dcp_save(state, storage_writer=FileSystemWriter(path))

    def load(state: State, path: str) -> None:
        dcp_load(state, storage_reader=FileSystemReader(path))

    return save, load


def _filesystem_single(setting: Setting) -> _Calls:
    def save(state: State, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)

    def load(state: State, path: str) -> Any:
        return torch.load(path, weights_only=True)

    return save, load


_CALLS = {
    ("voxlane", "distributed"): _voxlane_sharded,
    ("voxlane", "single"): _voxlane_single,
    ("fsspec", "distributed"): _fsspec_sharded,
    ("fsspec", "single"): _fsspec_single,
    ("filesystem", "distributed"): _filesystem_sharded,
    ("filesystem", "single"): _filesystem_single,
}


def _fsspec_options(setting: Setting) -> dict[str, Any]:
    """What fsspec's file system needs to reach the same server as we do."""
    scheme = uris.parse(setting.folder or setting.restore).scheme
    try:
        import fsspec

        fsspec.get_filesystem_class({"az": "abfs"}.get(scheme, scheme))
    except ImportError:
        raise MissingExtraError(
            f"the strategy 'fsspec' needs packages that are not installed for {scheme}://",
            fix=f"Run: pip install {_FSSPEC_PACKAGES.get(scheme, 'fsspec')}",
        ) from None
    return _fsspec_arguments(scheme, setting.store)


def _fsspec_arguments(scheme: str, store: StoreConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if scheme == "gs":
        endpoint = store.endpoint or os.environ.get("STORAGE_EMULATOR_HOST")
        token = "anon" if store.anonymous or (endpoint and not store.token) else store.service_account or store.token
        arguments = {"endpoint_url": endpoint, "token": token}
    elif scheme == "s3":
        arguments = {"key": store.access_key_id, "secret": store.secret_access_key, "token": store.session_token}
        arguments |= {"anon": store.anonymous or None, "profile": store.profile}
        arguments |= {"endpoint_url": store.endpoint}
        if store.region:
            arguments["client_kwargs"] = {"region_name": store.region}
    elif scheme == "az":
        arguments = {"account_name": store.account, "account_key": store.account_key}
    return {name: value for name, value in arguments.items() if value is not None}
