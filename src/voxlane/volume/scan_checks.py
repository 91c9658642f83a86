"""Checks of geometry and intensities that concern one scan, whatever its format.

A finding is fatal if results would be wrong. What may be right is only a warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from voxlane.sizes import format_bytes
from voxlane.volume.formats import Remark
from voxlane.volume.geometry import Geometry, format_mm, format_shape

_MM_POSSIBLE = 1e-3, 100.0
"""Spacings outside this range are wrong, also for specimens under a microscope."""
_MM_USUAL = 0.05, 15.0
_EXTENT_MM_USUAL = 2.0, 2500.0
"""Usual length of a scan along an axis."""
_MAX_USUAL_ANISOTROPY = 25.0
_MAX_SHEAR = 0.02
"""Largest cosine between axes that counts as perpendicular."""
_MAX_POSSIBLE = 2.0**31
"""Larger intensities are no measurements but a wrong data type, byte order or scaling."""
_MIN_POSSIBLE = 1e-20
_MAX_EXACT = 2.0**24
"""Larger integers are rounded in float32."""
_MAX_BLANK_SHARE = 0.5
_MAX_LABEL_VALUES = 4
"""An image with this many different values or fewer is probably a label."""
_MAX_GROWTH = 64.0
"""Most voxels of the plan's grid per voxel of the scan."""
_GROWTH_BYTES = 1 << 30
"""Grids that need less memory may grow further."""
BYTES_PER_GRID_VOXEL = 24
"""Memory for each voxel and channel while a scan is resampled."""
_SAMPLED_VOXELS = 1 << 16
_Triple = tuple[int, int, int]


@dataclass(frozen=True)
class ChannelSummary:
    """Intensities of one channel."""

    low: float
    high: float
    percentiles: tuple[float, float, float]
    """Percentiles 1, 50 and 99 of a sample of the voxels."""
    finite: bool = True


def check_geometry(geometry: Geometry) -> list[Remark]:
    """Return what is wrong or suspicious about a grid."""
    spacing, shape = geometry.spacing, geometry.canonical_shape
    text = f"the spacing is {format_mm(spacing)} mm (z, y, x)"
    if min(spacing) < _MM_POSSIBLE[0] or max(spacing) > _MM_POSSIBLE[1]:
        return [Remark("geometry", f"{text}, which no scan has", fatal=True)]
    remarks = []
    if min(spacing) < _MM_USUAL[0] or max(spacing) > _MM_USUAL[1]:
        remarks.append(Remark("geometry", f"{text}, which is unusual"))
    elif max(spacing) > _MAX_USUAL_ANISOTROPY * min(spacing):
        remarks.append(Remark("geometry", f"{text}, which differs much between axes"))
    extent = [n * mm for n, mm in zip(shape, spacing, strict=True)]
    if min(extent) < _EXTENT_MM_USUAL[0] or max(extent) > _EXTENT_MM_USUAL[1]:
        remarks.append(Remark("geometry", f"the scan is {format_mm(extent)} mm large (z, y, x), which is unusual"))
    axes = np.asarray(geometry.affine)[:3, :3]
    axes = axes / np.linalg.norm(axes, axis=0)
    if np.abs(axes.T @ axes - np.eye(3)).max() > _MAX_SHEAR:
        remarks.append(Remark("geometry", "the axes are not perpendicular; resampling takes them as if they were"))
    return remarks


def summarize_channel(channel: npt.NDArray[Any]) -> tuple[ChannelSummary, int]:
    """Return the intensities of a channel (Z, Y, X), and its number of slices with a single value."""
    lows, highs = [], []
    for plane in channel:  # plane by plane, which reads the memory once
        lows.append(plane.min())
        highs.append(plane.max())
    blank = sum(bool(low == high) for low, high in zip(lows, highs, strict=True))
    flat = channel.reshape(-1)
    sample = flat[:: max(1, len(flat) // _SAMPLED_VOXELS)].astype(np.float64)
    low, high = float(min(lows)), float(max(highs))
    if not (math.isfinite(low) and math.isfinite(high)):
        return ChannelSummary(0.0, 0.0, (0.0, 0.0, 0.0), finite=False), blank
    first, middle, last = (float(value) for value in np.percentile(sample, (1, 50, 99)))
    return ChannelSummary(low, high, (first, middle, last)), blank


def check_intensities(image: npt.NDArray[Any], channels: Sequence[str]) -> tuple[list[Remark], list[ChannelSummary]]:
    """Return what is wrong or suspicious about the intensities of `image` (C, Z, Y, X), and a summary of each channel.
    `channels` names them, as far as they are known. NaN and infinity are not checked here."""
    remarks: list[Remark] = []
    summaries = []
    for index, channel in enumerate(image):
        summary, blank = summarize_channel(channel)
        summaries.append(summary)
        if summary.finite:
            name = channels[index] if index < len(channels) else ""
            prefix = f"channel {index}: " if len(image) > 1 else ""
            remarks += [
                Remark("intensity", prefix + text, fatal)
                for text, fatal in _check_channel(channel, summary, blank, name, is_only=len(image) == 1)
            ]
    if len(image) > 1 and all(summary.finite and summary.low == summary.high for summary in summaries):
        remarks.append(Remark("intensity", "every channel has a single value", fatal=True))
    return remarks, summaries


def _check_channel(
    channel: npt.NDArray[Any], summary: ChannelSummary, blank: int, name: str, *, is_only: bool
) -> list[tuple[str, bool]]:
    """Return descriptions of what is wrong, and whether they are fatal."""
    low, high = summary.low, summary.high
    largest = max(abs(low), abs(high))
    if largest > _MAX_POSSIBLE or 0 < largest < _MIN_POSSIBLE:
        return [(f"voxels reach {largest:.4g}, which no scanner measures: check data type and byte order", True)]
    if low == high:
        return [(f"every voxel is {low:g}", is_only)]
    findings = []
    if largest > _MAX_EXACT:
        findings.append((f"voxels reach {largest:.4g}; values above {_MAX_EXACT:,.0f} are rounded", False))
    if blank > _MAX_BLANK_SHARE * len(channel):
        findings.append((f"{blank} of {len(channel)} slices have a single value", False))
    values = np.unique(channel.reshape(-1)[:: max(1, channel.size // _SAMPLED_VOXELS)])
    if len(values) <= _MAX_LABEL_VALUES and len(np.unique(channel)) <= _MAX_LABEL_VALUES:
        shown = ", ".join(f"{value:g}" for value in np.unique(channel).tolist())
        findings.append((f"voxels have only the values {shown}; this may be a label", False))
    elif name == "CT" and low >= 0:
        findings.append((f"CT without negative values ({low:g} to {high:g}); expected Hounsfield units", False))
    return findings


def check_growth(
    shape: _Triple, grid_shape: _Triple, spacing: tuple[float, float, float], num_channels: int, available_bytes: int
) -> str | None:
    """Return None if a scan of `shape` can be resampled to `grid_shape`, else what speaks against it."""
    grid_voxels = math.prod(grid_shape)
    needed = grid_voxels * num_channels * BYTES_PER_GRID_VOXEL
    growth = grid_voxels / math.prod(shape)
    text = (
        f"its spacing of {format_mm(spacing)} mm (z, y, x) makes it {format_shape(grid_shape)} voxels on the plan's "
        f"grid, which need about {format_bytes(needed)} of memory"
    )
    if needed > available_bytes:
        return f"{text}, and {format_bytes(available_bytes)} are available"
    if growth > _MAX_GROWTH and needed > _GROWTH_BYTES:
        return f"{text}, {growth:,.0f} times its own voxels"
    return None
