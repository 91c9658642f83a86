"""Selection of the patch at each position of an epoch. This module does no I/O.

The patch at position p depends only on (seed, epoch, p), not on ranks, workers or batches. So an epoch can be divided
among any number of ranks, interrupted, and continued by another number of ranks, with exactly the same patches.
"""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
import numpy.random  # imported before workers fork, so that they do not have to
import numpy.typing as npt

from voxlane.volume.plan import Triple, to_triple

Placement = Literal["centre", "inside"]
"""Position of the chosen foreground voxel in its patch: in the centre, as in nnU-Net, or anywhere, as in MLPerf."""
_ORDER, _PATCH, _AUGMENT = 0, 1, 2
"""Purposes of the random streams."""


@functools.lru_cache(maxsize=4)
def _case_order(seed: int, round_number: int, cases: int) -> npt.NDArray[np.int64]:
    return _make_generator(seed, _ORDER, round_number).permutation(cases)


def case_for_position(position: int, *, cases: int, samples: int, seed: int, epoch: int) -> int:
    """Return the case at a position. Cases come in a new random order every round, so each comes equally often; a round
    may begin in one epoch and end in the next."""
    round_number, index = divmod(epoch * samples + position, cases)
    return int(_case_order(seed, round_number, cases)[index])


def is_forced(position: int, fraction: float) -> bool:
    """Return whether the patch is drawn around foreground: an evenly spaced `fraction` of all positions."""
    return int((position + 1) * fraction + 1e-9) > int(position * fraction + 1e-9)


def draw_patch(
    position: int,
    *,
    seed: int,
    epoch: int,
    patch: Triple,
    shape: Triple,
    foreground: npt.NDArray[np.integer] | None = None,
    placement: Placement = "centre",
) -> Triple:
    """Draw the first voxel (z, y, x) of the patch at a position, from a volume of `shape`.

    `foreground` has rows (label value, z, y, x), of which one class is drawn with equal probabilities, then one of its
    voxels. Without foreground, the patch can be anywhere. Along an axis where the volume is smaller than the patch, the
    volume is centred in it.
    """
    generator = _make_generator(seed, _PATCH, epoch, position)
    low, high = start_bounds(patch, shape)
    if foreground is not None and len(foreground):
        values = np.unique(foreground[:, 0])
        rows = foreground[foreground[:, 0] == values[generator.integers(len(values))]]
        voxel = rows[generator.integers(len(rows)), 1:].astype(np.int64)
        offset = np.asarray(patch) // 2 if placement == "centre" else generator.integers(0, patch)
        start = np.clip(voxel - offset, low, high)
    else:
        start = generator.integers(low, high, endpoint=True)
    return to_triple(start)


def start_bounds(patch: Triple, shape: Triple) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the smallest and largest start of a patch along each axis, both inclusive."""
    slack = np.asarray(shape, np.int64) - np.asarray(patch, np.int64)
    middle = -((-slack) // 2)
    return np.where(slack >= 0, 0, middle), np.where(slack >= 0, slack, middle)


def augment_seed(position: int, *, seed: int, epoch: int) -> int:
    """Return the seed of the augmentation at a position, below 2**62."""
    return int(_make_generator(seed, _AUGMENT, epoch, position).integers(1 << 62))


def _make_generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed=list(key)))
