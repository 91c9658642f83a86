"""Augmentation of a batch in at most nine launches, for any number of samples and channels.

All operations are known on the CPU before the first launch, so each launch gets a list of only the rows (one channel of
one sample) that it concerns: a row costs nothing for operations that it did not draw, and an operation that no row drew
is not launched. All numbers are copied in one table from pinned memory, and nothing is read back.

The passes, in order, each over all rows that need it:

    place     write the row to the new batch, rotated and mirrored, with brightness and noise; labels too
    blur      along z, y and x
    contrast
    coarsen   low resolution and back
    bend      inverted gamma; then gamma
    restore   mean and deviation after gamma

Brightness may precede the blur because both are linear. A pass that needs the row's mean, deviation and range combines
pieces that each program of the previous pass stored, in the same order every time. Passes that read neighbours write to
the row's other buffer; a row starts in the buffer from which it ends in the first.

These are plain functions and not torch operators, because nothing is differentiated or compiled here.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from voxlane.model.transforms import coarse_shape, coordinate_steps, gaussian_weights
from voxlane.volume.plan import Triple

if TYPE_CHECKING:
    from voxlane.model.augment import SampleAugmentation

_BLOCK = 1024
"""Voxels that a program processes at a time."""
_WARPS = 8
"""Warps of a program: four voxels per thread, so that looking up eight neighbours leaves registers for other
programs."""
_PROGRAMS = 512
"""Most programs for a row, each of which stores one piece of the row's statistics; a power of 2."""
_PIECES = tl.constexpr(_PROGRAMS)
_TINY = tl.constexpr(1e-7)

# Statistics of a row: before contrast, before gamma, and after the first gamma, followed by those after the second.
_FLAT, _STRAIGHT, _BENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SLOTS = tl.constexpr(4)

_PASSES = ("place", "blur z", "blur y", "blur x", "contrast", "coarsen", "bend", "bend again", "restore")
# An entry of each pass's list, in words of 4 bytes. A slot is where to store statistics, -1 for nowhere.
# Place: channel, steps (-1: not turned), flips z y x, buffer, slot, brightness, noise, seed.
_PLACE = struct.Struct("<iiiiiiiffII")
_BLUR = struct.Struct("<iiiiii")  # row, buffer from, buffer to, radius, weights, slot
_CONTRAST = struct.Struct("<iifi")  # row, buffer, factor, slot
_COARSEN = struct.Struct("<iiiiiffffff")  # row, slot, coarse size z y x, size / coarse size, coarse size / size
_BEND = struct.Struct("<ifii")  # row, gamma, whether inverted, whether bent before
_RESTORE = struct.Struct("<iii")  # row, whether the last gamma was inverted, whether there were two


class _PassLists:
    """The lists of entries of every pass, and the table that holds them."""

    def __init__(
        self,
        samples: Sequence[SampleAugmentation],
        source: Sequence[int],
        patch: Triple,
        flat_axis: int | None,
        noise_last: bool,
    ) -> None:
        self._patch, self._flat_axis, self._noise_last = patch, flat_axis, noise_last
        self._data = bytearray()
        self.lists: dict[str, list[bytes]] = {name: [] for name in _PASSES}
        matrices, flips = [sample.matrix for sample in samples], [sample.flips for sample in samples]
        all_steps = iter(coordinate_steps(matrices, flips, patch, source))
        labels: list[bytes] = []
        row = 0
        for sample, matrix in zip(samples, matrices, strict=True):
            steps = -1 if matrix is None else self._add(next(all_steps).tobytes())
            for index in range(len(sample.channels)):
                self._add_row(row, index, sample, steps)
                row += 1
            labels.append(_PLACE.pack(0, steps, *sample.flips, 0, -1, 0.0, 0.0, 0, 0))
        self.lists["place"] += labels
        # Whether any pass reads neighbours, and so needs the second buffer, and whether any needs statistics.
        self.two_buffers = bool(self.lists["blur z"] or self.lists["coarsen"])
        self.statistics = bool(self.lists["contrast"] or self.lists["restore"])

    def _add(self, data: bytes) -> int:
        """Add data and return its position in the table, in words of 4 bytes."""
        self._data += data
        return (len(self._data) - len(data)) // 4

    def _add_row(self, row: int, index: int, sample: SampleAugmentation, steps: int) -> None:
        lists, patch, channel = self.lists, self._patch, sample.channels[index]
        blurred, coarse = channel.blur_voxels is not None, channel.low_resolution is not None
        gammas = [(channel.gamma_inverted, True), (channel.gamma, False)]
        gammas = [(gamma, inverted) for gamma, inverted in gammas if gamma is not None]
        # The passes just before contrast and just before gamma store the statistics that these need.
        after_contrast = _STRAIGHT.value if gammas and not coarse else -1
        before_contrast = _FLAT.value if channel.contrast is not None else after_contrast
        buffer = (blurred + coarse) % 2
        slot = -1 if blurred else before_contrast
        brightness = 1.0 if channel.brightness is None else channel.brightness
        noise = (sample.noise_std or 0.0) * (1.0 if self._noise_last else brightness)
        seeds = sample.noise_seed & 0xFFFFFFFF, sample.noise_seed >> 32 & 0xFFFFFFFF
        lists["place"].append(_PLACE.pack(index, steps, *sample.flips, buffer, slot, brightness, noise, *seeds))
        if channel.blur_voxels is not None:
            for axis, sigma, size in zip("zyx", channel.blur_voxels, patch, strict=True):
                weights = gaussian_weights(sigma, limit=size - 1)
                place = self._add(struct.pack(f"<{len(weights)}f", *weights))
                slot = before_contrast if axis == "x" else -1
                lists[f"blur {axis}"].append(_BLUR.pack(row, buffer, 1 - buffer, len(weights) - 1, place, slot))
                buffer = 1 - buffer
        if channel.contrast is not None:
            lists["contrast"].append(_CONTRAST.pack(row, buffer, channel.contrast, after_contrast))
        if channel.low_resolution is not None:
            small = coarse_shape(patch, channel.low_resolution, self._flat_axis)
            slot = _STRAIGHT.value if gammas else -1
            ratios = *np.divide(patch, small), *np.divide(small, patch)
            lists["coarsen"].append(_COARSEN.pack(row, slot, *small, *ratios))
        for again, (gamma, inverted) in enumerate(gammas):
            lists["bend again" if again else "bend"].append(_BEND.pack(row, gamma, inverted, again))
        if gammas:
            lists["restore"].append(_RESTORE.pack(row, gammas[-1][1], len(gammas) > 1))

    def table(self, device: torch.device) -> tuple[torch.Tensor, dict[str, int]]:
        """Return the table on the device, and the first word of each list."""
        firsts = {name: self._add(b"".join(entries)) for name, entries in self.lists.items()}
        words = np.frombuffer(self._data, dtype=np.int32)
        # From pinned memory, because any other copy waits for the GPU.
        packed = torch.empty(len(words), dtype=torch.int32, pin_memory=device.type == "cuda")
        packed.numpy()[:] = words
        return packed.to(device, non_blocking=True), firsts


def augment(
    image: torch.Tensor,
    label: torch.Tensor,
    samples: Sequence[SampleAugmentation],
    patch: Triple,
    *,
    flat_axis: int | None,
    noise_last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a new image (float32) and label of `patch` voxels (z, y, x) around the centre of the inputs.

    image: (B, C, Z, Y, X) of any real type, label: (B, Z, Y, X), neither smaller than `patch`; `samples` has one entry
    per sample of the batch, with as many channels as the image. `flat_axis` keeps its resolution. If `noise_last`,
    brightness does not scale the noise, which depends only on a sample's seed and the voxel.
    """
    image, label = image.contiguous(), label.contiguous()
    batch, channels = image.shape[:2]
    rows, voxels = batch * channels, patch[0] * patch[1] * patch[2]
    chunk = triton.cdiv(triton.cdiv(voxels, _BLOCK), _PROGRAMS) * _BLOCK
    programs = triton.cdiv(voxels, chunk)
    plan = _PassLists(samples, image.shape[2:], patch, flat_axis, noise_last)
    table, firsts = plan.table(image.device)
    buffers = torch.empty((1 + plan.two_buffers, batch, channels, *patch), dtype=torch.float32, device=image.device)
    new_label = torch.empty((batch, *patch), dtype=label.dtype, device=label.device)
    pieces = (rows, _SLOTS.value, 4, programs) if plan.statistics else (1,)
    statistics = torch.empty(pieces, dtype=torch.float32, device=image.device)

    def launch(kernel: Any, name: str, *arguments: Any) -> None:
        entries = len(plan.lists[name])
        if entries:
            grid = (programs, entries)
            common = table, firsts[name], buffers, statistics, rows, voxels, chunk
            kernel[grid](*common, *arguments, BLOCK=_BLOCK, num_warps=_WARPS)

    with torch.cuda.device_of(image):  # where Triton launches
        launch(_place, "place", image, label, new_label, *image.shape[2:], *patch)
        launch(_blur, "blur z", patch[0], patch[1] * patch[2])
        launch(_blur, "blur y", patch[1], patch[2])
        launch(_blur, "blur x", patch[2], 1)
        launch(_contrast, "contrast")
        launch(_coarsen, "coarsen", *patch)
        launch(_bend, "bend")
        launch(_bend, "bend again")
        launch(_restore, "restore")
    return buffers[0], new_label


# -- parameter table -----------------------------------------------------------------------------------------------


@triton.jit
def _load_float(table, place):
    """Load the float at a position of the table of 32-bit words."""
    return tl.load(table + place).to(tl.float32, bitcast=True)


# -- statistics ----------------------------------------------------------------------------------------------------


@triton.jit
def _empty_statistics(BLOCK: tl.constexpr):
    """Return each lane's count, mean, sum of squared distances from it, smallest and largest value of no values."""
    zeros = tl.zeros([BLOCK], tl.float32)
    return zeros, zeros, zeros, tl.full([BLOCK], float("inf"), tl.float32), tl.full([BLOCK], float("-inf"), tl.float32)


@triton.jit
def _add_value(count, mean, squares, smallest, largest, value, inside):
    """Update every lane by its next value with Welford's method, which is accurate for means far from zero."""
    count += tl.where(inside, 1.0, 0.0)
    away = tl.where(inside, value - mean, 0.0)
    mean += away / tl.maximum(count, 1.0)
    squares += tl.where(inside, away * (value - mean), 0.0)
    smallest = tl.minimum(smallest, tl.where(inside, value, float("inf")))
    largest = tl.maximum(largest, tl.where(inside, value, float("-inf")))
    return count, mean, squares, smallest, largest


@triton.jit
def _store_statistics(statistics, row, slot, count, mean, squares, smallest, largest):
    """Store this program's piece of the row's statistics, unless the slot is negative."""
    if slot >= 0:
        total = tl.sum(count)
        middle = tl.sum(count * mean) / total
        away = mean - middle
        pieces = tl.num_programs(0)
        piece = statistics + (row * _SLOTS + slot) * 4 * pieces + tl.program_id(0)
        tl.store(piece, middle)
        tl.store(piece + pieces, tl.sum(squares + count * away * away))
        tl.store(piece + 2 * pieces, tl.min(smallest))
        tl.store(piece + 3 * pieces, tl.max(largest))


@triton.jit
def _read_statistics(statistics, row, slot, voxels, chunk):
    """Combine a row's pieces to mean, deviation, smallest and largest value. A NaN voxel makes the first two NaN."""
    pieces = tl.num_programs(0)
    piece = tl.arange(0, _PIECES)
    valid = piece < pieces
    first = statistics + (row * _SLOTS + slot) * 4 * pieces + piece
    count = tl.where(valid, tl.minimum(voxels - piece * chunk, chunk), 0).to(tl.float32)
    means = tl.load(first, mask=valid, other=0.0)
    mean = tl.sum(count * means) / voxels
    away = means - mean
    squares = tl.sum(tl.load(first + pieces, mask=valid, other=0.0) + count * away * away)
    smallest = tl.min(tl.load(first + 2 * pieces, mask=valid, other=float("inf")))
    largest = tl.max(tl.load(first + 3 * pieces, mask=valid, other=float("-inf")))
    return mean, tl.sqrt(squares / tl.maximum(voxels - 1.0, 1.0)), smallest, largest


@triton.jit
def _clamp(value, smallest, largest):
    """Clamp but keep NaN, like torch."""
    value = tl.maximum(value, smallest, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, largest, propagate_nan=tl.PropagateNan.ALL)


# -- place ---------------------------------------------------------------------------------------------------------


@triton.jit
def _voxel_coordinates(voxel, size_y, size_x):
    """Return z, y and x of a voxel."""
    line = voxel // size_x
    return line // size_y, line % size_y, voxel % size_x


@triton.jit
def _unrotated_source(entry, z, y, x, source_z, source_y, source_x, size_z, size_y, size_x):
    """Return the source voxel of a voxel of a sample that is only mirrored and cropped to its centre."""
    z = tl.where(tl.load(entry + 2) != 0, size_z - 1 - z, z) + (source_z - size_z) // 2
    y = tl.where(tl.load(entry + 3) != 0, size_y - 1 - y, y) + (source_y - size_y) // 2
    x = tl.where(tl.load(entry + 4) != 0, size_x - 1 - x, x) + (source_x - size_x) // 2
    return (z * source_y + y) * source_x + x


@triton.jit
def _source_coordinate(steps, plane, row, column, size, inside):
    """Return the source coordinate along one axis in voxels, with grid_sample's arithmetic, clamped to the border."""
    step = tl.load(steps + plane, mask=inside, other=0).to(tl.float32, bitcast=True)
    step_row = tl.load(steps + row, mask=inside, other=0).to(tl.float32, bitcast=True)
    step_column = tl.load(steps + column, mask=inside, other=0).to(tl.float32, bitcast=True)
    unit = step + (step_row + step_column)
    voxels = ((unit + 1.0) * size - 1.0) * 0.5
    return tl.minimum(tl.maximum(voxels, 0.0), size - 1.0)


@triton.jit
def _rotated_source(steps, z, y, x, source_z, source_y, source_x, size_z, size_y, inside):
    """Return the source coordinates of a voxel of a rotated or scaled sample."""
    plane, row, column = z * 3, (size_z + y) * 3, (size_z + size_y + x) * 3
    return (
        _source_coordinate(steps + 2, plane, row, column, source_z, inside),
        _source_coordinate(steps + 1, plane, row, column, source_y, inside),
        _source_coordinate(steps, plane, row, column, source_x, inside),
    )


@triton.jit
def _between(source, low, high, share, inside):
    """Interpolate linearly from `low` to `high`."""
    first = tl.load(source + low, mask=inside, other=0).to(tl.float32)
    second = tl.load(source + high, mask=inside, other=0).to(tl.float32)
    return first * (1.0 - share) + second * share


@triton.jit
def _linear(source, z0, z1, z_share, y0, y1, y_share, x0, x1, x_share, size_y, size_x, inside):
    """Interpolate between eight voxels: low and high ones along each axis, and the fraction of the high ones."""
    front, back = z0 * size_y, z1 * size_y
    y_rest = 1.0 - y_share
    near = _between(source, (front + y0) * size_x + x0, (front + y0) * size_x + x1, x_share, inside) * y_rest
    near += _between(source, (front + y1) * size_x + x0, (front + y1) * size_x + x1, x_share, inside) * y_share
    far = _between(source, (back + y0) * size_x + x0, (back + y0) * size_x + x1, x_share, inside) * y_rest
    far += _between(source, (back + y1) * size_x + x0, (back + y1) * size_x + x1, x_share, inside) * y_share
    return near * (1.0 - z_share) + far * z_share


@triton.jit
def _nearest(place):
    """Round a non-negative number to the nearest integer, ties to even, like grid_sample."""
    low = place.to(tl.int32)
    share = place - low
    return low + tl.where((share > 0.5) | ((share == 0.5) & (low % 2 == 1)), 1, 0)


@triton.jit(do_not_specialize=["first"])
def _place(
    table, first, buffers, statistics, rows, voxels, chunk, image, label, new_label,
    source_z, source_y, source_x, size_z, size_y, size_x, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries are those of all rows, in order, then one for the label of each sample."""
    row = tl.program_id(1).to(tl.int64)
    entry = table + first + row * 11
    steps = tl.load(entry + 1)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, voxels)
    if row >= rows:
        label += (row - rows) * source_z * source_y * source_x
        new_label += (row - rows) * voxels
        for start in range(begin, end, BLOCK):
            voxel = start + tl.arange(0, BLOCK)
            inside = voxel < end
            z, y, x = _voxel_coordinates(voxel, size_y, size_x)
            if steps < 0:
                origin = _unrotated_source(entry, z, y, x, source_z, source_y, source_x, size_z, size_y, size_x)
            else:
                cz, cy, cx = _rotated_source(
                    table + steps, z, y, x, source_z, source_y, source_x, size_z, size_y, inside
                )
                origin = (_nearest(cz) * source_y + _nearest(cy)) * source_x + _nearest(cx)
            tl.store(new_label + voxel, tl.load(label + origin, mask=inside), mask=inside)
    else:
        image += row * source_z * source_y * source_x
        target = buffers + (tl.load(entry + 5) * rows + row) * voxels
        brightness, noise = _load_float(entry, 7), _load_float(entry, 8)
        low = tl.load(entry + 9).to(tl.uint32, bitcast=True).to(tl.uint64)
        seed = tl.load(entry + 10).to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | low
        first_voxel = tl.load(entry) * voxels
        count, mean, squares, smallest, largest = _empty_statistics(BLOCK)
        for start in range(begin, end, BLOCK):
            voxel = start + tl.arange(0, BLOCK)
            inside = voxel < end
            z, y, x = _voxel_coordinates(voxel, size_y, size_x)
            if steps < 0:
                origin = _unrotated_source(entry, z, y, x, source_z, source_y, source_x, size_z, size_y, size_x)
                value = tl.load(image + origin, mask=inside, other=0).to(tl.float32)
            else:
                cz, cy, cx = _rotated_source(
                    table + steps, z, y, x, source_z, source_y, source_x, size_z, size_y, inside
                )
                z0, y0, x0 = cz.to(tl.int32), cy.to(tl.int32), cx.to(tl.int32)
                z1, y1 = tl.minimum(z0 + 1, source_z - 1), tl.minimum(y0 + 1, source_y - 1)
                x1 = tl.minimum(x0 + 1, source_x - 1)
                value = _linear(image, z0, z1, cz - z0, y0, y1, cy - y0, x0, x1, cx - x0, source_y, source_x, inside)
            value *= brightness
            if noise != 0:
                value += noise * tl.randn(seed, first_voxel + voxel)
            tl.store(target + voxel, value, mask=inside)
            count, mean, squares, smallest, largest = _add_value(count, mean, squares, smallest, largest, value, inside)
        _store_statistics(statistics, row, tl.load(entry + 6), count, mean, squares, smallest, largest)


# -- passes over rows ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first"])
def _blur(table, first, buffers, statistics, rows, voxels, chunk, size, stride, BLOCK: tl.constexpr):
    """Blur along the axis of this size and stride, mirrored at the border without repeating the edge voxel."""
    entry = table + first + tl.program_id(1) * 6
    row = tl.load(entry).to(tl.int64)
    source = buffers + (tl.load(entry + 1) * rows + row) * voxels
    target = buffers + (tl.load(entry + 2) * rows + row) * voxels
    radius, weights = tl.load(entry + 3), table + tl.load(entry + 4)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, voxels)
    count, mean, squares, smallest, largest = _empty_statistics(BLOCK)
    for start in range(begin, end, BLOCK):
        voxel = start + tl.arange(0, BLOCK)
        inside = voxel < end
        position = voxel // stride % size
        zero = voxel - position * stride
        value = tl.load(source + voxel, mask=inside, other=0.0) * _load_float(weights, 0)
        for step in range(1, radius + 1):
            before = zero + tl.abs(position - step) * stride
            after = zero + tl.minimum(position + step, 2 * (size - 1) - position - step) * stride
            pair = tl.load(source + before, mask=inside, other=0.0) + tl.load(source + after, mask=inside, other=0.0)
            value += pair * _load_float(weights, step)
        tl.store(target + voxel, value, mask=inside)
        count, mean, squares, smallest, largest = _add_value(count, mean, squares, smallest, largest, value, inside)
    _store_statistics(statistics, row, tl.load(entry + 5), count, mean, squares, smallest, largest)


@triton.jit(do_not_specialize=["first"])
def _contrast(table, first, buffers, statistics, rows, voxels, chunk, BLOCK: tl.constexpr):
    entry = table + first + tl.program_id(1) * 4
    row = tl.load(entry).to(tl.int64)
    buffer = buffers + (tl.load(entry + 1) * rows + row) * voxels
    factor = _load_float(entry, 2)
    middle, _, low, high = _read_statistics(statistics, row, _FLAT, voxels, chunk)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, voxels)
    count, mean, squares, smallest, largest = _empty_statistics(BLOCK)
    for start in range(begin, end, BLOCK):
        voxel = start + tl.arange(0, BLOCK)
        inside = voxel < end
        value = (tl.load(buffer + voxel, mask=inside, other=0.0) - middle) * factor + middle
        value = _clamp(value, low, high)
        tl.store(buffer + voxel, value, mask=inside)
        count, mean, squares, smallest, largest = _add_value(count, mean, squares, smallest, largest, value, inside)
    _store_statistics(statistics, row, tl.load(entry + 3), count, mean, squares, smallest, largest)


@triton.jit
def _coarse_source(coarse, size, down):
    """Return the voxel nearest to the centre of a coarse voxel, as in "nearest-exact"."""
    return tl.minimum(((coarse + 0.5) * down).to(tl.int32), size - 1)


@triton.jit
def _coarse_neighbours(fine, size, small, down, up):
    """Return the sources of the lower and the higher coarse voxel around a voxel along one axis, and the fraction of
    the higher one."""
    place = tl.maximum((fine + 0.5) * up - 0.5, 0.0)
    low = tl.minimum(place.to(tl.int32), small - 1)
    high = tl.minimum(low + 1, small - 1)
    return _coarse_source(low, size, down), _coarse_source(high, size, down), place - low


@triton.jit(do_not_specialize=["first"])
def _coarsen(table, first, buffers, statistics, rows, voxels, chunk, size_z, size_y, size_x, BLOCK: tl.constexpr):
    """Resample to low resolution and back. The coarse row is not stored: each voxel looks up the sources of the eight
    coarse voxels around it."""
    entry = table + first + tl.program_id(1) * 11
    row = tl.load(entry).to(tl.int64)
    source, target = buffers + (rows + row) * voxels, buffers + row * voxels
    small_z, small_y, small_x = tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    down_z, down_y, down_x = _load_float(entry, 5), _load_float(entry, 6), _load_float(entry, 7)
    up_z, up_y, up_x = _load_float(entry, 8), _load_float(entry, 9), _load_float(entry, 10)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, voxels)
    count, mean, squares, smallest, largest = _empty_statistics(BLOCK)
    for start in range(begin, end, BLOCK):
        voxel = start + tl.arange(0, BLOCK)
        inside = voxel < end
        z, y, x = _voxel_coordinates(voxel, size_y, size_x)
        z0, z1, z_share = _coarse_neighbours(z, size_z, small_z, down_z, up_z)
        y0, y1, y_share = _coarse_neighbours(y, size_y, small_y, down_y, up_y)
        x0, x1, x_share = _coarse_neighbours(x, size_x, small_x, down_x, up_x)
        value = _linear(source, z0, z1, z_share, y0, y1, y_share, x0, x1, x_share, size_y, size_x, inside)
        tl.store(target + voxel, value, mask=inside)
        count, mean, squares, smallest, largest = _add_value(count, mean, squares, smallest, largest, value, inside)
    _store_statistics(statistics, row, tl.load(entry + 1), count, mean, squares, smallest, largest)


# -- gamma ---------------------------------------------------------------------------------------------------------


@triton.jit
def _before_last_gamma(statistics, row, again, voxels, chunk):
    """Return mean, deviation, smallest and largest value of the row before its last gamma, and the line (shift, slope,
    offset) from the stored values to the row's values then.

    After a first gamma, which is the inverted one, the row is stored bent but not yet restored. Its restoring is a
    line, so it is left to the second gamma, and the statistics follow from the bent row's.
    """
    mean, deviation, smallest, largest = _read_statistics(statistics, row, _STRAIGHT, voxels, chunk)
    shift, slope, offset = 0.0, 1.0, 0.0
    if again != 0:
        bent, bent_deviation, bent_smallest, bent_largest = _read_statistics(statistics, row, _BENT, voxels, chunk)
        extent = largest - smallest
        slope = -extent * deviation / tl.maximum(extent * bent_deviation, _TINY)
        shift, offset = bent, mean
        deviation = -slope * bent_deviation
        smallest = (bent_largest - bent) * slope + mean
        largest = (bent_smallest - bent) * slope + mean
    return mean, deviation, smallest, largest, shift, slope, offset


@triton.jit(do_not_specialize=["first"])
def _bend(table, first, buffers, statistics, rows, voxels, chunk, BLOCK: tl.constexpr):
    """Map the row from its range to [0, 1] and raise it to the power of gamma; store that and its statistics."""
    entry = table + first + tl.program_id(1) * 4
    row = tl.load(entry).to(tl.int64)
    buffer = buffers + row * voxels
    gamma, inverted, again = _load_float(entry, 1), tl.load(entry + 2), tl.load(entry + 3)
    _, _, low, high, shift, slope, offset = _before_last_gamma(statistics, row, again, voxels, chunk)
    extent = tl.maximum(high - low, _TINY)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, voxels)
    count, mean, squares, smallest, largest = _empty_statistics(BLOCK)
    for start in range(begin, end, BLOCK):
        voxel = start + tl.arange(0, BLOCK)
        inside = voxel < end
        value = (tl.load(buffer + voxel, mask=inside, other=0.0) - shift) * slope + offset
        value = tl.where(inverted != 0, high - value, value - low) / extent
        # If the range is computed from that of the first gamma's result, rounding may exceed it slightly.
        value = tl.exp2(gamma * tl.log2(_clamp(value, 0.0, 1.0)))
        tl.store(buffer + voxel, value, mask=inside)
        count, mean, squares, smallest, largest = _add_value(count, mean, squares, smallest, largest, value, inside)
    _store_statistics(statistics, row, _BENT + again, count, mean, squares, smallest, largest)


@triton.jit(do_not_specialize=["first"])
def _restore(table, first, buffers, statistics, rows, voxels, chunk, BLOCK: tl.constexpr):
    """Restore the row's mean and deviation from before gamma."""
    entry = table + first + tl.program_id(1) * 3
    row = tl.load(entry).to(tl.int64)
    buffer = buffers + row * voxels
    inverted, again = tl.load(entry + 1), tl.load(entry + 2)
    middle, deviation, low, high, _, _, _ = _before_last_gamma(statistics, row, again, voxels, chunk)
    bent, bent_deviation, _, _ = _read_statistics(statistics, row, _BENT + again, voxels, chunk)
    extent = high - low
    slope = extent * deviation / tl.maximum(extent * bent_deviation, _TINY)
    slope = tl.where(inverted != 0, -slope, slope)
    begin = tl.program_id(0) * chunk
    end = tl.minimum(begin + chunk, voxels)
    for start in range(begin, end, BLOCK):
        voxel = start + tl.arange(0, BLOCK)
        inside = voxel < end
        value = (tl.load(buffer + voxel, mask=inside, other=0.0) - bent) * slope + middle
        tl.store(buffer + voxel, value, mask=inside)
