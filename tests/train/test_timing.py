"""Where the time goes: what steps waited for, and shares that add up."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from voxlane.train.timing import LoaderTime, Waits, split_seconds, waited_for

seconds = st.floats(0, 100)


@pytest.mark.parametrize(
    ("late_s", "work_s", "loader_s", "wanted"),
    [
        (-2.0, 3.0, 1.0, Waits(0, 0)),  # ready before the step before was done
        (1.0, 3.0, 1.0, Waits(1, 0)),  # the last second of augmenting
        (4.0, 3.0, 5.0, Waits(3, 1)),  # all of it, and of five seconds for the loader one
        (9.0, 3.0, 2.0, Waits(3, 2)),  # the rest was Python, or a validation
    ],
)
def test_what_a_step_waited_for(late_s: float, work_s: float, loader_s: float, wanted: Waits) -> None:
    assert waited_for(late_s, work_s, loader_s) == wanted


@given(late_s=st.floats(-100, 100), work_s=seconds, loader_s=seconds)
def test_no_more_is_explained_than_was_waited(late_s: float, work_s: float, loader_s: float) -> None:
    found = waited_for(late_s, work_s, loader_s)
    assert 0 <= found.augment_s <= work_s
    assert 0 <= found.loader_s <= loader_s
    assert found.augment_s + found.loader_s <= max(0.0, late_s) + 1e-9


@given(
    late=st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1)), max_size=20), step_s=st.floats(0, 1)
)
def test_shares_add_up_where_patches_are_made_ready_beside_the_step(
    late: list[tuple[float, float, float]], step_s: float
) -> None:
    """A second of augmentation beside a step is no second of the run."""
    waits = sum((waited_for(*each) for each in late), Waits())
    wall_s = sum(max(0.0, each[0]) + step_s for each in late)
    parts = {"augment": waits.augment_s, "step": step_s * len(late), "validate": 0.0}
    shares = split_seconds(wall_s, LoaderTime(waits.loader_s, 1.0, 3.0), parts)
    assert sum(shares.values()) == pytest.approx(wall_s, abs=1e-6)
    assert shares["bucket"] + shares["decode"] == pytest.approx(waits.loader_s, abs=1e-6)
    assert shares["step"] == pytest.approx(step_s * len(late))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams of a GPU")
def test_patches_are_made_ready_beside_the_step() -> None:
    from voxlane.train.prefetch import STEPS_AHEAD, Prefetch

    device = torch.device("cuda")
    prefetch = Prefetch(device)
    weight = torch.randn(4096, 4096, device=device)
    sums: list[torch.Tensor] = []
    began = time.perf_counter()
    for number in range(8):
        host = torch.full((1 << 20,), float(number)).pin_memory()
        made = prefetch(lambda host=host: {"x": host.to(device, non_blocking=True) + 1, "seed": host}, 0.0)  # type: ignore[misc]
        sums.append(made["x"].sum() / (1 << 20))
        del made, host  # their memory is free for the next batches, which must not write over it too early
        for _ in range(40):
            weight = weight @ weight / 4096
        prefetch.stepped()
        if number < STEPS_AHEAD:
            assert time.perf_counter() - began < 5
    assert [float(x) for x in sums] == [float(n + 1) for n in range(8)]
    waits = prefetch.waits(wait=True)
    assert waits.loader_s == 0
    assert waits.augment_s < time.perf_counter() - began
