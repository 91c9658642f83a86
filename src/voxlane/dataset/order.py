"""Which sample comes when, on which rank and worker: pure, no I/O.

One epoch has one global order, a permutation of the samples drawn from (seed, epoch). Ranks take turns along it: of
what is left after `consumed` samples, rank r of W takes positions r, r + W, r + 2W, ... Within a rank, DataLoader
workers take turns by blocks of one batch, which is how a DataLoader hands their batches out. So after every rank has
consumed k batches of b samples, exactly the first k * b * W positions are consumed: one number tells what is left,
and any number of ranks and workers can share it out again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.random  # here, so that forked workers need not import it
import numpy.typing as npt

from voxlane.errors import ConfigError, StateError

Positions = npt.NDArray[np.int64]
Tail = Literal["keep", "drop", "repeat"]
"""What becomes of the samples left over when ranks do not divide them evenly: kept (some ranks get one more),
dropped, or filled up by repeating samples from the start of the order."""


@dataclass(frozen=True, kw_only=True)
class State:
    """How far an epoch has come; enough to resume on any number of ranks and workers."""

    seed: int
    epoch: int
    consumed: int
    """Samples of the global order that all ranks together have taken."""
    shuffle: bool
    samples: int
    """Samples in the dataset."""
    fingerprint: str
    """Names the samples and their order before shuffling."""
    version: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> State:
        """Read what `to_dict` gave."""
        try:
            state = cls(**values)
        except TypeError as error:
            raise StateError(f"not a dataset state: {error}", fix="Load what state_dict() returned") from None
        if state.version != 1:
            raise StateError(f"a dataset state of version {state.version}", fix="Upgrade voxlane")
        return state


def epoch_order(samples: int, *, seed: int, epoch: int, shuffle: bool) -> Positions:
    """The sample at each position of the epoch."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    return np.random.Generator(np.random.Philox(seed=[seed, epoch])).permutation(samples).astype(np.int64)


def rank_share(samples: int, consumed: int, rank: int, world_size: int, tail: Tail) -> Positions:
    """The positions rank `rank` still has to take, in order."""
    left = max(0, samples - consumed)
    if tail == "drop":
        left -= left % world_size
    positions = np.arange(consumed + rank, consumed + left, world_size, dtype=np.int64)
    if tail == "repeat" and left and len(positions) < -(-left // world_size):
        extra = consumed + rank + len(positions) * world_size
        positions = np.append(positions, extra % samples)
    return positions


def rank_share_size(samples: int, consumed: int, rank: int, world_size: int, tail: Tail) -> int:
    """How many positions `rank_share` gives."""
    left = max(0, samples - consumed)
    if tail == "drop":
        return left // world_size
    if tail == "repeat":
        return -(-left // world_size)
    return max(0, -(-(left - rank) // world_size))


def worker_share(positions: Positions, worker: int, num_workers: int, block: int) -> Positions:
    """Of a rank's positions, those of one of its workers: every `num_workers`-th block of `block`."""
    if num_workers <= 1:
        return positions
    turn = np.arange(len(positions)) // block
    mine: Positions = positions[turn % num_workers == worker]
    return mine


def check_rank(rank: int, world_size: int) -> None:
    """Raise unless rank and world size make sense together."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size} ranks", fix="Ranks count from 0 to world_size - 1")
