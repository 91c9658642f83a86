"""Saves that run in the background of training and report their failures."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    _stateful_to_state_dict,
    async_save,
)
from torch.distributed.elastic.agent.server.api import _get_fq_hostname
from torch.distributed.tensor import DTensor

from voxlane.checkpoint.collective import silence_single_process_warnings, unwrap_rank_errors
from voxlane.checkpoint.distributed_writer import DistributedWriter
from voxlane.errors import BusyError, CheckpointError, ConfigError, VoxlaneError
from voxlane.store import StoreConfig
from voxlane.uri import StrPath

_KeyPath = tuple[Any, ...]


class AsyncSaver:
    """Saves distributed checkpoints in the background, one at a time.

        with AsyncSaver() as saver:
            for step, batch in enumerate(loader):
                ...
                if step % 1000 == 0:
                    saver.save({"model": model.state_dict()}, f"gs://bucket/run/step-{step}")

    `save` returns when the state has been copied, so training may continue and change it. No failure goes unnoticed:
    the future fails if the save failed on any rank, and the next `save`, `wait` or the end of the `with` block raises
    the same error.
    """

    def __init__(
        self,
        config: StoreConfig | None = None,
        *,
        busy: Literal["wait", "refuse"] = "wait",
        process: bool = False,
        process_group: Any = None,
    ) -> None:
        """`busy`: what `save` does while the previous save is running: wait for it, or raise BusyError. `process`: save
        in a separate process, which takes no time from the training process but needs another copy of the state.
        `process_group`: a group that nothing else uses while a save runs, because their messages would mix; by default
        the first save creates a gloo group of all ranks."""
        if busy not in ("wait", "refuse"):
            raise ConfigError(f"busy must be 'wait' or 'refuse', got {busy!r}")
        self._config = config
        self._busy = busy
        self._process = process
        self._group = process_group
        self._running: Future[None] | None = None
        self._stager = Stager(shared=process)

    def save(self, state: Mapping[str, Any], uri: StrPath, **options: Any) -> Future[None]:
        """Copy `state` and start to save it at `uri`; `options` are those of `DistributedWriter`. Collective."""
        if self._running is not None and not self._running.done() and self._busy == "refuse":
            raise BusyError(
                "the previous save is still running", uri=str(uri), fix="Save less often, or pass busy='wait'"
            )
        self.wait()
        if self._group is None and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        writer = DistributedWriter(uri, self._config, **options)
        try:
            staged = self._stager.stage(_stateful_to_state_dict(dict(state)))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one: all of them must fail
            staged, writer = {}, _FailingWriter(uri, error)
        silence_single_process_warnings()
        kind = AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD
        with _bound_rendezvous(self._group) if self._process else contextlib.nullcontext():
            response = async_save(
                staged,
                storage_writer=writer,
                process_group=self._group,
                async_checkpointer_type=kind,
                async_stager=_AlreadyStaged(),  # type: ignore[abstract]  # torch's empty methods are fine
            )
        upload = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        saved: Future[None] = Future()
        upload.add_done_callback(lambda done: _transfer_result(done, saved, writer.checkpoint_id))
        self._running = saved
        return saved

    def wait(self) -> None:
        """Wait for the running save, if any, and raise its error if it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait for the running save and free the memory of the copy."""
        try:
            self.wait()
        finally:
            self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Stager:
    """Copies state dicts to the CPU, so that training cannot change what is saved; a copy is valid until the next one.

    torch's own stager does not support the ShardedTensors of FSDP. This one supports all kinds of tensors and reuses
    its memory from one save to the next, because allocating memory takes longer than filling it.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: copy into memory that another process can map."""
        self._shared = shared
        self._buffers: dict[_KeyPath, torch.Tensor] = {}
        self._used: set[_KeyPath] = set()

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state on the CPU."""
        self._used = set()
        staged: dict[str, Any] = self._copy(state_dict, ())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from the device have only been started
        self._buffers = {path: buffer for path, buffer in self._buffers.items() if path in self._used}
        return staged

    def close(self) -> None:
        """Free the memory."""
        self._buffers.clear()

    def _copy(self, value: Any, path: _KeyPath) -> Any:
        if isinstance(value, ShardedTensor):
            shards = [
                Shard(self._copy_tensor(shard.tensor, (*path, i)), shard.metadata)
                for i, shard in enumerate(value.local_shards())
            ]
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                shards, sharded_tensor_metadata=value.metadata(), process_group=value._process_group
            )
        if isinstance(value, DTensor):
            local = self._copy_tensor(value.to_local(), path)
            return DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, path)
        if isinstance(value, dict):
            return {key: self._copy(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*path, i)) for i, item in enumerate(value))
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor, path: _KeyPath) -> torch.Tensor:
        tensor = tensor.detach()
        self._used.add(path)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda" and not self._shared
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            if self._shared:
                buffer.share_memory_()  # type: ignore[no-untyped-call]
            self._buffers[path] = buffer
        buffer.copy_(tensor, non_blocking=tensor.device.type == "cuda")
        return buffer


_rendezvous: Any = None
"""TCPStore at which the saving processes of all ranks meet. It lives as long as this process, because they do."""


@contextlib.contextmanager
def _bound_rendezvous(group: Any) -> Iterator[None]:
    """Make torch's saving processes meet at a store that is already bound to its port.

    By default torch picks a free port that the saving process of rank 0 binds seconds later, and fails if another
    program has taken it meanwhile. torch reads these variables while it starts the processes, the address on rank 0
    only.
    """
    global _rendezvous
    variables = {"DCP_USE_PREFIX_STORE": "1"}
    if dist.get_rank(group) == 0:
        host = os.environ.get("MASTER_ADDR") or _get_fq_hostname()
        if _rendezvous is None:
            _rendezvous = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(_rendezvous.port)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _AlreadyStaged(AsyncStager):
    """Stager for a state that has been copied already."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict


class _FailingWriter(DistributedWriter):
    """Writer of a rank that could not copy its state: it fails the save that the other ranks have started."""

    def __init__(self, uri: StrPath, error: Exception) -> None:
        super().__init__(uri)
        self._error = error if isinstance(error, VoxlaneError) else CheckpointError(f"cannot copy the state: {error!r}")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        raise self._error


def _transfer_result(done: Future[Any], saved: Future[None], uri: str) -> None:
    """Pass the result of `done` on to `saved`, with torch's errors translated."""
    try:
        with unwrap_rank_errors(uri):
            done.result()
        saved.set_result(None)
    except BaseException as error:  # noqa: BLE001 - a thread's boundary: the caller of saved.result() gets it
        saved.set_exception(error)
