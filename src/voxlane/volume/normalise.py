"""Normalisation of intensities, and their storage as 16-bit integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from voxlane.errors import ConfigError
from voxlane.volume.plan import Normalisation

_LIMIT = 32767
"""Largest absolute value of a stored integer."""
_ZSCORE_UNIT = 1 / 512
"""Standard deviations per step of a stored integer; the range is 64 standard deviations in either direction."""
_SMALLEST_CT_RANGE = 64.0
"""Range of values below which a CT is not in Hounsfield units but was normalised before, and whole units are too
coarse."""
_SMALLEST_STD = 1e-8
"""Lower bound of a standard deviation, so that a constant channel becomes 0 instead of a division by zero."""


def nonzero_mask(image: NDArray[Any]) -> NDArray[np.bool_]:
    """Return the mask (Z, Y, X) of voxels that are nonzero in any channel of `image` (C, Z, Y, X), with holes
    filled."""
    from scipy.ndimage import label

    empty = np.ones(image.shape[1:], np.bool_)
    for channel in image:
        empty &= channel == 0
    # One labelling of the empty regions; scipy's binary_fill_holes grows from the border step by step.
    regions, count = label(empty)
    open_regions = np.zeros(count + 1, np.bool_)
    for axis in range(3):
        for side in (0, -1):
            open_regions[np.unique(np.take(regions, side, axis=axis))] = True
    open_regions[0] = False
    mask: NDArray[np.bool_] = ~open_regions[regions]
    return mask


def apply(image: NDArray[Any], normalisation: Sequence[Normalisation]) -> NDArray[np.float32]:
    """Return a normalised copy of `image` (C, Z, Y, X). nnU-Net normalises after cropping to the nonzero box and before
    resampling; MLPerf after resampling."""
    _check_channels(image, len(normalisation))
    mask: NDArray[np.bool_] | None = None
    result = image.astype(np.float32)
    for channel, scheme in zip(result, normalisation, strict=True):
        if scheme.scheme == "ct":
            np.clip(channel, scheme.lower, scheme.upper, out=channel)
            channel -= np.float32(scheme.mean)
            channel /= np.float32(max(scheme.std, _SMALLEST_STD))
        elif scheme.scheme == "zscore" and scheme.nonzero:
            if mask is None:
                mask = nonzero_mask(image)
            inside = channel[mask]
            channel[mask] = _zscore(inside) if inside.size else inside
        elif scheme.scheme == "zscore":
            channel[...] = _zscore(channel)
        elif scheme.scheme == "rescale":
            channel -= channel.min()
            channel /= np.float32(max(float(channel.max()), _SMALLEST_STD))
    return result


def encode(
    image: NDArray[np.float32], normalisation: Sequence[Normalisation]
) -> tuple[NDArray[np.int16], tuple[float, ...], tuple[float, ...]]:
    """Encode a normalised `image` (C, Z, Y, X) as integers; also return each channel's scale and offset (see `decode`).

    ct: one step is one Hounsfield unit, so rounding changes a voxel by at most half of one; the range of a CT that was
    normalised before is divided into 65534 steps. zscore: one step is 1/512 of a standard deviation, and values beyond
    64 standard deviations are clipped. none and rescale: integers that fit are stored as they are, otherwise the
    channel's range is divided into 65534 steps.
    """
    _check_channels(image, len(normalisation))
    units = [_scale_and_offset(channel, scheme) for channel, scheme in zip(image, normalisation, strict=True)]
    codes = np.empty(image.shape, np.int16)
    for channel, coded, (scale, offset) in zip(image, codes, units, strict=True):
        steps = (channel - np.float32(offset)) * np.float32(1 / scale)
        coded[...] = np.clip(np.rint(steps, out=steps), -_LIMIT, _LIMIT, out=steps)
    return codes, tuple(scale for scale, _ in units), tuple(offset for _, offset in units)


def decode(codes: NDArray[np.int16], scale: Sequence[float], offset: Sequence[float]) -> NDArray[np.float32]:
    """Decode `codes` (C, Z, Y, X) to the normalised image: codes * scale + offset."""
    _check_channels(codes, len(scale))
    shape = (-1,) + (1,) * (codes.ndim - 1)
    result: NDArray[np.float32] = codes.astype(np.float32)
    result *= np.asarray(scale, np.float32).reshape(shape)
    result += np.asarray(offset, np.float32).reshape(shape)
    return result


def _zscore(values: NDArray[np.float32]) -> NDArray[np.float32]:
    # Sums in double precision, because a scan has more voxels than single precision can count.
    mean = values.mean(dtype=np.float64)
    std = max(float(values.std(dtype=np.float64)), _SMALLEST_STD)
    scored: NDArray[np.float32] = (values - np.float32(mean)) / np.float32(std)
    return scored


def _scale_and_offset(channel: NDArray[np.float32], scheme: Normalisation) -> tuple[float, float]:
    """Return the scale and offset of a channel's integers."""
    if scheme.scheme == "zscore":
        return _ZSCORE_UNIT, 0.0
    if scheme.scheme == "ct":
        if max(abs(scheme.lower), abs(scheme.upper)) <= _LIMIT and scheme.upper - scheme.lower >= _SMALLEST_CT_RANGE:
            return 1 / scheme.std, -scheme.mean / scheme.std
        low, high = (scheme.lower - scheme.mean) / scheme.std, (scheme.upper - scheme.mean) / scheme.std
    else:
        low, high = float(channel.min()), float(channel.max())
        if max(abs(low), abs(high)) <= _LIMIT and np.array_equal(channel, np.rint(channel)):
            return 1.0, 0.0
    return (high - low) / (2 * _LIMIT) or 1.0, (high + low) / 2


def _check_channels(image: NDArray[Any], expected: int) -> None:
    if len(image) != expected:
        raise ConfigError(
            f"the scan has {len(image)} channels, but the plan has {expected}",
            fix="Use the channels that the dataset was prepared with, in the same order",
        )
