"""Whole volumes through a network by overlapping windows, and the masks that its logits mean.

Windows lie as nnU-Net lays them: evenly spaced, no further apart than the overlap asks, the last one flush with the
end. Each is weighed by a Gaussian around its centre. Because the windows form a grid and a Gaussian is a product over
axes, so is the sum of all weights at a voxel; every axis is divided by its own sum beforehand, and the windows add up
to the weighted mean without a volume of weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from voxlane.errors import ConfigError, RunError
from voxlane.volume.description import Description
from voxlane.volume.plan import Triple

ReadRegion = Callable[[Triple, Triple], Tensor]
"""(start, stop) in voxels (z, y, x), stop exclusive, within the volume, to a tensor (channels, z, y, x)."""
Slab = tuple[int, int, Tensor]
"""First slice, last slice plus one, and their logits (outputs, z, y, x)."""


def predict_windows(
    network: nn.Module,
    image: Tensor | ReadRegion,
    patch: Triple,
    *,
    shape: Triple | None = None,
    overlap: float = 0.5,
    batch: int = 1,
    mirror_axes: Sequence[int] = (),
    device: torch.device | str | None = None,
    accumulate_device: torch.device | str | None = None,
    result_device: torch.device | str = "cpu",
    result_dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    fill: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """The logits (outputs, z, y, x) of a whole volume, the weighted mean over the windows.

    Arguments are those of `predict_slabs`; `result_device` and `result_dtype` say where and how the result is kept.

    Memory: on `accumulate_device` one slab as high as a window, of 4 bytes a voxel and output; on `result_device` the
    result; on `device` the network and its activations for `batch` windows. A volume of 400 x 512 x 512 with three
    outputs and windows 128 high takes a slab of 0.40 GB and a result of 1.26 GB (float32) or 0.63 GB (float16); see
    `budget`. The image is the caller's: a function that reads regions need not hold it.
    """
    z, y, x = extent(image, shape)
    slabs = predict_slabs(
        network,
        image,
        patch,
        shape=shape,
        overlap=overlap,
        batch=batch,
        mirror_axes=mirror_axes,
        device=device,
        accumulate_device=accumulate_device,
        autocast=autocast,
        fill=fill,
        progress=progress,
    )
    result: Tensor | None = None
    for start, stop, logits in slabs:
        if result is None:
            result = torch.empty((logits.shape[0], z, y, x), dtype=result_dtype, device=result_device)
        result[:, start:stop] = logits
    assert result is not None
    return result


@torch.no_grad()
def predict_slabs(
    network: nn.Module,
    image: Tensor | ReadRegion,
    patch: Triple,
    *,
    shape: Triple | None = None,
    overlap: float = 0.5,
    batch: int = 1,
    mirror_axes: Sequence[int] = (),
    device: torch.device | str | None = None,
    accumulate_device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    fill: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Slab]:
    """Finished slabs of logits, in order and without gaps; each is valid until the next one is asked for.

    image: a tensor (channels, z, y, x) on any device, or a function that reads a region, with `shape` (z, y, x).
    patch: size of a window; a volume that is smaller is padded with `fill` on both sides.
    overlap: share of a window that the next one covers again, at least 0 and below 1.
    batch: windows in one pass; those of one pass lie at the same height.
    mirror_axes: of 0, 1, 2 (z, y, x); logits are averaged over all mirrorings along them.
    device: where the network runs; by default where its parameters are.
    accumulate_device: where windows are added up and slabs come from, by default `device`.
    autocast: a lower precision for the network on a GPU; sums are float32 always, and so is the network on a CPU.
    progress: called with the windows done and those in all.

    The network is in evaluation mode meanwhile. Logits that are not finite raise RunError.
    """
    size = extent(image, shape)
    check(patch, overlap, batch, mirror_axes)
    device = torch.device(device) if device is not None else next(network.parameters()).device
    home = torch.device(accumulate_device) if accumulate_device is not None else device
    layout = Layout.of(size, patch, overlap)
    heights = layout.starts[0]
    row = list(itertools.product(*(enumerate(starts) for starts in layout.starts[1:])))
    read = reader(image)
    weights = [[w.to(home) for w in axis] for axis in layout.weights]
    was_training = network.training
    network.eval()
    done, sums = 0, torch.empty(0)
    try:
        for level, z in enumerate(heights):
            for places in (row[i : i + batch] for i in range(0, len(row), batch)):
                windows = [padded(read, layout, (z, y, x), fill).to(device) for (_, y), (_, x) in places]
                logits = forward(network, torch.stack(windows).float(), mirror_axes, autocast).to(home, torch.float32)
                if not sums.numel():
                    sums = torch.zeros((logits.shape[1], patch[0], *layout.padded[1:]), device=home)
                for ((j, y), (k, x)), window in zip(places, logits, strict=True):
                    window *= weights[0][level][:, None, None] * (weights[1][j][:, None] * weights[2][k])
                    sums[:, :, y : y + patch[1], x : x + patch[2]] += window
                done += len(places)
                if progress is not None:
                    progress(done, len(heights) * len(row))
            following = heights[level + 1] if level + 1 < len(heights) else layout.padded[0]
            yield from finished(sums, layout, z, following)
            shift(sums, following - z)
    finally:
        network.train(was_training)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where windows lie in a volume, and how much each weighs."""

    size: Triple
    """The volume."""
    patch: Triple
    """A window."""
    starts: tuple[tuple[int, ...], ...]
    """First voxel of the windows along each axis, in the padded volume."""
    weights: tuple[tuple[Tensor, ...], ...]
    """One vector a window along each axis. At every voxel the products over axes sum to 1 over the windows."""

    @classmethod
    def of(cls, size: Triple, patch: Triple, overlap: float) -> Layout:
        """Plan the windows; does no work on voxels."""
        room = tuple(max(s, p) for s, p in zip(size, patch, strict=True))
        starts = tuple(window_starts(r, p, overlap) for r, p in zip(room, patch, strict=True))
        weights = tuple(shares(s, r, p) for s, r, p in zip(starts, room, patch, strict=True))
        return cls(size, patch, starts, weights)

    @property
    def padded(self) -> Triple:
        """The volume, at least as large as a window."""
        z, y, x = (max(s, p) for s, p in zip(self.size, self.patch, strict=True))
        return z, y, x

    @property
    def before(self) -> Triple:
        """Voxels of padding before the volume; after it there are as many, or one more."""
        z, y, x = ((p - s) // 2 for s, p in zip(self.size, self.padded, strict=True))
        return z, y, x


def window_starts(size: int, patch: int, overlap: float) -> tuple[int, ...]:
    """Evenly spaced, no further than (1 - overlap) of a window apart, from 0 to flush with the end; each once, also
    where the overlap asks for steps below one voxel."""
    count = math.ceil((size - patch) / (patch * (1 - overlap))) + 1
    return tuple(dict.fromkeys(round((size - patch) / max(count - 1, 1) * i) for i in range(count)))


def gaussian(patch: int) -> Tensor:
    """Weights along one axis of a window: 1 in the middle, a standard deviation of an eighth of it."""
    distance = torch.arange(patch, dtype=torch.float64) - patch // 2
    return torch.exp(-(distance**2) / (2 * (patch / 8) ** 2))


def shares(starts: Sequence[int], size: int, patch: int) -> tuple[Tensor, ...]:
    """Each window's share of the weight at its voxels along one axis."""
    weight, total = gaussian(patch), torch.zeros(size, dtype=torch.float64)
    for start in starts:
        total[start : start + patch] += weight
    return tuple((weight / total[start : start + patch]).float() for start in starts)


def budget(shape: Triple, patch: Triple, outputs: int, result_dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """Bytes of the slab on `accumulate_device` and of the result that `predict_windows` needs for a volume."""
    across = [max(s, p) for s, p in zip(shape[1:], patch[1:], strict=True)]
    slab = outputs * patch[0] * math.prod(across) * 4
    return slab, outputs * math.prod(shape) * result_dtype.itemsize


def to_mask(logits: Tensor, description: Description, *, probabilities: bool = False) -> Tensor:
    """The uint8 mask (z, y, x) of label values that logits (outputs, z, y, x) mean, or `probabilities` of the same
    shape. Classes: the largest. Regions: those above one half, later regions over earlier ones."""
    if logits.shape[0] != description.outputs:
        raise ConfigError(f"{logits.shape[0]} outputs for the {description.outputs} of {description.name}")
    mask = torch.zeros(logits.shape[1:], dtype=torch.uint8, device=logits.device)
    if description.regions:
        for chance, value in zip(logits, description.mask_values, strict=True):
            mask[chance > (0.5 if probabilities else 0.0)] = value
        return mask
    # The first of the largest, as argmax, whose reduction over the outermost axis is many times slower on a CPU; by
    # slices, so that what is in between stays small. Values rise with the outputs, so a later winner is the larger.
    for z in range(mask.shape[0]):
        best = logits[0, z].clone()
        for output, value in enumerate(description.mask_values, 1):
            torch.maximum(mask[z], (logits[output, z] > best).to(torch.uint8) * value, out=mask[z])
            torch.maximum(best, logits[output, z], out=best)
    return mask


def extent(image: Tensor | ReadRegion, shape: Triple | None) -> Triple:
    """Size of the volume (z, y, x)."""
    if isinstance(image, Tensor):
        if image.ndim != 4:
            raise ConfigError(f"an image has four axes (channels, z, y, x), not {image.ndim}")
        z, y, x = image.shape[1:]
        return z, y, x
    if shape is None:
        raise ConfigError("shape: needed with a function that reads regions")
    return shape


def check(patch: Triple, overlap: float, batch: int, mirror_axes: Sequence[int]) -> None:
    """Raise ConfigError for what no window can have."""
    if min(patch) < 1:
        raise ConfigError(f"patch: {list(patch)} has a side below 1")
    if not 0 <= overlap < 1:
        raise ConfigError(f"overlap: at least 0 and below 1, not {overlap}")
    if batch < 1:
        raise ConfigError(f"batch: at least 1, not {batch}")
    if len(set(mirror_axes)) != len(mirror_axes) or not set(mirror_axes) <= {0, 1, 2}:
        raise ConfigError(f"mirror_axes: of 0, 1 and 2, each once, not {list(mirror_axes)}")


def reader(image: Tensor | ReadRegion) -> ReadRegion:
    """A tensor as a function that reads a region of it."""
    if not isinstance(image, Tensor):
        return image
    return lambda start, stop: image[:, start[0] : stop[0], start[1] : stop[1], start[2] : stop[2]]


def padded(read: ReadRegion, layout: Layout, place: Triple, fill: float) -> Tensor:
    """The window at `place` of the padded volume."""
    start = [max(p - b, 0) for p, b in zip(place, layout.before, strict=True)]
    stop = [min(p - b + n, s) for p, b, n, s in zip(place, layout.before, layout.patch, layout.size, strict=True)]
    window = read((start[0], start[1], start[2]), (stop[0], stop[1], stop[2]))
    below = [a - (p - b) for a, p, b in zip(start, place, layout.before, strict=True)]
    above = [n - b - w for n, b, w in zip(layout.patch, below, window.shape[1:], strict=True)]
    if not any(below) and not any(above):
        return window
    pads = [n for pair in zip(reversed(below), reversed(above), strict=True) for n in pair]
    return functional.pad(window, pads, value=fill)


def forward(network: nn.Module, windows: Tensor, mirror_axes: Sequence[int], autocast: torch.dtype | None) -> Tensor:
    """Logits of a batch of windows, averaged over mirrorings."""
    kind = windows.device.type
    # Not on the CPU: oneDNN's bfloat16 kernels for transposed convolutions end the process with an illegal instruction
    # on processors with AMX (torch 2.13).
    lower = autocast is not None and kind != "cpu"
    context = torch.autocast(kind, autocast) if lower else contextlib.nullcontext()
    total: Tensor | None = None
    flips = [axes for n in range(len(mirror_axes) + 1) for axes in itertools.combinations(mirror_axes, n)]
    try:
        for axes in flips:
            dims = [axis + 2 for axis in axes]
            with context:
                logits = network(windows.flip(dims) if dims else windows)
            logits = (logits.flip(dims) if dims else logits).float()
            total = logits if total is None else total.add_(logits)
    except torch.OutOfMemoryError:
        count, shape = windows.shape[0], " x ".join(str(n) for n in windows.shape[2:])
        fix = "Lower the number of windows in a batch" if count > 1 else "Predict on the CPU, or on a larger GPU"
        raise RunError(f"the GPU has not enough memory for {count} windows of {shape} voxels", fix=fix) from None
    assert total is not None
    return total.div_(len(flips)) if len(flips) > 1 else total


def finished(sums: Tensor, layout: Layout, z: int, following: int) -> Iterator[Slab]:
    """The slices from z up to the next windows, which nothing more is added to, without their padding."""
    depth, height, width = layout.size
    before = layout.before
    start, stop = max(z - before[0], 0), min(following - before[0], depth)
    first = start + before[0] - z
    slab = sums[:, first : first + stop - start, before[1] : before[1] + height, before[2] : before[2] + width]
    if not slab.isfinite().all():
        raise RunError("the network's output is not finite", fix="Predict in float32 or bfloat16, or train again")
    yield start, stop, slab


def shift(sums: Tensor, by: int) -> None:
    """Move slices down by `by` and clear those that come in, in place: in steps of `by`, which do not overlap."""
    height = sums.shape[1]
    for low in range(by, height, by):
        piece = sums[:, low : low + by]
        sums[:, low - by : low - by + piece.shape[1]] = piece
    sums[:, height - by :] = 0
