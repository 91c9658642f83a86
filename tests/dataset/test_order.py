"""Sharding and resume yield every sample once, for any number of ranks and workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxlane import MapDataset, errors
from voxlane.dataset.order import State, epoch_order, rank_share, rank_share_size, worker_share

SMALL = st.integers(1, 7)


@given(st.integers(0, 200), st.integers(0, 200), SMALL, SMALL, SMALL)
def test_ranks_and_workers_partition_the_remaining_samples(
    samples: int, consumed: int, world: int, workers: int, block: int
) -> None:
    consumed = min(consumed, samples)
    taken = [
        position
        for rank in range(world)
        for worker in range(workers)
        for position in worker_share(rank_share(samples, consumed, rank, world, "keep"), worker, workers, block)
    ]
    assert sorted(taken) == list(range(consumed, samples))


@given(st.integers(1, 200), st.integers(0, 30), SMALL, SMALL, SMALL, st.integers(0, 20))
def test_equal_batches_on_every_rank_leave_a_suffix(
    samples: int, consumed: int, world: int, workers: int, batch: int, batches: int
) -> None:
    """The state after k batches per rank is a single number, on which the loader relies."""
    consumed = min(consumed, samples)
    given_out: list[int] = []
    for rank in range(world):
        mine = rank_share(samples, consumed, rank, world, "keep")
        shares = [worker_share(mine, w, workers, batch) for w in range(workers)]
        # A DataLoader asks its workers for one batch each, in turn.
        in_order = [s[i : i + batch] for i in range(0, len(mine), batch) for s in shares if len(s[i : i + batch])]
        given_out += [int(p) for b in in_order[:batches] for p in b]
    assert sorted(given_out) == list(range(consumed, min(samples, consumed + batches * batch * world)))


@given(st.integers(0, 100), st.integers(0, 100), SMALL, st.sampled_from(["keep", "drop", "repeat"]))
def test_share_sizes(samples: int, consumed: int, world: int, tail: str) -> None:
    consumed = min(consumed, samples)
    sizes = [len(rank_share(samples, consumed, r, world, tail)) for r in range(world)]  # type: ignore[arg-type]
    assert sizes == [rank_share_size(samples, consumed, r, world, tail) for r in range(world)]  # type: ignore[arg-type]
    if tail != "keep":
        assert len(set(sizes)) == 1
    if tail == "repeat":
        assert sum(sizes) >= samples - consumed


def test_shuffle_depends_only_on_seed_and_epoch() -> None:
    order = epoch_order(1000, seed=3, epoch=5, shuffle=True)
    assert np.array_equal(order, epoch_order(1000, seed=3, epoch=5, shuffle=True))
    assert not np.array_equal(order, epoch_order(1000, seed=3, epoch=6, shuffle=True))
    assert not np.array_equal(order, epoch_order(1000, seed=4, epoch=5, shuffle=True))
    assert sorted(order) == list(range(1000))
    assert np.array_equal(epoch_order(5, seed=3, epoch=5, shuffle=False), np.arange(5))


def test_wrong_states_and_ranks_raise() -> None:
    with pytest.raises(errors.StateError, match="not a dataset state"):
        State.from_dict({"epoch": 1})
    with pytest.raises(errors.ConfigError, match="rank 2 of 2"):
        MapDataset("file:///data", rank=2, world_size=2)
