"""Planning of network, patch and batch from a fingerprint, by the rules of nnU-Net 2.8's default 3D full-resolution
planner.

The patch starts at the size of the median scan and shrinks until its network is estimated to fit in memory. All axes
are treated alike, so a plan does not depend on the axis order of the files.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from voxlane.errors import ConfigError
from voxlane.volume.description import Description
from voxlane.volume.fingerprint import Fingerprint, Intensity
from voxlane.volume.plan import MAX_FEATURES, Network, Normalisation, Plan, Triple, to_triple
from voxlane.volume.resample import ANISOTROPIC, compute_new_shape

_FIRST_PATCH_VOXELS = 256**3
_SMALLEST_MAP = 4
"""Fewest voxels along an axis at the coarsest resolution."""
_REFERENCE_FEATURES = 560_000_000
"""Feature values of a network that fits into _REFERENCE_GB with _REFERENCE_BATCH patches, as measured by nnU-Net."""
_REFERENCE_GB = 8.0
_REFERENCE_BATCH = 2
_SMALLEST_BATCH = 2
_LARGEST_BATCH_SHARE = 0.05
"""Largest fraction of the dataset's voxels in one batch."""
_LOW_RESOLUTION_SHARE = 0.25
"""nnU-Net also plans a cascade if a patch covers less than this fraction of the median scan."""
_LOW_RESOLUTION_STEP = 1.03
_MASK_BELOW_FRACTION = 0.75
"""Z-scores ignore zeros around the patient if the nonzero box is less than this fraction of the scan."""

_HELD_OUT = """0 3 5 6 12 24 34 41 44 49 52 56 61 65 66 70 76 78 80 84 86 87 92 111 112 125 128 138 157 160 161 162 169
171 176 185 187 189 198 203 206 207"""
MLPERF_HELD_OUT = frozenset(f"case_{int(number):05d}" for number in _HELD_OUT.split())
"""KiTS19 cases on which MLPerf evaluates its U-Net3D."""

Sizes = tuple[float, ...]


class _Topology(NamedTuple):
    patch: Triple
    network: Network
    divisor: Triple
    """The patch is a multiple of this along each axis."""


class _Budget(NamedTuple):
    outputs: int
    feature_values: float


def make_plan(
    description: Description,
    fingerprint: Fingerprint,
    *,
    memory_gb: float = 8.0,
    spacing: tuple[float, float, float] | None = None,
    patch: Triple | None = None,
) -> Plan:
    """Plan for a dataset.

    memory_gb: GPU memory for training, by nnU-Net's estimate.
    spacing, patch: override the planned values (mm, voxels); the patch is rounded up to a size that can be halved.
    """
    if len(description.channels) != len(fingerprint.intensities):
        raise ConfigError(
            f"the description has {len(description.channels)} channels, but the scans have "
            f"{len(fingerprint.intensities)}",
            fix="Name each channel once, in the order of the files",
        )
    if memory_gb <= 0:
        raise ConfigError(f"memory_gb: expected a number above 0, got {memory_gb}")
    if min(spacing or (1,)) <= 0 or min(patch or (1,)) < 1:
        raise ConfigError(f"spacing and patch: expected values above 0, got spacing={spacing}, patch={patch}")
    target = spacing or _choose_spacing(fingerprint)
    shapes = [compute_new_shape(s, mm, target) for s, mm in zip(fingerprint.shapes, fingerprint.spacings, strict=True)]
    median = tuple(float(n) for n in np.median(shapes, axis=0))
    budget = _Budget(len(description.targets) + 1, _REFERENCE_FEATURES * memory_gb / _REFERENCE_GB)
    chosen = _fit_patch(target, median, budget) if patch is None else _make_topology(target, patch)
    return Plan(
        spacing=target,
        normalisation=tuple(
            _choose_normalisation(name, intensity, fingerprint.relative_size < _MASK_BELOW_FRACTION)
            for name, intensity in zip(description.channels, fingerprint.intensities, strict=True)
        ),
        patch=chosen.patch,
        batch=_choose_batch(chosen, budget, math.prod(median) * len(fingerprint.shapes)),
        network=chosen.network,
        batch_dice=_needs_low_resolution(chosen.patch, target, median, budget),
    )


def make_mlperf_plan() -> Plan:
    """Return the constants of the MLPerf training benchmark on KiTS19."""
    return Plan(
        recipe="mlperf-kits19",
        spacing=(1.6, 1.2, 1.2),
        normalisation=(Normalisation(scheme="ct", lower=-79.0, upper=304.0, mean=101.0, std=76.9),),
        patch=(128, 128, 128),
        batch=2,
        network=Network(
            kind="mlperf",
            features=(32, 64, 128, 256, 320, 320),
            strides=((1, 1, 1),) + ((2, 2, 2),) * 5,
            kernels=((3, 3, 3),) * 6,
        ),
        pad_to_patch=True,
    )


def _choose_spacing(fingerprint: Fingerprint) -> tuple[float, float, float]:
    """Return the median spacing. An axis that is both much coarser and much shorter than the others gets the 10th
    percentile, because scans with thin slices would lose most of them."""
    spacings = np.array(fingerprint.spacings)
    target = np.percentile(spacings, 50, axis=0)
    shape = np.percentile(np.array(fingerprint.shapes), 50, axis=0)
    coarse = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != coarse]
    coarser_other = max(target[others])
    if target[coarse] > ANISOTROPIC * coarser_other and shape[coarse] * ANISOTROPIC < min(shape[others]):
        tenth = np.percentile(spacings[:, coarse], 10)
        target[coarse] = tenth if tenth >= coarser_other else coarser_other + 1e-5
    z, y, x = (float(mm) for mm in target)
    return z, y, x


def _choose_normalisation(channel: str, intensity: Intensity, blanked: bool) -> Normalisation:
    """Choose by the channel's name, as in nnU-Net's dataset.json; the default is z-score."""
    name = channel.casefold()
    if name == "ct":
        return Normalisation(
            scheme="ct",
            lower=intensity.percentile_00_5,
            upper=intensity.percentile_99_5,
            mean=intensity.mean,
            std=max(intensity.std, 1e-8),
        )
    if name in ("nonorm", "none"):
        return Normalisation(scheme="none")
    return Normalisation(scheme="zscore", nonzero=blanked)


def _make_topology(spacing: Sizes, patch: Sizes) -> _Topology:
    """Choose the network for `patch`. An axis is halved while it is within a factor of two of the finest and
    long enough, and convolved once it is within a factor of two of the finest."""
    mm, size = list(spacing), list(patch)
    strides, kernels = [(1, 1, 1)], []
    halvings, kernel = [0, 0, 0], [1, 1, 1]
    while True:
        long_axes = [axis for axis in range(3) if size[axis] >= 2 * _SMALLEST_MAP]
        halved = [axis for axis in long_axes if mm[axis] / min(mm[a] for a in long_axes) < 2]
        if not halved or (len(halved) == 1 and size[halved[0]] < 3 * _SMALLEST_MAP):
            break
        kernel = [3 if kernel[axis] == 3 or mm[axis] / min(mm) < 2 else 1 for axis in range(3)]
        for axis in halved:
            halvings[axis] += 1
            mm[axis] *= 2
            size[axis] = math.ceil(size[axis] / 2)
        strides.append(to_triple(2 if axis in halved else 1 for axis in range(3)))
        kernels.append(to_triple(kernel))
    kernels.append((3, 3, 3))
    divisor = to_triple(2**n for n in halvings)
    padded = to_triple(math.ceil(n / d) * d for n, d in zip(patch, divisor, strict=True))
    features = tuple(min(32 * 2**level, MAX_FEATURES) for level in range(len(strides)))
    return _Topology(padded, Network(features=features, strides=tuple(strides), kernels=tuple(kernels)), divisor)


def _fit_patch(spacing: Sizes, median: Sizes, budget: _Budget) -> _Topology:
    """Return the largest patch, in proportion to the median scan, whose network fits into memory."""
    edge = (_FIRST_PATCH_VOXELS * math.prod(spacing)) ** (1 / 3)
    chosen = _make_topology(spacing, tuple(min(round(edge / mm), n) for mm, n in zip(spacing, median, strict=True)))
    coarsest = int(np.argmax(spacing))
    while _feature_values(chosen, budget) > budget.feature_values:
        # Shrink the axis that covers most of the scan; among equals the last, and the coarsest only if there is no
        # other.
        ratio = [p / n for p, n in zip(chosen.patch, median, strict=True)]
        axis = max(range(3), key=lambda a: (ratio[a], a != coarsest, a))
        shrunk = _shrink_axis(chosen.patch, axis, chosen.divisor[axis])
        # A smaller patch may be halved less often, which allows sizes in between.
        step = _make_topology(spacing, shrunk).divisor[axis]
        patch = _shrink_axis(chosen.patch, axis, step)
        if patch[axis] < 1:
            raise ConfigError("memory_gb: no patch is small enough for this memory", fix="Increase memory_gb")
        chosen = _make_topology(spacing, patch)
    return chosen


def _feature_values(topology: _Topology, budget: _Budget) -> int:
    """Count the values that the network's convolutions output for one patch, nnU-Net's estimate of memory."""
    size = list(topology.patch)
    total = 0
    strides, features = topology.network.strides, topology.network.features
    for level, (stride, width) in enumerate(zip(strides, features, strict=True)):
        size = [n // s for n, s in zip(size, stride, strict=True)]
        # Two convolutions in the encoder; in the decoder a transposed convolution and two more.
        total += math.prod(size) * width * (2 if level == len(features) - 1 else 5)
    return total + math.prod(topology.patch) * budget.outputs


def _choose_batch(topology: _Topology, budget: _Budget, voxels: float) -> int:
    fits = round(budget.feature_values / _feature_values(topology, budget) * _REFERENCE_BATCH)
    most = round(voxels * _LARGEST_BATCH_SHARE / math.prod(topology.patch))
    return max(min(fits, most), _SMALLEST_BATCH)


def _needs_low_resolution(patch: Triple, spacing: Sizes, median: Sizes, budget: _Budget) -> bool:
    """Return whether nnU-Net would add a cascade. It then computes the Dice loss over the batch, because patches are so
    small a part of a scan that many lack a class."""
    median_voxels = math.prod(median)
    mm, voxels = list(spacing), median_voxels
    while math.prod(patch) / voxels < _LOW_RESOLUTION_SHARE:
        finer_axes = [max(mm) / n > 2 for n in mm]
        mm = [
            n * _LOW_RESOLUTION_STEP if fine or not any(finer_axes) else n
            for n, fine in zip(mm, finer_axes, strict=True)
        ]
        shape = [old / new * n for old, new, n in zip(spacing, mm, median, strict=True)]
        voxels = math.prod(shape)
        patch = _fit_patch(tuple(mm), tuple(round(n) for n in shape), budget).patch
    return median_voxels / voxels >= 2


def _shrink_axis(patch: Triple, axis: int, by: int) -> Triple:
    return to_triple(n - by if a == axis else n for a, n in enumerate(patch))
