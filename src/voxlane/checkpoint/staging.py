"""A copy of a state dict that training can no longer change, taken before an async save.

torch's own stager does not take the ShardedTensors of FSDP. This one takes all kinds, and uses its memory again from
one save to the next, since getting fresh memory takes longer than filling it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

_Path = tuple[Any, ...]


class Stager(AsyncStager):
    """Copies state dicts to the CPU; a copy is good until the next one is taken."""

    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: in memory that another process can map."""
        self._shared = shared
        self._kept: dict[_Path, torch.Tensor] = {}
        self._used: set[_Path] = set()

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: when `stage` returns, all is copied."""
        return False

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """A copy of the state, on the CPU."""
        self._used = set()
        staged: dict[str, Any] = self._copy(state_dict, ())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from the device were only begun
        self._kept = {path: kept for path, kept in self._kept.items() if path in self._used}
        return staged

    def close(self) -> None:
        """Free the memory."""
        self._kept.clear()

    def _copy(self, value: Any, path: _Path) -> Any:
        if isinstance(value, ShardedTensor):
            shards = [Shard(self._tensor(s.tensor, (*path, i)), s.metadata) for i, s in enumerate(value.local_shards())]
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                shards, sharded_tensor_metadata=value.metadata(), process_group=value._process_group
            )
        if isinstance(value, DTensor):
            local = self._tensor(value.to_local(), path)
            return DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            return {key: self._copy(item, (*path, key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copy(item, (*path, i)) for i, item in enumerate(value))
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor, path: _Path) -> torch.Tensor:
        tensor = tensor.detach()
        self._used.add(path)
        kept = self._kept.get(path)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda" and not self._shared
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            if self._shared:
                kept.share_memory_()  # type: ignore[no-untyped-call]
            self._kept[path] = kept
        kept.copy_(tensor, non_blocking=tensor.device.type == "cuda")
        return kept
