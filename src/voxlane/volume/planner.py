"""A plan from a fingerprint, by the rules of nnU-Net 2.8's default planner for full resolution in 3D.

The patch starts as large as the median scan and shrinks until the network that suits it is estimated to fit in memory;
every rule treats the axes alike, so a plan does not depend on how a file orders them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from voxlane.errors import ConfigError
from voxlane.volume.description import Description
from voxlane.volume.fingerprint import Fingerprint, Intensity
from voxlane.volume.plan import Network, Normalisation, Plan, Triple
from voxlane.volume.resample import ANISOTROPIC, new_shape

_FIRST_PATCH_VOXELS = 256**3
_SMALLEST_MAP = 4
"""Voxels an axis keeps at the coarsest resolution."""
_REFERENCE_FEATURES = 560_000_000
"""Feature values of a network that fits in _REFERENCE_GB with _REFERENCE_BATCH patches, by nnU-Net's measurements."""
_REFERENCE_GB = 8.0
_REFERENCE_BATCH = 2
_SMALLEST_BATCH = 2
_LARGEST_BATCH_SHARE = 0.05
"""Of the dataset's voxels, in one batch."""
_LOW_RESOLUTION_SHARE = 0.25
"""A patch with less than this share of the median scan sees too little of it; nnU-Net then plans a cascade as well."""
_LOW_RESOLUTION_STEP = 1.03
_MASK_BELOW = 0.75
"""Z-scores leave out zeros around the patient when the nonzero box takes less than this share of the scan."""

_HELD_OUT = """0 3 5 6 12 24 34 41 44 49 52 56 61 65 66 70 76 78 80 84 86 87 92 111 112 125 128 138 157 160 161 162 169
171 176 185 187 189 198 203 206 207"""
MLPERF_HELD_OUT = frozenset(f"case_{int(number):05d}" for number in _HELD_OUT.split())
"""The KiTS19 cases on which MLPerf scores its U-Net3D."""

Sizes = tuple[float, ...]


class _Topology(NamedTuple):
    patch: Triple
    strides: tuple[Triple, ...]
    kernels: tuple[Triple, ...]
    divisor: Triple
    """What the patch must be a multiple of."""


class _Budget(NamedTuple):
    outputs: int
    features: int
    most_features: int
    memory_gb: float

    def widths(self, resolutions: int) -> tuple[int, ...]:
        return tuple(min(self.features * 2**level, self.most_features) for level in range(resolutions))

    @property
    def feature_values(self) -> float:
        return _REFERENCE_FEATURES * self.memory_gb / _REFERENCE_GB


def make_plan(
    description: Description,
    fingerprint: Fingerprint,
    *,
    memory_gb: float = 8.0,
    spacing: tuple[float, float, float] | None = None,
    patch: Triple | None = None,
    batch: int | None = None,
    features: int = 32,
    most_features: int = 320,
) -> Plan:
    """The plan that suits a dataset.

    `memory_gb` is the GPU memory that training may take, by nnU-Net's estimate. `spacing` (mm), `patch` (voxels,
    rounded up to what the network can halve) and `batch` overrule the rules; `features` are the channels at full
    resolution, doubled at each coarser one up to `most_features`.
    """
    if len(description.channels) != len(fingerprint.intensities):
        raise ConfigError(
            f"the description has {len(description.channels)} channels, the scans {len(fingerprint.intensities)}",
            fix="Name each channel once, in the order of the files",
        )
    if memory_gb <= 0:
        raise ConfigError(f"memory_gb: {memory_gb} is not above 0")
    if min(spacing or (1,)) <= 0 or min(patch or (1,)) < 1:
        raise ConfigError(f"spacing and patch lie above 0, not spacing={spacing}, patch={patch}")
    target = spacing or _target_spacing(fingerprint)
    shapes = [new_shape(s, mm, target) for s, mm in zip(fingerprint.shapes, fingerprint.spacings, strict=True)]
    median = tuple(float(n) for n in np.median(shapes, axis=0))
    budget = _Budget(len(description.targets) + 1, features, most_features, memory_gb)
    chosen = _fit(target, median, budget) if patch is None else _topology(target, patch)
    return Plan(
        spacing=target,
        normalisation=tuple(
            _normalisation(name, intensity, fingerprint.relative_size < _MASK_BELOW)
            for name, intensity in zip(description.channels, fingerprint.intensities, strict=True)
        ),
        patch=chosen.patch,
        batch=_batch(chosen, budget, math.prod(median) * fingerprint.cases) if batch is None else batch,
        network=Network(features=budget.widths(len(chosen.strides)), strides=chosen.strides, kernels=chosen.kernels),
        batch_dice=_needs_low_resolution(chosen.patch, target, median, budget),
    )


def mlperf_kits19() -> Plan:
    """The constants of the MLPerf training benchmark on KiTS19, whose scans are resampled by its own method."""
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


def _target_spacing(fingerprint: Fingerprint) -> tuple[float, float, float]:
    """The median; on an axis that is both much coarser and much shorter than the others the 10th percentile, because
    scans with fine slices would lose most of them."""
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


def _normalisation(channel: str, intensity: Intensity, blanked: bool) -> Normalisation:
    """By the channel's name, as in nnU-Net's dataset.json; z-score where the name says nothing else."""
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


def _topology(spacing: Sizes, patch: Sizes) -> _Topology:
    """Where a network for `patch` halves which axes: those within a factor of two of the finest, as long as they keep
    enough voxels. An axis is convolved once it is within a factor of two of the finest."""
    mm, size = list(spacing), list(patch)
    strides, kernels = [(1, 1, 1)], []
    halvings, kernel = [0, 0, 0], [1, 1, 1]
    while True:
        long = [axis for axis in range(3) if size[axis] >= 2 * _SMALLEST_MAP]
        halved = [axis for axis in long if mm[axis] / min(mm[a] for a in long) < 2]
        if not halved or (len(halved) == 1 and size[halved[0]] < 3 * _SMALLEST_MAP):
            break
        kernel = [3 if kernel[axis] == 3 or mm[axis] / min(mm) < 2 else 1 for axis in range(3)]
        for axis in halved:
            halvings[axis] += 1
            mm[axis] *= 2
            size[axis] = math.ceil(size[axis] / 2)
        strides.append(_triple(2 if axis in halved else 1 for axis in range(3)))
        kernels.append(_triple(kernel))
    kernels.append((3, 3, 3))
    divisor = _triple(2**n for n in halvings)
    padded = _triple(math.ceil(n / d) * d for n, d in zip(patch, divisor, strict=True))
    return _Topology(padded, tuple(strides), tuple(kernels), divisor)


def _fit(spacing: Sizes, median: Sizes, budget: _Budget) -> _Topology:
    """The largest patch, in proportion to the median scan, whose network fits."""
    edge = (_FIRST_PATCH_VOXELS * math.prod(spacing)) ** (1 / 3)
    chosen = _topology(spacing, tuple(min(round(edge / mm), n) for mm, n in zip(spacing, median, strict=True)))
    coarsest = int(np.argmax(spacing))
    while _feature_values(chosen, budget) > budget.feature_values:
        # The axis that is largest for the scan; among equals the last, and the coarsest only when it is alone.
        ratio = [p / n for p, n in zip(chosen.patch, median, strict=True)]
        axis = max(range(3), key=lambda a: (ratio[a], a != coarsest, a))
        shrunk = _reduced(chosen.patch, axis, chosen.divisor[axis])
        # A smaller patch may be halved less often, and then there are valid sizes between.
        step = _topology(spacing, shrunk).divisor[axis]
        patch = _reduced(chosen.patch, axis, step)
        if patch[axis] < 1:
            raise ConfigError(
                "memory_gb: no patch is small enough for this much memory", fix="Give more memory or fewer features"
            )
        chosen = _topology(spacing, patch)
    return chosen


def _feature_values(topology: _Topology, budget: _Budget) -> int:
    """Values that the convolutions of the network put out for one patch, which nnU-Net takes for its need of memory."""
    size = list(topology.patch)
    total = 0
    widths = budget.widths(len(topology.strides))
    for level, (stride, width) in enumerate(zip(topology.strides, widths, strict=True)):
        size = [n // s for n, s in zip(size, stride, strict=True)]
        # Two convolutions down; where there is a way up, a transposed and two more.
        total += math.prod(size) * width * (2 if level == len(widths) - 1 else 5)
    return total + math.prod(topology.patch) * budget.outputs


def _batch(topology: _Topology, budget: _Budget, voxels: float) -> int:
    fits = round(budget.feature_values / _feature_values(topology, budget) * _REFERENCE_BATCH)
    most = round(voxels * _LARGEST_BATCH_SHARE / math.prod(topology.patch))
    return max(min(fits, most), _SMALLEST_BATCH)


def _needs_low_resolution(patch: Triple, spacing: Sizes, median: Sizes, budget: _Budget) -> bool:
    """Whether nnU-Net would add a cascade, which is when it counts the Dice loss over the batch: patches hold so small
    a part of a scan that many lack a class."""
    full = math.prod(median)
    mm, voxels = list(spacing), full
    while math.prod(patch) / voxels < _LOW_RESOLUTION_SHARE:
        finer = [max(mm) / n > 2 for n in mm]
        mm = [n * _LOW_RESOLUTION_STEP if fine or not any(finer) else n for n, fine in zip(mm, finer, strict=True)]
        shape = [old / new * n for old, new, n in zip(spacing, mm, median, strict=True)]
        voxels = math.prod(shape)
        patch = _fit(tuple(mm), tuple(round(n) for n in shape), budget).patch
    return full / voxels >= 2


def _reduced(patch: Triple, axis: int, by: int) -> Triple:
    return _triple(n - by if a == axis else n for a, n in enumerate(patch))


def _triple(values: Iterable[int]) -> Triple:
    z, y, x = values
    return z, y, x
