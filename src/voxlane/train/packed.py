"""A batch of patches as one block of memory on its way from a loader's process.

Every tensor that comes from another process costs a connection to it, with a handshake: five a batch took more of the
training process's time than a step with small patches does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

_NUMBERS = ("seed", "row", "position")


class Packed:
    """Images and labels one after the other, and each patch's numbers."""

    def __init__(self, memory: Tensor, image: tuple[int, ...], numbers: dict[str, list[int]]) -> None:
        """`memory`: bytes, of float32 images of the shape `image` (batch, channels, z, y, x) and labels of one each."""
        self._memory = memory
        self._image = image
        self._numbers = numbers

    @classmethod
    def of(cls, samples: list[dict[str, Any]]) -> Packed:
        """A batch of a PatchStream's samples; in memory that processes share, if this is one of a loader's."""
        image, label = samples[0]["image"], samples[0]["label"]
        assert image.dtype == torch.float32
        assert label.dtype == torch.uint8
        split = len(samples) * image.numel() * 4
        total = split + len(samples) * label.numel()
        if torch.utils.data.get_worker_info() is None:
            memory = torch.empty(total, dtype=torch.uint8)
        else:
            memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(total))  # type: ignore[no-untyped-call]
        packed = cls(
            memory,
            (len(samples), *image.shape),
            {name: [sample[name] for sample in samples] for name in _NUMBERS},
        )
        batch = packed.opened()
        torch.stack([sample["image"] for sample in samples], out=batch["image"])
        torch.stack([sample["label"] for sample in samples], out=batch["label"])
        return packed

    def pin_memory(self) -> Packed:
        """The same in memory that a GPU reads while the processor goes on; torch's loader calls it."""
        return Packed(self._memory.pin_memory(), self._image, self._numbers)

    def opened(self) -> dict[str, Tensor]:
        """The batch as torch's own collation makes it; image and label are views."""
        batch, _, *sides = self._image
        split = math.prod(self._image) * 4
        return {
            "image": self._memory[:split].view(torch.float32).view(self._image),
            "label": self._memory[split:].view(batch, *sides),
            **{name: torch.tensor(values, dtype=torch.int64) for name, values in self._numbers.items()},
        }
