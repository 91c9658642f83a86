"""Lightning's checkpoints at bucket URIs: a `CheckpointIO`, and strategies for FSDP and FSDP2.

trainer = Trainer(
    plugins=[BucketCheckpointIO()],
    callbacks=[ModelCheckpoint(dirpath="gs://bucket/run1", save_top_k=3, save_last=True)],
)
trainer.fit(model, ckpt_path="gs://bucket/run1/last.ckpt")
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from voxlane import uri as uris
from voxlane.checkpoint.async_save import AsyncSaver
from voxlane.checkpoint.collective import RankGroup, ignore_single_process_warnings, run_once, unwrap_rank_errors
from voxlane.checkpoint.distributed_metadata import METADATA, no_complete_checkpoint
from voxlane.checkpoint.distributed_reader import DistributedReader, load_sharded
from voxlane.checkpoint.distributed_writer import save_sharded
from voxlane.checkpoint.lifecycle import LIGHTNING_META, find_checkpoint, remove_checkpoint
from voxlane.checkpoint.plain import Checkpoint, load_file
from voxlane.checkpoint.reader import SharedReader
from voxlane.distributed import gather_objects
from voxlane.errors import MissingExtraError
from voxlane.store import Store, StoreConfig
from voxlane.store.bucket import ignore_missing_object
from voxlane.temporary import make_temporary_folder

try:
    from lightning.fabric.plugins.io import CheckpointIO
    from lightning.fabric.strategies.fsdp import _get_sharded_state_dict_context
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
    from lightning.pytorch.trainer.states import TrainerFn

    from voxlane.checkpoint.filesystem import register_filesystem
except ImportError:
    raise MissingExtraError.of("lightning", "saving Lightning checkpoints") from None

register_filesystem()


class BucketCheckpointIO(CheckpointIO):
    """Reads and writes Lightning's single-file checkpoints at URIs and local paths, with checksums.

    On load, all ranks read together and each block is read from the bucket once. Pass `read_once=False` if you load on
    some ranks only.

    `ModelCheckpoint` looks up its folder through fsspec. With a `config`, fsspec uses it too for folders that are first
    opened after this, so construct this before the callback. An instance that is constructed later, for other
    folders, does not change that.
    """

    def __init__(
        self,
        config: StoreConfig | None = None,
        *,
        read_once: bool = True,
        before_save: Callable[[], None] | None = None,
    ) -> None:
        """`before_save`: called on the saving thread; its error prevents the save."""
        self._config = config
        self._read_once = read_once
        self._before_save = before_save
        if config is not None:
            register_filesystem(config, override=True, owner=self)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; it is published completely or not at all."""
        if storage_options is not None:
            raise TypeError("storage_options are not supported; pass a StoreConfig to BucketCheckpointIO")
        if self._before_save is not None:
            self._before_save()
        folder, name = _split(path)
        Checkpoint(folder, self._config).save(checkpoint, name)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint onto the CPU or to `map_location`. It may run code only with `weights_only=False`."""
        folder, name = _split(path)
        loaded: dict[str, Any] = Checkpoint(folder, self._config).load(
            name,
            map_location="cpu" if map_location is None else map_location,
            weights_only=weights_only is not False,
            read_once=self._read_once,
        )
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, a file or a sharded one; it is no error if there is none."""
        with ignore_missing_object():
            remove_checkpoint(find_checkpoint(uris.from_path(path), self._config))


class AsyncBucketCheckpointIO(AsyncCheckpointIO):
    """`BucketCheckpointIO` on its own thread. A checkpoint is removed only after every save that was started earlier
    has been published; Lightning's own wrapper can delete the last good one while its successor is still uploading.
    The next call, or the end, raises errors."""

    def __init__(
        self,
        config: StoreConfig | None = None,
        *,
        read_once: bool = True,
        before_save: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(BucketCheckpointIO(config, read_once=read_once, before_save=before_save))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint after the running saves, unless one of them failed."""
        self._ensure_setup()
        assert self._executor is not None
        self._executor.submit(self._remove, path)

    def _remove(self, path: str | Path) -> None:
        if self._error is not None:
            return
        try:
            assert self.checkpoint_io is not None
            self.checkpoint_io.remove_checkpoint(path)
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: raised by the next call
            self._error = error


class _ShardedCheckpoints(Strategy):
    """Saves and loads checkpoints of strategies whose state is spread over the ranks."""

    _model_key: str
    """Name of the model's state in a sharded checkpoint."""

    def __init__(
        self, *args: Any, store_config: StoreConfig | None = None, async_save: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self._checkpoint_io is None:
            self.checkpoint_io = BucketCheckpointIO(store_config)
        self._store_config = store_config
        self._saver = AsyncSaver(store_config) if async_save else None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save at a URI, by all ranks together."""
        uri = uris.from_path(self.broadcast(os.fspath(filepath)))
        if not self._saves_shards():
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, uri)
            return
        state = {self._model_key: checkpoint.pop("state_dict")}
        state |= {f"optimizer_{i}": s for i, s in enumerate(checkpoint.pop("optimizer_states", []))}
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        attachments = {LIGHTNING_META: buffer.getvalue()}
        if self._saver is not None:
            self._saver.save(state, uri, attachments=attachments)
        else:
            save_sharded(state, uri, self._store_config, attachments=attachments)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a sharded or full checkpoint on all ranks together; the number of ranks may differ from the save."""
        self._wait_for_save()
        uri = uris.from_path(self.broadcast(os.fspath(checkpoint_path)))
        if not self._is_sharded(uri):
            with self._local_copy(uri) as path:
                return super().load_checkpoint(path, weights_only=weights_only)
        self._load_shards(uri)
        return self._load_meta(uri, weights_only)

    def _saves_shards(self) -> bool:
        """Return whether checkpoints are saved sharded, not as one file."""
        raise NotImplementedError

    def _load_shards(self, uri: str) -> None:
        """Load the model and, if it is being trained, the optimizers from a sharded checkpoint."""
        raise NotImplementedError

    def _is_sharded(self, uri: str) -> bool:
        store, key = Store.locate(uri, self._store_config)

        def check() -> bool:
            if store.exists(f"{key.rstrip('/')}/{METADATA}"):
                return True
            if not store.exists(key):
                raise no_complete_checkpoint(uri)
            return False

        return run_once(RankGroup.current(), check)

    def _load_meta(self, uri: str, weights_only: bool | None) -> dict[str, Any]:
        data = DistributedReader(uri, self._store_config).attachment(LIGHTNING_META)
        safe = weights_only is not False
        meta: dict[str, Any]
        if data is None:  # written by Lightning's own strategy
            checkpoint = Checkpoint(uri, self._store_config)
            meta = checkpoint.load(LIGHTNING_META, map_location="cpu", weights_only=safe, read_once=True)
        else:
            meta = load_file(io.BytesIO(data), f"{uri} [{LIGHTNING_META}]", "cpu", safe)
        return meta

    @contextmanager
    def _local_copy(self: Any, uri: str) -> Iterator[Path]:
        """Yield the path of a full checkpoint on each node's disk, read from the bucket once for all nodes. Lightning
        maps the file when it loads it, so the ranks of a node share its memory."""
        ranks = RankGroup.current()
        own_folder = make_temporary_folder("full") if self.local_rank == 0 else None
        try:
            if ranks is None:
                assert own_folder is not None
                with Checkpoint(os.path.dirname(uri), self._store_config).reader(os.path.basename(uri)) as file:
                    file.save_to(f"{own_folder}/full.ckpt")
                yield Path(own_folder, "full.ckpt")
                return
            folders = gather_objects((self.node_rank, own_folder), ranks.group)
            node_folder = next(path for node, path in folders if node == self.node_rank and path is not None)
            with SharedReader(*Store.locate(uri, self._store_config), ranks) as shared:
                shared.save_to(f"{own_folder}/full.ckpt" if own_folder is not None else None)
            self.barrier()
            yield Path(node_folder, "full.ckpt")
            self.barrier()
        finally:
            if own_folder is not None:
                shutil.rmtree(own_folder, ignore_errors=True)

    def _wait_for_save(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint after the running save has been published."""
        self._wait_for_save()
        super().remove_checkpoint(filepath)

    def teardown(self) -> None:
        """Wait for the last save and raise its error if it failed."""
        if self._saver is not None:
            self._saver.close()
        super().teardown()


class BucketFSDPStrategy(_ShardedCheckpoints, FSDPStrategy):
    """`FSDPStrategy` whose checkpoints, sharded or full (`state_dict_type`), are stored at bucket URIs.

    With `async_save` sharded checkpoints are written in the background. The next save waits for the previous one, and
    no checkpoint is removed before its replacement is published.
    """

    _model_key = "model"

    def _saves_shards(self) -> bool:
        return self._state_dict_type == "sharded"

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Pass the device to FSDP on the CPU (tests and benchmarks), where it needs it and Lightning does not."""
        if self.root_device.type == "cpu":
            model = FullyShardedDataParallel(
                model,
                cpu_offload=self.cpu_offload,
                mixed_precision=self.mixed_precision_config,
                sharding_strategy=self.sharding_strategy,
                device_id=self.root_device,
                **self.kwargs,
            )
            self.kwargs.pop("auto_wrap_policy", None)
        return super()._setup_model(model)

    def _load_shards(self, uri: str) -> None:
        assert self.model is not None
        assert self.lightning_module is not None
        sharded: Any = _get_sharded_state_dict_context(self.model)
        with sharded, ignore_single_process_warnings(), unwrap_rank_errors(uri):
            state = {"model": self.model.state_dict()}
            load_sharded(state, uri, self._store_config)
            self.model.load_state_dict(state["model"], strict=self.lightning_module.strict_loading)
            if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
                for index, optimizer in enumerate(self.optimizers):
                    key = f"optimizer_{index}"
                    loaded = load_sharded_optimizer_state_dict(
                        model_state_dict=state["model"],
                        optimizer_key=key,
                        storage_reader=DistributedReader(uri, self._store_config),
                    )
                    # An optimizer without state, such as plain SGD, leaves no trace of it in the checkpoint.
                    own_state = FullyShardedDataParallel.optim_state_dict_to_load(
                        optim_state_dict={"state": {}, **loaded[key]}, model=self.model, optim=optimizer
                    )
                    optimizer.load_state_dict(own_state)


class BucketModelParallelStrategy(_ShardedCheckpoints, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) whose checkpoints, distributed or full
    (`save_distributed_checkpoint`), are stored at bucket URIs. `async_save` is as in `BucketFSDPStrategy`."""

    _model_key = "state_dict"

    def _saves_shards(self) -> bool:
        return self._save_distributed_checkpoint

    def _load_shards(self, uri: str) -> None:
        assert self.model is not None
        assert self.lightning_module is not None
        state: dict[str, Any] = {"state_dict": dcp_state.get_model_state_dict(self.model)}
        load_sharded(state, uri, self._store_config)
        self.model.load_state_dict(state["state_dict"], strict=self.lightning_module.strict_loading)
        for index, optimizer in enumerate(self.optimizers):
            key = f"optimizer_{index}"
            state = {key: dcp_state.get_optimizer_state_dict(self.model, optimizer)}
            load_sharded(state, uri, self._store_config)
            options = dcp_state.StateDictOptions(cpu_offload=True)
            dcp_state.set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state[key], options=options)


def _split(path: str | Path) -> tuple[str, str]:
    parsed = uris.parse(uris.from_path(path))
    folder, _, name = parsed.key.rpartition("/")
    return parsed.root + folder, name
