"""Intensities as the network sees them, and the 16-bit integers they are stored as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from voxlane.errors import ConfigError
from voxlane.volume.plan import Normalisation

_LIMIT = 32767
"""Stored integers lie between minus this and this."""
_ZSCORE_UNIT = 1 / 512
"""Standard deviations a stored integer stands for; 64 standard deviations to either side can be stored."""
_SMALLEST_STD = 1e-8
"""A constant channel becomes 0, not a division by zero."""


def nonzero_mask(image: NDArray[Any]) -> NDArray[np.bool_]:
    """(Z, Y, X): where any channel of `image` (C, Z, Y, X) is not 0, and the holes enclosed by that."""
    from scipy.ndimage import label

    empty = np.ones(image.shape[1:], np.bool_)
    for channel in image:
        empty &= channel == 0
    # One labelling of the empty parts instead of scipy's binary_fill_holes, which grows from the border step by step.
    parts, count = label(empty)
    open_parts = np.zeros(count + 1, np.bool_)
    for axis in range(3):
        for side in (0, -1):
            open_parts[np.unique(np.take(parts, side, axis=axis))] = True
    open_parts[0] = False
    mask: NDArray[np.bool_] = ~open_parts[parts]
    return mask


def apply(
    image: NDArray[Any], normalisation: Sequence[Normalisation], mask: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """`image` (C, Z, Y, X) normalised, a new array. `mask` (Z, Y, X) is where the scan is nonzero (nonzero_mask); it is
    taken from `image` where a channel needs it and it is not given.

    nnU-Net normalises after the crop to the nonzero box and before resampling; MLPerf after resampling.
    """
    _check_channels(image, len(normalisation))
    result = image.astype(np.float32)
    for channel, how in zip(result, normalisation, strict=True):
        if how.scheme == "ct":
            np.clip(channel, how.lower, how.upper, out=channel)
            channel -= np.float32(how.mean)
            channel /= np.float32(max(how.std, _SMALLEST_STD))
        elif how.scheme == "zscore" and how.nonzero:
            if mask is None:
                mask = nonzero_mask(image)
            inside = channel[mask]
            channel[mask] = _zscore(inside) if inside.size else inside
        elif how.scheme == "zscore":
            channel[...] = _zscore(channel)
    return result


def encode(
    image: NDArray[np.float32], normalisation: Sequence[Normalisation]
) -> tuple[NDArray[np.int16], tuple[float, ...], tuple[float, ...]]:
    """A normalised `image` (C, Z, Y, X) as integers, with the scale and the offset of each channel (see decode).

    ct: an integer is one Hounsfield unit, so rounding moves no voxel by more than half of one. zscore: 1/512 of a
    standard deviation, and what lies beyond 64 of them is cut off. none: whole numbers as they are where they fit,
    otherwise the channel's range in 65534 steps.
    """
    _check_channels(image, len(normalisation))
    units = [_unit(channel, how) for channel, how in zip(image, normalisation, strict=True)]
    codes = np.empty(image.shape, np.int16)
    for channel, coded, (scale, offset) in zip(image, codes, units, strict=True):
        steps = (channel - np.float32(offset)) * np.float32(1 / scale)
        coded[...] = np.clip(np.rint(steps, out=steps), -_LIMIT, _LIMIT, out=steps)
    return codes, tuple(scale for scale, _ in units), tuple(offset for _, offset in units)


def decode(codes: NDArray[np.int16], scale: Sequence[float], offset: Sequence[float]) -> NDArray[np.float32]:
    """The normalised image that `codes` (C, Z, Y, X) stand for: codes * scale + offset."""
    _check_channels(codes, len(scale))
    shape = (-1,) + (1,) * (codes.ndim - 1)
    result: NDArray[np.float32] = codes.astype(np.float32)
    result *= np.asarray(scale, np.float32).reshape(shape)
    result += np.asarray(offset, np.float32).reshape(shape)
    return result


def _zscore(values: NDArray[np.float32]) -> NDArray[np.float32]:
    # Sums in double precision: a scan has more voxels than single precision can count.
    mean = values.mean(dtype=np.float64)
    std = max(float(values.std(dtype=np.float64)), _SMALLEST_STD)
    scored: NDArray[np.float32] = (values - np.float32(mean)) / np.float32(std)
    return scored


def _unit(channel: NDArray[np.float32], how: Normalisation) -> tuple[float, float]:
    """Scale and offset of a channel's integers."""
    if how.scheme == "zscore":
        return _ZSCORE_UNIT, 0.0
    if how.scheme == "ct":
        if max(abs(how.lower), abs(how.upper)) <= _LIMIT:
            return 1 / how.std, -how.mean / how.std
        low, high = (how.lower - how.mean) / how.std, (how.upper - how.mean) / how.std
    else:
        low, high = float(channel.min()), float(channel.max())
        if max(abs(low), abs(high)) <= _LIMIT and np.array_equal(channel, np.rint(channel)):
            return 1.0, 0.0
    return (high - low) / (2 * _LIMIT) or 1.0, (high + low) / 2


def _check_channels(image: NDArray[Any], expected: int) -> None:
    if len(image) != expected:
        raise ConfigError(
            f"the scan has {len(image)} channels, the plan {expected}",
            fix="Give the channels that the dataset was prepared with, in the same order",
        )
