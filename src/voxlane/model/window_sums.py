"""Sums of overlapping windows in a slab as high as a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from voxlane.errors import RunError

if TYPE_CHECKING:
    from voxlane.model.sliding_window import WindowGrid

_NNUNET_PEAK = 10.0
"""Weight that nnU-Net gives the centre of a window, so that more of the others can be told from zero in float16."""


class WindowSums(Protocol):
    """Adds up the logits of windows, and hands out the slices to which no window is added any more."""

    def add(self, window: Tensor, indices: tuple[int, int, int]) -> None:
        """Add the logits (outputs, z, y, x) of a window with these indices (z, y, x) in the grid of windows. Windows
        are added level by level, in the order of their indices."""

    def take_slab(self, z: int, next_z: int) -> tuple[int, int, Tensor]:
        """Return the slices from the level at z up to that at next_z, which are complete: the first slice without
        padding, the last plus one, and their mean logits, which are valid until the next window is added."""


class NormalisedSums:
    """The weighted mean in float32. Weights were divided by their sums beforehand (see `voxlane.model.sliding_window`),
    so nothing but the slab is held."""

    def __init__(self, layout: WindowGrid, outputs: int, device: torch.device) -> None:
        self._layout = layout
        self._weights = [[weight.to(device) for weight in axis] for axis in layout.weights]
        self._sums = torch.zeros((outputs, layout.patch[0], *layout.padded[1:]), device=device)
        self._taken = 0

    def add(self, window: Tensor, indices: tuple[int, int, int]) -> None:
        """See `WindowSums`."""
        self._forget_taken()
        z, y, x = (weights[index] for weights, index in zip(self._weights, indices, strict=True))
        region = window_region(self._layout, indices)
        self._sums[(slice(None), *region)].addcmul_(window, z[:, None, None] * (y[:, None] * x))

    def take_slab(self, z: int, next_z: int) -> tuple[int, int, Tensor]:
        """See `WindowSums`."""
        self._taken = next_z - z
        start, stop, inside = unpadded_slices(self._layout, z, next_z)
        return start, stop, require_finite(self._sums[(slice(None), *inside)])

    def _forget_taken(self) -> None:
        if self._taken:
            shift_slices(self._sums, self._taken)
            self._taken = 0


class Float16Sums:
    """The weighted mean with the rounding of nnU-Net's prediction, which adds up weighted logits and weights in float16
    and divides them. Near the edges of a volume, weights are so small that this rounding changes masks."""

    def __init__(self, layout: WindowGrid, outputs: int, device: torch.device) -> None:
        self._layout = layout
        self._weight = nnunet_weight(layout.patch).to(device)
        slab = (layout.patch[0], *layout.padded[1:])
        self._sums = torch.zeros((outputs, *slab), dtype=torch.float16, device=device)
        self._weight_sums = torch.zeros(slab, dtype=torch.float16, device=device)
        self._taken = 0

    def add(self, window: Tensor, indices: tuple[int, int, int]) -> None:
        """See `WindowSums`."""
        self._forget_taken()
        region = window_region(self._layout, indices)
        self._sums[(slice(None), *region)] += window * self._weight
        self._weight_sums[region] += self._weight

    def take_slab(self, z: int, next_z: int) -> tuple[int, int, Tensor]:
        """See `WindowSums`."""
        self._taken = next_z - z
        start, stop, inside = unpadded_slices(self._layout, z, next_z)
        return start, stop, require_finite(self._sums[(slice(None), *inside)] / self._weight_sums[inside])

    def _forget_taken(self) -> None:
        if self._taken:
            shift_slices(self._sums, self._taken)
            shift_slices(self._weight_sums[None], self._taken)
            self._taken = 0


def nnunet_weight(patch: tuple[int, int, int]) -> Tensor:
    """Return nnU-Net's weights (z, y, x) of a window in float16: a Gaussian, with the smallest number above zero where
    that would be rounded to zero."""
    z, y, x = (torch.exp(-((torch.arange(n, dtype=torch.float64) - n // 2) ** 2) / (2 * (n / 8) ** 2)) for n in patch)
    weight = (_NNUNET_PEAK * z[:, None, None] * (y[:, None] * x)).half()
    weight[weight == 0] = weight[weight > 0].min()
    return weight


def window_region(layout: WindowGrid, indices: tuple[int, int, int]) -> tuple[slice, slice, slice]:
    """Return the voxels (z, y, x) of a window in the slab of its level."""
    _, y, x = (starts[index] for starts, index in zip(layout.starts, indices, strict=True))
    return slice(None), slice(y, y + layout.patch[1]), slice(x, x + layout.patch[2])


def unpadded_slices(layout: WindowGrid, z: int, next_z: int) -> tuple[int, int, tuple[slice, slice, slice]]:
    """Return the first slice of the volume from the level at z up to that at next_z, the last plus one, and their
    voxels (z, y, x) in the slab, without padding."""
    depth, height, width = layout.size
    before = layout.before
    start, stop = max(z - before[0], 0), min(next_z - before[0], depth)
    first = start + before[0] - z
    rows, columns = slice(before[1], before[1] + height), slice(before[2], before[2] + width)
    return start, stop, (slice(first, first + stop - start), rows, columns)


def require_finite(logits: Tensor) -> Tensor:
    """Return the logits; raise RunError unless all are finite."""
    if not logits.isfinite().all():
        raise RunError("the network's output is not finite", fix="Predict in float32 or bfloat16, or train again")
    return logits


def shift_slices(sums: Tensor, by: int, fill: float = 0.0) -> None:
    """Move slices (_, z, y, x) down by `by` in place and fill the new ones; steps of `by` do not overlap."""
    height = sums.shape[1]
    for low in range(by, height, by):
        piece = sums[:, low : low + by]
        sums[:, low - by : low - by + piece.shape[1]] = piece
    sums[:, height - by :] = fill
