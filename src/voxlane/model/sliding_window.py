"""Prediction of whole volumes by overlapping windows, and conversion of logits to masks.

Windows are placed as in nnU-Net: evenly spaced, no further apart than the overlap permits, the last one flush with the
end. Each is weighted by a Gaussian around its centre. Because windows form a grid and a Gaussian is a product over
axes, the sum of all weights at a voxel is a product too. The weights along each axis are divided by their sum
beforehand, so the windows add up to the weighted mean without a volume of weights.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from voxlane.errors import ConfigError, RunError
from voxlane.model.window_sums import Float16Sums, NormalisedSums, WindowSums, shift_slices

if TYPE_CHECKING:  # windows can be predicted without the dependencies of these
    from voxlane.volume.description import Description
    from voxlane.volume.plan import Triple


def predict_windows(
    network: nn.Module,
    image: Tensor,
    patch: Triple,
    *,
    overlap: float = 0.5,
    batch: int = 1,
    mirror_axes: Sequence[int] = (),
    device: torch.device | str | None = None,
    result_device: torch.device | str = "cpu",
    result_dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    fill: float = 0.0,
    float16_sums: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Predict the logits (outputs, z, y, x) of a whole volume: the weighted mean over the windows.

    image: a tensor (channels, z, y, x) on any device.
    patch: size of a window; a smaller volume is padded with `fill` on both sides.
    overlap: fraction of a window that the next one covers again, at least 0 and below 1.
    batch: windows in one forward pass, all at the same height.
    mirror_axes: axes of 0, 1, 2 (z, y, x); logits are averaged over all mirrorings along them.
    device: device of the network, by default that of its parameters; windows are added up there.
    result_device, result_dtype: device and dtype of the result.
    autocast: lower precision for the network on a GPU; sums, and the network on a CPU, are always float32.
    float16_sums: round as nnU-Net does, which adds windows up in float16 (see `Float16Sums`).
    progress: called with the number of finished windows and of all windows.

    The network is in evaluation mode meanwhile. Raises RunError if logits are not finite.

    Memory: on `device` the network, its activations for `batch` windows, and one slab as high as a window, with 4 bytes
    per voxel and output; on `result_device` the result. A GPU also holds data in transfer: one and a half slabs of the
    image and about half a slab of the result. A volume of 400 x 512 x 512 with three outputs and windows 128 high needs
    a slab of 0.40 GB and a result of 1.26 GB (float32) or 0.63 GB (float16).
    """
    if image.ndim != 4:
        raise ConfigError(f"image: expected four axes (channels, z, y, x), got {image.ndim}")
    if min(patch) < 1:
        raise ConfigError(f"patch: expected sides of at least 1, got {list(patch)}")
    if not 0 <= overlap < 1:
        raise ConfigError(f"overlap: expected at least 0 and below 1, got {overlap}")
    if batch < 1:
        raise ConfigError(f"batch: expected at least 1, got {batch}")
    if len(set(mirror_axes)) != len(mirror_axes) or not set(mirror_axes) <= {0, 1, 2}:
        raise ConfigError(f"mirror_axes: expected different axes of 0, 1 and 2, got {list(mirror_axes)}")
    device = torch.device(device) if device is not None else next(network.parameters()).device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    z, y, x = image.shape[1:]
    layout = WindowGrid.of((z, y, x), patch, overlap)
    source = WindowSource.of(image, layout, fill, device)
    result: Tensor | None = None
    with SlabCopier() as copier:
        for start, stop, logits in predict_slabs(
            network, source, batch, mirror_axes, autocast, progress, float16_sums=float16_sums
        ):
            if result is None:
                result = torch.empty((logits.shape[0], z, y, x), dtype=result_dtype, device=result_device)
            copier.copy(logits, result[:, start:stop])
    assert result is not None
    return result


@torch.no_grad()
def predict_slabs(
    network: nn.Module,
    source: WindowSource,
    batch: int = 1,
    mirror_axes: Sequence[int] = (),
    autocast: torch.dtype | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    float16_sums: bool = False,
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield finished slabs in order and without gaps: first slice, last slice plus one, and the logits (outputs, z, y,
    x) of these slices, which are valid until the next slab is requested."""
    layout, device = source.layout, source.device
    heights = layout.starts[0]
    row_windows = list(itertools.product(*(enumerate(starts) for starts in layout.starts[1:])))
    passes = [row_windows[i : i + batch] for i in range(0, len(row_windows), batch)]
    positions = [[(y, x) for (_, y), (_, x) in each] for each in passes]
    done = 0
    sums: WindowSums | None = None
    was_training = network.training
    network.eval()
    try:
        for level, z in enumerate(heights):
            for each, windows in zip(passes, source.at(level, positions), strict=True):
                logits = predict_batch(network, match_memory_format(network, windows), mirror_axes, autocast)
                if sums is None:
                    sums = (Float16Sums if float16_sums else NormalisedSums)(layout, logits.shape[1], device)
                for ((j, _), (k, _)), window in zip(each, logits, strict=True):
                    sums.add(window, (level, j, k))
                done += len(each)
                if progress is not None:
                    progress(done, len(heights) * len(row_windows))
            next_z = heights[level + 1] if level + 1 < len(heights) else layout.padded[0]
            assert sums is not None
            yield sums.take_slab(z, next_z)
    finally:
        source.close()
        network.train(was_training)


class WindowGrid(NamedTuple):
    """Positions and weights of the windows in a volume."""

    size: Triple
    """Voxels of the volume."""
    patch: Triple
    """Voxels of a window."""
    padded: Triple
    """Voxels of the padded volume, which is at least as large as a window."""
    before: Triple
    """Voxels of padding before the volume; after it there are as many or one more."""
    starts: tuple[tuple[int, ...], ...]
    """First voxel of the windows along each axis, in the padded volume."""
    weights: tuple[tuple[Tensor, ...], ...]
    """Vector of weights of each window along each axis. At every voxel the products over axes sum to 1."""

    @classmethod
    def of(cls, size: Triple, patch: Triple, overlap: float) -> WindowGrid:
        """Plan the windows, without touching voxels."""
        z, y, x = padded = (max(size[0], patch[0]), max(size[1], patch[1]), max(size[2], patch[2]))
        before = (z - size[0]) // 2, (y - size[1]) // 2, (x - size[2]) // 2
        starts = tuple(window_starts(n, p, overlap) for n, p in zip(padded, patch, strict=True))
        weights = tuple(normalised_weights(s, n, p) for s, n, p in zip(starts, padded, patch, strict=True))
        return cls(size, patch, padded, before, starts, weights)


def window_starts(size: int, patch: int, overlap: float) -> tuple[int, ...]:
    """Return evenly spaced starts, at most (1 - overlap) of a window apart, from 0 to flush with the end, without
    duplicates even if the overlap requires steps below one voxel."""
    count = math.ceil((size - patch) / (patch * (1 - overlap))) + 1
    return tuple(dict.fromkeys(round((size - patch) / max(count - 1, 1) * i) for i in range(count)))


def normalised_weights(starts: Sequence[int], size: int, patch: int) -> tuple[Tensor, ...]:
    """Return each window's weights along one axis, divided by the sum over all windows. They are a Gaussian around the
    window's centre with a standard deviation of an eighth of the window."""
    distance = torch.arange(patch, dtype=torch.float64) - patch // 2
    weight, total = torch.exp(-(distance**2) / (2 * (patch / 8) ** 2)), torch.zeros(size, dtype=torch.float64)
    for start in starts:
        total[start : start + patch] += weight
    return tuple((weight / total[start : start + patch]).float() for start in starts)


def to_mask(logits: Tensor, description: Description, *, probabilities: bool = False) -> Tensor:
    """Convert logits, or `probabilities`, (outputs, z, y, x) to a uint8 mask (z, y, x) of label values.

    Classes: the largest. Regions: those with a probability above one half; later regions overwrite earlier ones.
    """
    if logits.shape[0] != description.outputs:
        raise ConfigError(f"expected {description.outputs} outputs for {description.name}, got {logits.shape[0]}")
    mask = torch.zeros(logits.shape[1:], dtype=torch.uint8, device=logits.device)
    if description.regions:
        for chance, value in zip(logits, description.mask_values, strict=True):
            mask[chance > (0.5 if probabilities else 0.0)] = value
        return mask
    # The first of the largest, like argmax, whose reduction over the outermost axis is many times slower on a CPU. By
    # slices, to keep intermediate tensors small. Values increase with the outputs, so a later winner is the larger.
    slices = 16 if mask.is_cuda else 1
    for z in (slice(start, start + slices) for start in range(0, mask.shape[0], slices)):
        best = logits[0, z].clone()
        for output, value in enumerate(description.mask_values, 1):
            torch.maximum(mask[z], (logits[output, z] > best).to(torch.uint8) * value, out=mask[z])
            torch.maximum(best, logits[output, z], out=best)
    return mask


class WindowSource:
    """Supplies the network with windows that are cut directly out of an image."""

    def __init__(self, image: Tensor, layout: WindowGrid, fill: float, device: torch.device) -> None:
        self.image, self.layout, self.fill, self.device = image, layout, fill, device

    @staticmethod
    def of(image: Tensor, layout: WindowGrid, fill: float, device: torch.device) -> WindowSource:
        """Choose the source for an image: directly from its device, or for a GPU fetched while it computes."""
        direct = device.type != "cuda" or image.device == device
        return (WindowSource if direct else SlabWindows)(image, layout, fill, device)

    def at(self, level: int, passes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Tensor]:
        """Yield the windows (window, channels, z, y, x) of each pass, float32, on the device.

        Levels must be requested in order; `passes` holds the positions (y, x) of the windows of each pass.
        """
        z = self.layout.starts[0][level]
        for positions in passes:
            windows = [cut_padded_window(self.image, self.layout, (z, y, x), self.fill) for y, x in positions]
            yield torch.stack(windows).to(self.device).float()

    def close(self) -> None:
        """Stop all transfers."""


class CopyStream:
    """A thread with its own CUDA stream, for copies in parallel to the GPU's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="voxlane-windows")

    def start(self, work: Callable[[], Tensor | None]) -> Future[tuple[Tensor | None, Any]]:
        """Start `work` after everything that has been launched on the current stream."""
        before: Any = torch.cuda.current_stream(self.device).record_event()

        def run() -> tuple[Tensor | None, Any]:
            with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                self._stream.wait_event(before)
                return work(), self._stream.record_event()

        return self._thread.submit(run)

    def finish(self, started: Future[tuple[Tensor | None, Any]]) -> Tensor | None:
        """Return the result of started work, for use on the current stream."""
        result, done = started.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        if result is not None and result.is_cuda:
            result.record_stream(current)
        return result

    def close(self) -> None:
        """Wait for started work, and start no more."""
        self._thread.shutdown(cancel_futures=True)


class SlabWindows(WindowSource):
    """Copies every slice of an image in host memory to the GPU once, those of the next level while windows of this one
    are predicted, and extracts windows on the GPU."""

    def __init__(self, image: Tensor, layout: WindowGrid, fill: float, device: torch.device) -> None:
        super().__init__(image, layout, fill, device)
        self._copies = CopyStream(device)
        shape = (image.shape[0], layout.patch[0], *layout.padded[1:])
        self._slab = torch.full(shape, fill, dtype=torch.float32, device=device)
        self._upcoming = self._fetch(0)

    def _new_slices(self, level: int) -> tuple[int, int]:
        """Return the first slice of a level that the previous level lacks, and the last plus one."""
        starts, height = self.layout.starts[0], self.layout.patch[0]
        before = starts[level - 1] + height if level else 0
        return before, min(starts[level] + height, self.layout.size[0])

    def _fetch(self, level: int) -> Future[tuple[Tensor | None, Any]]:
        start, stop = self._new_slices(level)
        return self._copies.start(lambda: self.image[:, start:stop].to(self.device))

    def at(self, level: int, passes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Tensor]:
        """See `WindowSource`."""
        slices = self._copies.finish(self._upcoming)
        assert slices is not None
        _, height, width = self.layout.size
        up, low, left = self.layout.before
        first = up if level == 0 else self.layout.patch[0] - slices.shape[1]
        if level:
            shift_slices(self._slab, slices.shape[1], self.fill)
        self._slab[:, first : first + slices.shape[1], low : low + height, left : left + width] = slices
        del slices
        if level + 1 < len(self.layout.starts[0]):
            self._upcoming = self._fetch(level + 1)
        _, patch_y, patch_x = self.layout.patch
        for positions in passes:
            yield torch.stack([self._slab[:, :, y : y + patch_y, x : x + patch_x] for y, x in positions])

    def close(self) -> None:
        """See `WindowSource`."""
        self._copies.close()


class SlabCopier:
    """Copies slabs to the result; from a GPU to the host while the next slab is predicted."""

    def __init__(self) -> None:
        self._copies: CopyStream | None = None
        self._started: Future[tuple[Tensor | None, Any]] | None = None

    def __enter__(self) -> SlabCopier:
        return self

    def copy(self, slab: Tensor, result: Tensor) -> None:
        """Copy a slab (outputs, z, y, x) to `result`; `slab` may be overwritten when this returns."""
        if not (slab.is_cuda and result.device.type == "cpu"):
            result.copy_(slab)
            return
        if self._copies is None:
            self._copies = CopyStream(slab.device)
        piece = slab.to(result.dtype, copy=True)
        self._wait()

        def fetch() -> None:
            for target, output in zip(result, piece, strict=True):  # each output is contiguous in memory
                target.copy_(output)

        self._started = self._copies.start(fetch)

    def _wait(self) -> None:
        if self._started is not None:
            self._started.result()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:  # before closing, which cancels work that has not started
                self._wait()
        finally:
            if self._copies is not None:
                self._copies.close()


def match_memory_format(network: nn.Module, windows: Tensor) -> Tensor:
    """Return the windows in channels-last format if the network's weights are."""
    if windows.is_cuda and windows.shape[1] > 1:
        weight = next((p for p in network.parameters() if p.ndim == 5 and p.shape[1] > 1), None)
        if weight is not None and weight.is_contiguous(memory_format=torch.channels_last_3d):
            return windows.contiguous(memory_format=torch.channels_last_3d)
    return windows


def cut_padded_window(image: Tensor, layout: WindowGrid, position: Triple, fill: float) -> Tensor:
    """Cut the window at `position` of the padded volume out of the image."""
    starts = [p - b for p, b in zip(position, layout.before, strict=True)]
    below = [max(-start, 0) for start in starts]
    z, y, x = (
        slice(max(start, 0), min(start + n, size))
        for start, n, size in zip(starts, layout.patch, layout.size, strict=True)
    )
    window = image[:, z, y, x]
    above = [n - b - w for n, b, w in zip(layout.patch, below, window.shape[1:], strict=True)]
    if not any(below) and not any(above):
        return window
    pads = [n for pair in zip(reversed(below), reversed(above), strict=True) for n in pair]
    return functional.pad(window, pads, value=fill)


def predict_batch(
    network: nn.Module, windows: Tensor, mirror_axes: Sequence[int], autocast: torch.dtype | None
) -> Tensor:
    """Return the logits of a batch of windows, averaged over mirrorings."""
    kind = windows.device.type
    # Not on the CPU: oneDNN's bfloat16 kernels for transposed convolutions crash with an illegal instruction on
    # processors with AMX (torch 2.13).
    lower = autocast is not None and kind != "cpu"
    context = torch.autocast(kind, autocast) if lower else contextlib.nullcontext()
    total: Tensor | None = None
    flips = [axes for n in range(len(mirror_axes) + 1) for axes in itertools.combinations(mirror_axes, n)]
    try:
        with context:  # around all passes, so that weights are converted once
            for axes in flips:
                dims = [axis + 2 for axis in axes]
                logits = network(windows.flip(dims) if dims else windows)
                logits = logits.flip(dims) if dims else logits
                total = logits.float() if total is None else total.add_(logits)
    except torch.OutOfMemoryError:
        count, shape = windows.shape[0], " x ".join(str(n) for n in windows.shape[2:])
        fix = "Lower the number of windows in a batch" if count > 1 else "Predict on the CPU, or on a larger GPU"
        raise RunError(f"the GPU ran out of memory for {count} windows of {shape} voxels", fix=fix) from None
    assert total is not None
    return total.div_(len(flips)) if len(flips) > 1 else total
