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
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from voxlane.errors import ConfigError, RunError

if TYPE_CHECKING:  # where these have not what they import, windows are predicted all the same
    from voxlane.volume.description import Description
    from voxlane.volume.plan import Triple

ReadRegion: TypeAlias = "Callable[[Triple, Triple], Tensor]"
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
    result; on `device` the network and its activations for `batch` windows. A GPU holds, besides, what is on its way: a
    slab and a half of the image, and half a slab or so of the result. A volume of 400 x 512 x 512 with three
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
    with Leaving() as leaving:
        for start, stop, logits in slabs:
            if result is None:
                result = torch.empty((logits.shape[0], z, y, x), dtype=result_dtype, device=result_device)
            leaving.copy(logits, result[:, start:stop])
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
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    home = torch.device(accumulate_device) if accumulate_device is not None else device
    layout = Layout.of(size, patch, overlap)
    heights = layout.starts[0]
    row = list(itertools.product(*(enumerate(starts) for starts in layout.starts[1:])))
    passes = [row[i : i + batch] for i in range(0, len(row), batch)]
    weights = [[w.to(home) for w in axis] for axis in layout.weights]
    done, sums = 0, torch.empty(0)
    entering = Entering.of(image, layout, fill, device)
    was_training = network.training
    network.eval()
    try:
        for level, z in enumerate(heights):
            places = [[(y, x) for (_, y), (_, x) in each] for each in passes]
            for each, windows in zip(passes, entering.at(level, places), strict=True):
                logits = forward(network, in_order_of(network, windows), mirror_axes, autocast).to(home, torch.float32)
                if not sums.numel():
                    sums = torch.zeros((logits.shape[1], patch[0], *layout.padded[1:]), device=home)
                for ((j, y), (k, x)), window in zip(each, logits, strict=True):
                    weight = weights[0][level][:, None, None] * (weights[1][j][:, None] * weights[2][k])
                    sums[:, :, y : y + patch[1], x : x + patch[2]].addcmul_(window, weight)
                done += len(each)
                if progress is not None:
                    progress(done, len(heights) * len(row))
            following = heights[level + 1] if level + 1 < len(heights) else layout.padded[0]
            yield from finished(sums, layout, z, following)
            shift(sums, following - z)
    finally:
        entering.close()
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
    slices = 16 if mask.is_cuda else 1
    for z in (slice(start, start + slices) for start in range(0, mask.shape[0], slices)):
        best = logits[0, z].clone()
        for output, value in enumerate(description.mask_values, 1):
            torch.maximum(mask[z], (logits[output, z] > best).to(torch.uint8) * value, out=mask[z])
            torch.maximum(best, logits[output, z], out=best)
    return mask


class Entering:
    """Windows on their way into the network."""

    def __init__(self, read: ReadRegion, layout: Layout, fill: float, device: torch.device) -> None:
        self.read, self.layout, self.fill, self.device = read, layout, fill, device

    @staticmethod
    def of(image: Tensor | ReadRegion, layout: Layout, fill: float, device: torch.device) -> Entering:
        """The way for an image: straight from where it is, or, for a GPU, fetched while it computes."""
        if device.type != "cuda" or (isinstance(image, Tensor) and image.device == device):
            return Entering(reader(image), layout, fill, device)
        if isinstance(image, Tensor):
            return EnteringBySlab(image, layout, fill, device)
        return EnteringAhead(image, layout, fill, device)

    def at(self, level: int, passes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Tensor]:
        """For each pass its windows (window, channels, z, y, x), float32, on the device. Levels are asked for in order;
        a window's place in its pass is (y, x)."""
        for places in passes:
            yield self.windows(level, places).to(self.device).float()

    def windows(self, level: int, places: Sequence[tuple[int, int]]) -> Tensor:
        """As they are read."""
        z = self.layout.starts[0][level]
        return torch.stack([padded(self.read, self.layout, (z, y, x), self.fill) for y, x in places])

    def close(self) -> None:
        """Nothing is on its way any more."""


class Side:
    """One thread with a stream of its own on a GPU, for copies that the GPU's work should not wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="voxlane-windows")

    def start(self, work: Callable[[], Tensor | None]) -> Future[tuple[Tensor | None, Any]]:
        """Begin; what has been launched on the current stream so far comes before."""
        before: Any = torch.cuda.current_stream(self.device).record_event()

        def run() -> tuple[Tensor | None, Any]:
            with torch.no_grad(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                self._stream.wait_event(before)
                return work(), self._stream.record_event()

        return self._thread.submit(run)

    def finish(self, begun: Future[tuple[Tensor | None, Any]]) -> Tensor | None:
        """What the work made, for the current stream."""
        made, done = begun.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        if made is not None and made.is_cuda:
            made.record_stream(current)
        return made

    def close(self) -> None:
        """Wait for what has begun, and begin no more."""
        self._thread.shutdown(cancel_futures=True)


class EnteringAhead(Entering):
    """Windows are read, and go to the GPU, one pass before they are needed. The function that reads is called by one
    thread at a time, which is not the caller's."""

    def __init__(self, read: ReadRegion, layout: Layout, fill: float, device: torch.device) -> None:
        super().__init__(read, layout, fill, device)
        self._side = Side(device)

    def at(self, level: int, passes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Tensor]:
        """See `Entering`."""

        def fetch(places: Sequence[tuple[int, int]]) -> Future[tuple[Tensor | None, Any]]:
            return self._side.start(lambda: self.windows(level, places).to(self.device))

        coming = fetch(passes[0])
        for number in range(len(passes)):
            windows = self._side.finish(coming)
            if number + 1 < len(passes):
                coming = fetch(passes[number + 1])
            assert windows is not None
            yield windows.float()

    def close(self) -> None:
        """See `Entering`."""
        self._side.close()


class EnteringBySlab(Entering):
    """Of an image in the host's memory, every slice goes to the GPU once: those of the next level while the windows of
    this one are predicted. Windows are cut there."""

    def __init__(self, image: Tensor, layout: Layout, fill: float, device: torch.device) -> None:
        super().__init__(reader(image), layout, fill, device)
        self._image = image
        self._side = Side(device)
        shape = (image.shape[0], layout.patch[0], *layout.padded[1:])
        self._slab = torch.full(shape, fill, dtype=torch.float32, device=device)
        self._coming = self._fetch(0)

    def _new_slices(self, level: int) -> tuple[int, int]:
        """The first slice of a level that the level before has not, and the last plus one."""
        starts, height = self.layout.starts[0], self.layout.patch[0]
        before = starts[level - 1] + height if level else 0
        return before, min(starts[level] + height, self.layout.size[0])

    def _fetch(self, level: int) -> Future[tuple[Tensor | None, Any]]:
        start, stop = self._new_slices(level)
        return self._side.start(lambda: self._image[:, start:stop].to(self.device))

    def at(self, level: int, passes: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Tensor]:
        """See `Entering`."""
        slices = self._side.finish(self._coming)
        assert slices is not None
        _, height, width = self.layout.size
        up, low, left = self.layout.before
        first = up if level == 0 else self.layout.patch[0] - slices.shape[1]
        if level:
            shift(self._slab, slices.shape[1], self.fill)
        self._slab[:, first : first + slices.shape[1], low : low + height, left : left + width] = slices
        del slices
        if level + 1 < len(self.layout.starts[0]):
            self._coming = self._fetch(level + 1)
        _, across, along = self.layout.patch
        for places in passes:
            yield torch.stack([self._slab[:, :, y : y + across, x : x + along] for y, x in places])

    def close(self) -> None:
        """See `Entering`."""
        self._side.close()


class Leaving:
    """Slabs on their way to the result; from a GPU to the host while the next one is predicted."""

    def __init__(self) -> None:
        self._side: Side | None = None
        self._begun: Future[tuple[Tensor | None, Any]] | None = None

    def __enter__(self) -> Leaving:
        return self

    def copy(self, slab: Tensor, result: Tensor) -> None:
        """Into its place (outputs, z, y, x); `slab` may be written over when this returns."""
        if not (slab.is_cuda and result.device.type == "cpu"):
            result.copy_(slab)
            return
        if self._side is None:
            self._side = Side(slab.device)
        piece = slab.to(result.dtype, copy=True)
        self._wait()

        def fetch() -> None:
            for own, made in zip(result, piece, strict=True):  # output by output, whose memory is in one piece
                own.copy_(made)

        self._begun = self._side.start(fetch)

    def _wait(self) -> None:
        if self._begun is not None:
            self._begun.result()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:  # before closing, which forgets work that its thread has not come to yet
                self._wait()
        finally:
            if self._side is not None:
                self._side.close()


def in_order_of(network: nn.Module, windows: Tensor) -> Tensor:
    """The windows with their channels innermost in memory, where the network's are."""
    if windows.is_cuda and windows.shape[1] > 1:
        weight = next((p for p in network.parameters() if p.ndim == 5 and p.shape[1] > 1), None)
        if weight is not None and weight.is_contiguous(memory_format=torch.channels_last_3d):
            return windows.contiguous(memory_format=torch.channels_last_3d)
    return windows


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
        with context:  # around all, so that weights are lowered once
            for axes in flips:
                dims = [axis + 2 for axis in axes]
                logits = network(windows.flip(dims) if dims else windows)
                logits = logits.flip(dims) if dims else logits
                total = logits.float() if total is None else total.add_(logits)
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


def shift(sums: Tensor, by: int, fill: float = 0.0) -> None:
    """Move slices down by `by` and fill those that come in, in place: in steps of `by`, which do not overlap."""
    height = sums.shape[1]
    for low in range(by, height, by):
        piece = sums[:, low : low + by]
        sums[:, low - by : low - by + piece.shape[1]] = piece
    sums[:, height - by :] = fill
