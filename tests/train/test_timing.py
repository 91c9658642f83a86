"""Tests of how a run's time is split: what steps waited for, and shares that add up."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from voxlane.train.timing import STEPS_AHEAD, GpuPrefetch, GpuWaits, attribute_wait, split_seconds

seconds = st.floats(0, 100)


@pytest.mark.parametrize(
    ("late_s", "work_s", "loader_s", "expected"),
    [
        (-2.0, 3.0, 1.0, GpuWaits(0, 0)),  # ready before the previous step ended
        (1.0, 3.0, 1.0, GpuWaits(1, 0)),  # the last second of augmenting
        (4.0, 3.0, 5.0, GpuWaits(3, 1)),  # all of it, and one of five seconds for the loader
        (9.0, 3.0, 2.0, GpuWaits(3, 2)),  # the rest was Python, or a validation
    ],
)
def test_wait_goes_to_augmentation_first(late_s: float, work_s: float, loader_s: float, expected: GpuWaits) -> None:
    assert attribute_wait(late_s, work_s, loader_s) == expected


@given(late_s=st.floats(-100, 100), work_s=seconds, loader_s=seconds)
def test_at_most_the_whole_wait_is_attributed(late_s: float, work_s: float, loader_s: float) -> None:
    waits = attribute_wait(late_s, work_s, loader_s)
    assert 0 <= waits.augment_s <= work_s
    assert 0 <= waits.loader_s <= loader_s
    assert waits.augment_s + waits.loader_s <= max(0.0, late_s) + 1e-9


@given(
    late=st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1)), max_size=20), step_s=st.floats(0, 1)
)
def test_shares_add_up_to_the_wall_time(late: list[tuple[float, float, float]], step_s: float) -> None:
    """Augmentation that runs beside a step takes no time of the run."""
    waits = sum((attribute_wait(*each) for each in late), GpuWaits())
    wall_s = sum(max(0.0, each[0]) + step_s for each in late)
    measured = {"augment": waits.augment_s, "step": step_s * len(late), "validate": 0.0}
    shares = split_seconds(wall_s, {**measured, "waited": waits.loader_s, "bucket": 1.0, "decode": 3.0})
    assert sum(shares.values()) == pytest.approx(wall_s, abs=1e-6)
    assert shares["bucket"] + shares["decode"] == pytest.approx(waits.loader_s, abs=1e-6)
    assert shares["step"] == pytest.approx(step_s * len(late))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs the streams of a GPU")
def test_prefetched_patches_are_right_while_the_gpu_is_busy() -> None:
    device = torch.device("cuda")
    prefetch = GpuPrefetch(device)
    weight = torch.randn(4096, 4096, device=device)
    sums: list[torch.Tensor] = []
    started_at = time.perf_counter()
    for number in range(8):
        host = torch.full((1 << 20,), float(number)).pin_memory()
        batch = prefetch(lambda host=host: {"x": host.to(device, non_blocking=True) + 1, "seed": host}, 0.0)  # type: ignore[misc]
        sums.append(batch["x"].sum() / (1 << 20))
        del batch, host  # the next batches may reuse their memory, but not before the step has read it
        for _ in range(40):
            weight = weight @ weight / 4096
        prefetch.end_step()
        if number < STEPS_AHEAD:
            assert time.perf_counter() - started_at < 60, "launching does not wait for the GPU"
    assert [float(x) for x in sums] == [float(n + 1) for n in range(8)]
    waits = prefetch.waits(wait=True)
    assert waits.loader_s == 0
    assert waits.augment_s < time.perf_counter() - started_at
