"""Saves that run in the background of training and report their failures."""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
_MIN_REGISTERED_BYTES = 1 << 20
"""Smaller tensors use torch's pinned memory."""


class AsyncSaver:
    """Saves distributed checkpoints in the background, one at a time.

        with AsyncSaver() as saver:
            for step, batch in enumerate(loader):
                ...
                if step % 1000 == 0:
                    saver.save({"model": model.state_dict()}, f"gs://bucket/run/step-{step}")

    When `save` returns, training may continue and change the state. On a GPU this takes a few milliseconds: the copy to
    the CPU overlaps the next steps. No failure goes unnoticed:
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
        writer = _StagedWriter(uri, self._config, **options)
        try:
            staged: Any = self._stager.stage(_stateful_to_state_dict(dict(state)), on_failure=writer.fail)
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one: all of them must fail
            writer.fail(error)
            staged = {}
        silence_single_process_warnings()
        kind = AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD
        with _bound_rendezvous(self._group) if self._process else contextlib.nullcontext():
            response = async_save(
                {},  # the stager returns the state
                storage_writer=writer,
                process_group=self._group,
                async_checkpointer_type=kind,
                async_stager=_AlreadyStaged(staged),  # type: ignore[abstract]  # torch's empty methods are fine
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

    Tensors on a GPU are first copied within its memory, which takes about a millisecond per 2 GB. `stage` returns then,
    and the slower copy to the CPU overlaps the next steps. This uses at most half of the memory that nobody has
    reserved on the GPU; what does not fit is copied to the CPU before `stage` returns.

    torch's own stager does not support the ShardedTensors of FSDP, and it reads the live tensors while it copies, so
    training would have to wait for it before it changes them. This one supports all kinds of tensors and reuses its
    memory on the CPU from one save to the next, because allocating memory takes longer than filling it.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: copy into memory that another process can map."""
        self._shared = shared
        self._buffers: dict[_KeyPath, torch.Tensor] = {}
        self._used: set[_KeyPath] = set()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None

    def stage(
        self, state_dict: dict[str, Any], *, on_failure: Callable[[Exception], object]
    ) -> dict[str, Any] | Future[dict[str, Any]]:
        """Return a copy of the state on the CPU; or, if the state has tensors on a GPU, a future of it. If the rest of
        the copying fails, the future calls `on_failure` with the error and returns an empty state."""
        self._used = set()
        snapshot = _Snapshot()
        copied: dict[str, Any] = _map_tensors(state_dict, lambda tensor, path: snapshot.take(tensor, path, self))
        snapshot.start()
        if not snapshot.devices:
            self._forget_unused()
            return copied
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="voxlane-stage")
        return self._thread.submit(self._finish, copied, snapshot, on_failure)

    def close(self) -> None:
        """Wait for a copy that is being made, and free the memory."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._buffers.clear()

    def _finish(
        self, copied: dict[str, Any], snapshot: _Snapshot, on_failure: Callable[[Exception], object]
    ) -> dict[str, Any]:
        """Copy the snapshot on the GPUs to the CPU."""
        try:
            for device, event in snapshot.devices.items():
                if device not in self._streams:
                    self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._streams[device].wait_event(event)
            staged: dict[str, Any] = _map_tensors(copied, self._copy_to_cpu)
            for device in snapshot.devices:
                self._streams[device].synchronize()
            self._forget_unused()
            return staged
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one: all of them must fail
            on_failure(error)
            return {}

    def _copy_to_cpu(self, tensor: torch.Tensor, path: _KeyPath) -> torch.Tensor:
        if tensor.device.type != "cuda":
            return tensor  # copied before `stage` returned
        with torch.cuda.stream(self._streams[tensor.device]):
            return self.fill_buffer(tensor, path)

    def fill_buffer(self, tensor: torch.Tensor, path: _KeyPath) -> torch.Tensor:
        """Copy a tensor into the buffer for `path`; a copy from a GPU has only been started."""
        self._used.add(path)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[path] = self._allocate(tensor)
        buffer.copy_(tensor, non_blocking=tensor.device.type == "cuda")
        return buffer

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor on the CPU. A large one for a tensor of a GPU is pinned after its pages
        exist: allocating pinned memory holds up the GPU's steps for as long as the system takes to clear the pages."""
        is_on_gpu, is_large = tensor.device.type == "cuda", tensor.nbytes >= _MIN_REGISTERED_BYTES
        if self._shared:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            buffer.share_memory_()  # type: ignore[no-untyped-call]
        elif is_on_gpu and is_large:
            memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        else:
            # A copy into memory that is not pinned would hold up the GPU's steps until all earlier copies are done.
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_on_gpu)
        if is_on_gpu and is_large:
            buffer.zero_()
            self._pin(buffer)
        return buffer

    def _pin(self, buffer: torch.Tensor) -> None:
        """Lock the pages of a tensor until it is freed."""
        library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(library.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
            weakref.finalize(buffer, library.cudaHostUnregister, buffer.data_ptr())

    def _forget_unused(self) -> None:
        self._buffers = {path: buffer for path, buffer in self._buffers.items() if path in self._used}


class _Snapshot:
    """Copies of one state's GPU tensors in the memory of their GPUs, as far as there is room for them."""

    def __init__(self) -> None:
        self.devices: dict[torch.device, torch.cuda.Event] = {}
        """The GPUs that hold a part of the snapshot, and the event after which that part is complete."""
        self._free_bytes: dict[torch.device, int] = {}
        self._sources: dict[torch.device, list[torch.Tensor]] = {}
        self._targets: dict[torch.device, list[torch.Tensor]] = {}
        self._full_devices: set[torch.device] = set()
        """GPUs with tensors that did not fit, which are being copied to the CPU."""

    def take(self, tensor: torch.Tensor, path: _KeyPath, stager: Stager) -> torch.Tensor:
        """Return the tensor that will hold the copy: in the GPU's memory if it fits there, else on the CPU."""
        device = tensor.device
        if device.type != "cuda":
            return stager.fill_buffer(tensor, path)
        if device not in self._free_bytes:
            # Memory that torch has reserved is for training: its next step may need all of it again.
            self._free_bytes[device] = torch.cuda.mem_get_info(device)[0] // 2
        if tensor.nbytes > self._free_bytes[device]:
            self._full_devices.add(device)
            return stager.fill_buffer(tensor, path)
        self._free_bytes[device] -= tensor.nbytes
        target = torch.empty_like(tensor)
        self._sources.setdefault(device, []).append(tensor)
        self._targets.setdefault(device, []).append(target)
        return target

    def start(self) -> None:
        """Start to copy the tensors on each GPU, after the work that its current stream has already been given. Wait
        for copies to the CPU."""
        for device, targets in self._targets.items():
            torch._foreach_copy_(targets, self._sources[device])
            self.devices[device] = torch.cuda.current_stream(device).record_event()
        for device in self._full_devices:
            torch.cuda.current_stream(device).synchronize()


def _map_tensors(value: Any, convert: Callable[[torch.Tensor, _KeyPath], torch.Tensor], path: _KeyPath = ()) -> Any:
    """Return a copy of a state whose plain tensors, or local parts of distributed ones, are the results of `convert`,
    which gets a tensor and its path."""
    if isinstance(value, ShardedTensor):
        shards = [
            Shard(convert(shard.tensor.detach(), (*path, i)), shard.metadata)
            for i, shard in enumerate(value.local_shards())
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, sharded_tensor_metadata=value.metadata(), process_group=value._process_group
        )
    if isinstance(value, DTensor):
        local = convert(value.to_local().detach(), path)
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if isinstance(value, torch.Tensor):
        return convert(value.detach(), path)
    if isinstance(value, dict):
        return {key: _map_tensors(item, convert, (*path, key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, convert, (*path, i)) for i, item in enumerate(value))
    return copy.deepcopy(value)


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
    """Stager that returns a copy which has been made, or started, already."""

    _synchronize_after_execute = False

    def __init__(self, staged: Any) -> None:
        self._staged = staged

    def stage(self, state_dict: Any) -> Any:
        return self._staged


class _StagedWriter(DistributedWriter):
    """Writer of a copied state. If the copying failed on this rank, it fails the save that the other ranks started."""

    _failure: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Make the save fail with `error`."""
        self._failure = (
            error if isinstance(error, VoxlaneError) else CheckpointError(f"cannot copy the state: {error!r}")
        )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._failure is not None:
            raise self._failure
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


def _transfer_result(done: Future[Any], saved: Future[None], uri: str) -> None:
    """Pass the result of `done` on to `saved`, with torch's errors translated."""
    try:
        with unwrap_rank_errors(uri):
            done.result()
        saved.set_result(None)
    except BaseException as error:  # noqa: BLE001 - a thread's boundary: the caller of saved.result() gets it
        saved.set_exception(error)
