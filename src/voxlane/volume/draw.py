"""Which patch comes at which place of an epoch: pure, no I/O.

Position p of an epoch depends on (seed, epoch, p) alone, not on ranks, workers or batches. So any number of ranks
can share an epoch out, stop, and go on as another number, and see exactly the same patches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.random  # here, so that forked workers need not import it
import numpy.typing as npt

Triple = tuple[int, int, int]
Placement = Literal["centre", "inside"]
"""Where the chosen foreground voxel lies in its patch: in the centre, as nnU-Net does, or anywhere, as MLPerf does."""
_ORDER, _PATCH, _AUGMENT = 0, 1, 2
"""What a random stream is for."""


@dataclass(frozen=True)
class Draw:
    """One patch: `[start, start + patch)` of a case; parts of it may lie outside the volume."""

    start: Triple
    """First voxel (z, y, x)."""
    forced: bool
    """Whether it was drawn around foreground."""


@functools.lru_cache(maxsize=4)
def _round(seed: int, turn: int, cases: int) -> npt.NDArray[np.int64]:
    return _generator(seed, _ORDER, turn).permutation(cases)


def case_at(position: int, *, cases: int, samples: int, seed: int, epoch: int) -> int:
    """The case of a position. Cases come in a new random order every round, so each comes equally often; a round
    may begin in one epoch and end in the next."""
    turn, place = divmod(epoch * samples + position, cases)
    return int(_round(seed, turn, cases)[place])


def is_forced(position: int, share: float) -> bool:
    """Whether the patch is drawn around foreground: `share` of all positions, evenly spread."""
    return int((position + 1) * share + 1e-9) > int(position * share + 1e-9)


def draw_patch(
    position: int,
    *,
    seed: int,
    epoch: int,
    patch: Triple,
    shape: Triple,
    foreground: npt.NDArray[np.integer],
    forced: bool,
    placement: Placement = "centre",
) -> Draw:
    """Where the patch of a position lies in its case's volume of `shape`.

    `foreground` has rows (label value, z, y, x). A forced patch first draws a class, each that the case has with the
    same chance, then one of its voxels. A case without foreground, or a patch that is not forced, lies anywhere. On an
    axis on which the volume is smaller than the patch, it lies in the middle.
    """
    generator = _generator(seed, _PATCH, epoch, position)
    low, high = bounds(patch, shape)
    if forced and len(foreground):
        values = np.unique(foreground[:, 0])
        rows = foreground[foreground[:, 0] == values[generator.integers(len(values))]]
        voxel = rows[generator.integers(len(rows)), 1:].astype(np.int64)
        inside = np.asarray(patch) // 2 if placement == "centre" else generator.integers(0, patch)
        start = np.clip(voxel - inside, low, high)
    else:
        start = generator.integers(low, high, endpoint=True)
    return Draw((int(start[0]), int(start[1]), int(start[2])), forced and bool(len(foreground)))


def bounds(patch: Triple, shape: Triple) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The smallest and largest start of a patch on each axis, both inclusive."""
    room = np.asarray(shape, np.int64) - np.asarray(patch, np.int64)
    middle = -((-room) // 2)
    return np.where(room >= 0, 0, middle), np.where(room >= 0, room, middle)


def augment_seed(position: int, *, seed: int, epoch: int) -> int:
    """The seed of a position's augmentation, below 2**62."""
    return int(_generator(seed, _AUGMENT, epoch, position).integers(1 << 62))


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed=list(key)))
