"""Saves that run beside training and tell when they failed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    _stateful_to_state_dict,
    async_save,
)

from voxlane.checkpoint.collective import silence, unwrapped
from voxlane.checkpoint.distributed_writer import DistributedWriter
from voxlane.checkpoint.staging import Stager
from voxlane.errors import BusyError, CheckpointError, ConfigError, VoxlaneError
from voxlane.store import StoreConfig


class AsyncSaver:
    """Saves distributed checkpoints in the background, one at a time.

        with AsyncSaver() as saver:
            for step, batch in enumerate(loader):
                ...
                if step % 1000 == 0:
                    saver.save({"model": model.state_dict()}, f"gs://bucket/run/step-{step}")

    `save` returns when the state has been copied, so that training may go on and change it. Nothing is lost in silence:
    the future fails if the save did, on this rank or another; and whoever does not look at the future gets the error
    from the next `save`, from `wait` or at the end of the `with` block.
    """

    def __init__(
        self,
        config: StoreConfig | None = None,
        *,
        busy: Literal["wait", "refuse"] = "wait",
        process: bool = False,
        process_group: Any = None,
    ) -> None:
        """`busy`: what `save` does while the one before is running: wait for it, or raise BusyError. `process`: save in
        a process of its own, which takes no time from the interpreter that trains, at the price of another copy.
        `process_group`: one that nothing else uses while a save runs, since the two would get each other's messages; by
        default a gloo group of all ranks is made with the first save."""
        if busy not in ("wait", "refuse"):
            raise ConfigError(f"busy={busy!r}", fix="Give 'wait' or 'refuse'")
        self._config = config
        self._busy = busy
        self._process = process
        self._group = process_group
        self._running: Future[None] | None = None
        self._stager = Stager(shared=process)

    def save(self, state: Mapping[str, Any], uri: str | os.PathLike[str], **options: Any) -> Future[None]:
        """Copy `state` and begin to save it at `uri`; `options` are those of `DistributedWriter`. Collective."""
        if self._running is not None and not self._running.done() and self._busy == "refuse":
            raise BusyError("the save before is still running", uri=str(uri), fix="Save less often, or busy='wait'")
        self.wait()
        if self._group is None and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        writer = DistributedWriter(uri, self._config, **options)
        try:
            staged = self._stager.stage(_stateful_to_state_dict(dict(state)))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one: all of them must fail
            staged, writer = {}, _Failed(uri, error)
        silence()
        response = async_save(
            staged,
            storage_writer=writer,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD,
            async_stager=_AsItIs(),
        )
        upload = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        outcome: Future[None] = Future()
        upload.add_done_callback(lambda done: _settle(done, outcome, writer.checkpoint_id))
        self._running = outcome
        return outcome

    def wait(self) -> None:
        """Wait for the save that is running, if any; raises what it raised."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and free the copy's memory."""
        try:
            self.wait()
        finally:
            self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _AsItIs(AsyncStager):
    """For a state that was copied already."""

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Failed(DistributedWriter):
    """Of a rank that could not copy its state: tells the other ranks so, through the save that they have begun."""

    def __init__(self, uri: str | os.PathLike[str], error: Exception) -> None:
        super().__init__(uri)
        self._error = error if isinstance(error, VoxlaneError) else CheckpointError(f"cannot copy the state: {error!r}")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        raise self._error


def _settle(done: Future[Any], outcome: Future[None], uri: str) -> None:
    """Pass on how a save ended, its errors as ours."""
    try:
        with unwrapped(uri):
            done.result()
        outcome.set_result(None)
    except BaseException as error:  # noqa: BLE001 - a thread's boundary: whoever asks for the result gets it
        outcome.set_exception(error)
