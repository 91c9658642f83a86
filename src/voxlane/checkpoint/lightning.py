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
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from voxlane import uri as uris
from voxlane.checkpoint.async_save import AsyncSaver
from voxlane.checkpoint.collective import Ranks, quiet, unwrapped
from voxlane.checkpoint.distributed_metadata import METADATA
from voxlane.checkpoint.distributed_reader import DistributedReader, load_sharded
from voxlane.checkpoint.distributed_writer import save_sharded
from voxlane.checkpoint.lifecycle import find, remove
from voxlane.checkpoint.plain import Checkpoint, load_file
from voxlane.checkpoint.shared_reader import SharedReader
from voxlane.errors import IncompleteError, MissingExtraError, NotFoundError
from voxlane.store import Store, StoreConfig

try:
    from lightning.fabric.plugins.io import CheckpointIO
    from lightning.fabric.strategies.fsdp import _get_sharded_state_dict_context
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn

    from voxlane.checkpoint.filesystem import register_filesystem
except ImportError:
    raise MissingExtraError.of("lightning", "saving Lightning checkpoints") from None

_META = "meta.pt"
"""What a Lightning checkpoint holds beside weights and optimizer states; the name Lightning gives it."""

register_filesystem()


class BucketCheckpointIO(CheckpointIO):
    """Reads and writes Lightning's single-file checkpoints at URIs (and local paths), with checksums.

    On load, all ranks read together: each block comes from the bucket once. Pass `read_once=False` if you load on some
    ranks only.

    With a `config`, fsspec reaches buckets through voxlane with it, so that `ModelCheckpoint`, which looks its folder
    up through fsspec, finds the same server; construct this before the callback then.
    """

    def __init__(self, config: StoreConfig | None = None, *, read_once: bool = True) -> None:
        self._config = config
        self._read_once = read_once
        if config is not None:
            register_filesystem(config, override=True)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; it is published whole or not at all."""
        if storage_options is not None:
            raise TypeError("storage_options are not used: give BucketCheckpointIO a StoreConfig")
        folder, name = _split(path)
        Checkpoint(folder, self._config).save(checkpoint, name)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint onto the CPU, or where `map_location` says. It may run code only with
        `weights_only=False`."""
        folder, name = _split(path)
        loaded: dict[str, Any] = Checkpoint(folder, self._config).load(
            name,
            map_location="cpu" if map_location is None else map_location,
            weights_only=weights_only is not False,
            read_once=self._read_once,
        )
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, a file's or a sharded one; one that is gone is no error."""
        try:
            remove(find(uris.from_path(path), self._config))
        except NotFoundError as error:
            if type(error) is not NotFoundError:
                raise


class AsyncBucketCheckpointIO(AsyncCheckpointIO):
    """`BucketCheckpointIO` on a thread of its own. A checkpoint is removed only when every save that was begun before
    has been published; with Lightning's own wrapper the last good one can be deleted while its successor is still
    on its way. An error is raised by the next call, or at the end."""

    def __init__(self, config: StoreConfig | None = None, *, read_once: bool = True) -> None:
        super().__init__(BucketCheckpointIO(config, read_once=read_once))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint, after the saves that are under way, and not if one of them failed."""
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


class _Sharded:
    """Saving and loading for strategies whose state is spread over the ranks."""

    def _set_up_bucket(self, config: StoreConfig | None, async_save: bool) -> None:
        self._store_config = config
        self._saver = AsyncSaver(config) if async_save else None

    def _save_sharded(self: Any, checkpoint: dict[str, Any], path: Any, model_key: str) -> None:
        uri = uris.from_path(self.broadcast(os.fspath(path)))
        state = {model_key: checkpoint.pop("state_dict")}
        state |= {f"optimizer_{i}": s for i, s in enumerate(checkpoint.pop("optimizer_states", []))}
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        attachments = {_META: buffer.getvalue()}
        if self._saver is not None:
            self._saver.save(state, uri, attachments=attachments)
        else:
            save_sharded(state, uri, self._store_config, attachments=attachments)

    def _save_full(self: Any, checkpoint: dict[str, Any], path: Any) -> None:
        uri = uris.from_path(self.broadcast(os.fspath(path)))
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, uri)

    def _is_sharded(self: Any, uri: str) -> bool:
        parsed = uris.parse(uri)
        store = Store(uri, self._store_config)
        folder = parsed.key.rstrip("/") + "/"

        def look() -> bool:
            if store.exists(folder + METADATA):
                return True
            if not store.exists(parsed.key):
                raise IncompleteError(
                    "no complete checkpoint here", uri=uri, fix="See what there is: voxlane checkpoint ls"
                )
            return False

        ranks = Ranks.of()
        return ranks.once(look) if ranks is not None else look()

    def _load_meta(self: Any, uri: str, weights_only: bool | None) -> dict[str, Any]:
        data = DistributedReader(uri, self._store_config).attachment(_META)
        if data is None:  # written by Lightning's own strategy
            loaded: dict[str, Any] = Checkpoint(uri, self._store_config).load(
                _META, map_location="cpu", weights_only=weights_only is not False, read_once=True
            )
            return loaded
        meta: dict[str, Any] = load_file(io.BytesIO(data), f"{uri} [{_META}]", "cpu", weights_only is not False)
        return meta

    @contextmanager
    def _local_copy(self: Any, uri: str) -> Iterator[Path]:
        """A full checkpoint as a file on each node's disk, read from the bucket once for all of them: the loading code
        of Lightning maps it, so that the ranks of a node share its memory."""
        ranks = Ranks.of()
        parsed = uris.parse(uri)
        mine = tempfile.mkdtemp(prefix="voxlane-") if self.local_rank == 0 else None
        try:
            if ranks is None:
                assert mine is not None
                with Checkpoint(os.path.dirname(uri), self._store_config).reader(os.path.basename(uri)) as file:
                    file.save_to(f"{mine}/full.ckpt")
                yield Path(mine, "full.ckpt")
                return
            folders: list[Any] = [None] * ranks.size
            dist.all_gather_object(folders, (self.node_rank, mine), ranks.group)
            folder = next(path for node, path in folders if node == self.node_rank and path is not None)
            with SharedReader(Store(uri, self._store_config), parsed.key, ranks) as shared:
                shared.save_to(f"{mine}/full.ckpt" if mine is not None else None)
            self.barrier()
            yield Path(folder, "full.ckpt")
            self.barrier()
        finally:
            if mine is not None:
                shutil.rmtree(mine, ignore_errors=True)

    def _wait_for_save(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, after a save that is under way was published."""
        self._wait_for_save()
        super().remove_checkpoint(filepath)  # type: ignore[misc]

    def teardown(self) -> None:
        """Wait for the last save; raises if it failed."""
        if self._saver is not None:
            self._saver.close()
        super().teardown()  # type: ignore[misc]


class BucketFSDPStrategy(_Sharded, FSDPStrategy):
    """`FSDPStrategy` whose checkpoints, sharded or full (`state_dict_type`), live at bucket URIs.

    With `async_save` sharded checkpoints are written in the background; the next save waits for the one before, and
    nothing is removed before what replaces it is published.
    """

    def __init__(
        self, *args: Any, store_config: StoreConfig | None = None, async_save: bool = False, **kwargs: Any
    ) -> None:
        kwargs.setdefault("checkpoint_io", BucketCheckpointIO(store_config))
        super().__init__(*args, **kwargs)
        self._set_up_bucket(store_config, async_save)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """On the CPU, for tests and benchmarks: there FSDP wants to be told its device, which Lightning does not."""
        if self.root_device.type == "cpu":
            from torch.distributed.fsdp import FullyShardedDataParallel

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

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save at a URI, by all ranks together."""
        if self._state_dict_type == "sharded":
            self._save_sharded(checkpoint, filepath, "model")
        else:
            self._save_full(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load from a URI, sharded or full, by all ranks together; the number of ranks may be another."""
        self._wait_for_save()
        uri = uris.from_path(self.broadcast(os.fspath(checkpoint_path)))
        if not self._is_sharded(uri):
            with self._local_copy(uri) as path:
                return super().load_checkpoint(path, weights_only=weights_only)

        from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert self.model is not None
        assert self.lightning_module is not None
        sharded: Any = _get_sharded_state_dict_context(self.model)
        with sharded, quiet(), unwrapped(uri):
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
                    optimizer.load_state_dict(
                        FullyShardedDataParallel.optim_state_dict_to_load(
                            optim_state_dict=loaded[key], model=self.model, optim=optimizer
                        )
                    )
        return self._load_meta(uri, weights_only)


class BucketModelParallelStrategy(_Sharded, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism) whose checkpoints, distributed or full
    (`save_distributed_checkpoint`), live at bucket URIs. `async_save` as in `BucketFSDPStrategy`."""

    def __init__(
        self, *args: Any, store_config: StoreConfig | None = None, async_save: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoint_io = BucketCheckpointIO(store_config)
        self._set_up_bucket(store_config, async_save)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save at a URI, by all ranks together."""
        if self._save_distributed_checkpoint:
            self._save_sharded(checkpoint, filepath, "state_dict")
        else:
            self._save_full(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load from a URI, distributed or full, by all ranks together; the number of ranks may be another."""
        self._wait_for_save()
        uri = uris.from_path(self.broadcast(os.fspath(checkpoint_path)))
        if not self._is_sharded(uri):
            with self._local_copy(uri) as path:
                return super().load_checkpoint(path, weights_only=weights_only)

        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        assert self.model is not None
        assert self.lightning_module is not None
        state: dict[str, Any] = {"state_dict": get_model_state_dict(self.model)}
        load_sharded(state, uri, self._store_config)
        self.model.load_state_dict(state["state_dict"], strict=self.lightning_module.strict_loading)
        for index, optimizer in enumerate(self.optimizers):
            key = f"optimizer_{index}"
            state = {key: get_optimizer_state_dict(self.model, optimizer)}
            load_sharded(state, uri, self._store_config)
            set_optimizer_state_dict(
                self.model, optimizer, optim_state_dict=state[key], options=StateDictOptions(cpu_offload=True)
            )
        return self._load_meta(uri, weights_only)


def _split(path: str | Path) -> tuple[str, str]:
    parsed = uris.parse(uris.from_path(path))
    folder, _, name = parsed.key.rpartition("/")
    return parsed.root + folder, name
