"""The order of samples on ranks and workers, computed without I/O.

One epoch has one global order, a permutation of the samples drawn from (seed, epoch). Ranks take turns along it: of
the positions after the first `consumed` ones, rank r of W takes r, r + W, r + 2W, ... Within a rank, DataLoader workers
take turns by blocks of one batch, as a DataLoader returns their batches. So after every rank has consumed
k batches of b samples, exactly the first k * b * W positions are consumed. One number describes what is left, and any
number of ranks and workers can divide it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.random  # imported early, so that forked workers need not import it
import numpy.typing as npt

from voxlane.errors import StateError

Positions = npt.NDArray[np.int64]
Tail = Literal["keep", "drop", "repeat"]
"""What happens to the samples that cannot be divided evenly among ranks: they are kept (some ranks get one more),
dropped, or filled up by repeating samples from the start of the order."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Progress within an epoch, which is enough to resume on any number of ranks and workers."""

    seed: int
    epoch: int
    consumed: int
    """Number of samples of the global order that all ranks together have taken."""
    shuffle: bool
    samples: int
    """Number of samples in the dataset."""
    fingerprint: str
    """Hash of the samples and their order before shuffling."""
    version: int = 1

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        """Return a state from its fields as plain data."""
        try:
            state = cls(**values)
        except TypeError as error:
            raise StateError(f"not a dataset state: {error}", fix="Load the result of state_dict()") from None
        if state.version != 1:
            raise StateError(f"unsupported version {state.version} of a dataset state", fix="Upgrade voxlane")
        return state


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Positions:
    """Return the sample at each position of the epoch."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    return np.random.Generator(np.random.Philox(seed=[seed, epoch])).permutation(samples).astype(np.int64)


def rank_share(samples: int, consumed: int, rank: int, world_size: int, tail: Tail) -> Positions:
    """Return the remaining positions of rank `rank`, in order."""
    left = max(0, samples - consumed)
    if tail == "drop":
        left -= left % world_size
    positions = np.arange(consumed + rank, consumed + left, world_size, dtype=np.int64)
    if tail == "repeat" and left and len(positions) < -(-left // world_size):
        extra = consumed + rank + len(positions) * world_size
        positions = np.append(positions, extra % samples)
    return positions


def rank_share_size(samples: int, consumed: int, rank: int, world_size: int, tail: Tail) -> int:
    """Return the number of positions in `rank_share`."""
    left = max(0, samples - consumed)
    if tail == "drop":
        return left // world_size
    if tail == "repeat":
        return -(-left // world_size)
    return max(0, -(-(left - rank) // world_size))


def worker_share(positions: Positions, worker: int, num_workers: int, block: int) -> Positions:
    """Return the positions of one of a rank's workers: every `num_workers`-th block of `block` positions."""
    if num_workers <= 1:
        return positions
    turn = np.arange(len(positions)) // block
    share: Positions = positions[turn % num_workers == worker]
    return share
