"""The loader that feeds training: batches of patches, each sent from a loader process as one block of memory.

Every tensor that comes from another process costs a connection to it, with a handshake: five per batch took more of the
training process's time than a step with small patches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from voxlane.dataset import DataLoader
from voxlane.dataset.base import OrderedDataset


@dataclass
class PackedBatch:
    """A batch of patches in one block of memory; integers per patch are kept apart."""

    memory: Tensor
    """Bytes of the float32 images, then of the uint8 labels."""
    image_shape: tuple[int, ...]
    """Shape of the images: batch, channels, z, y, x."""
    integers: dict[str, list[int]]
    """Seed, row and position of each patch."""

    @classmethod
    def collate(cls, samples: list[dict[str, Any]]) -> PackedBatch:
        """Pack the samples of a PatchStream; inside a loader process, into memory that processes share."""
        image, label = samples[0]["image"], samples[0]["label"]
        assert image.dtype == torch.float32
        assert label.dtype == torch.uint8
        total_bytes = len(samples) * (image.numel() * 4 + label.numel())
        if torch.utils.data.get_worker_info() is None:
            memory = torch.empty(total_bytes, dtype=torch.uint8)
        else:
            shared = torch.UntypedStorage._new_shared(total_bytes)  # type: ignore[no-untyped-call]
            memory = torch.empty(0, dtype=torch.uint8).set_(shared)
        integers = {name: [sample[name] for sample in samples] for name in ("seed", "row", "position")}
        packed = cls(memory, (len(samples), *image.shape), integers)
        batch = packed.unpack()
        torch.stack([sample["image"] for sample in samples], out=batch["image"])
        torch.stack([sample["label"] for sample in samples], out=batch["label"])
        return packed

    def pin_memory(self) -> PackedBatch:
        """Return a copy in pinned memory, which a GPU reads asynchronously. torch's loader calls this."""
        return replace(self, memory=self.memory.pin_memory())

    def unpack(self) -> dict[str, Tensor]:
        """Return the batch as torch's default collation would; image and label are views of the block."""
        batch_size, _, *sides = self.image_shape
        image_bytes = math.prod(self.image_shape) * 4
        return {
            "image": self.memory[:image_bytes].view(torch.float32).view(self.image_shape),
            "label": self.memory[image_bytes:].view(batch_size, *sides),
            **{name: torch.tensor(values, dtype=torch.int64) for name, values in self.integers.items()},
        }


class PatchLoader(DataLoader):
    """The training loader. It counts the seconds its consumer waited for batches in `waited_s`."""

    def __init__(self, stream: OrderedDataset, batch_size: int, **loader_arguments: Any) -> None:
        super().__init__(stream, batch_size, collate_fn=PackedBatch.collate, **loader_arguments)
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        while True:
            started_at = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - started_at
            if batch is None:
                return
            yield batch.unpack()
