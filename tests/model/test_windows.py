"""Sliding windows: nnU-Net's places and weights, MONAI's result, padding, mirroring, slabs, and masks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from voxlane.errors import ConfigError, RunError
from voxlane.model import windows
from voxlane.model.unet import UNet
from voxlane.model.windows import Layout, budget, predict_slabs, predict_windows, to_mask, window_starts
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Triple


class Mixing(nn.Module):
    """Two outputs that depend on the place in the window and on neighbours, as a network's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.linspace(0, 1, x.shape[-1]) + torch.linspace(0, 2, x.shape[-3])[:, None, None]
        ramp = ramp.to(x.device)
        mixed: Tensor = self.conv(x) * (1 + ramp)
        return mixed


def nnunets_weights(patch: Triple) -> np.ndarray[Any, Any]:
    from scipy.ndimage import gaussian_filter

    point = np.zeros(patch)
    point[tuple(n // 2 for n in patch)] = 1
    weights: np.ndarray[Any, Any] = gaussian_filter(point, [n / 8 for n in patch], 0, mode="constant", cval=0)
    return weights / weights.max()


def plainly(network: nn.Module, image: Tensor, patch: Triple, overlap: float) -> Tensor:
    """The definition: every window weighed, summed, and divided by the sum of weights."""
    weights = torch.from_numpy(nnunets_weights(patch))
    starts = [window_starts(s, p, overlap) for s, p in zip(image.shape[1:], patch, strict=True)]
    total, share = torch.zeros(2, *image.shape[1:], dtype=torch.float64), torch.zeros(image.shape[1:]).double()
    for z in starts[0]:
        for y in starts[1]:
            for x in starts[2]:
                place = (slice(z, z + patch[0]), slice(y, y + patch[1]), slice(x, x + patch[2]))
                total[(slice(None), *place)] += network(image[(slice(None), *place)][None])[0].double() * weights
                share[place] += weights
    return (total / share).float()


@given(st.integers(1, 200), st.integers(1, 64), st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_windows_cover_the_axis(size: int, patch: int, overlap: float) -> None:
    size = max(size, patch)
    starts = window_starts(size, patch, overlap)
    assert starts[0] == 0
    assert starts[-1] == size - patch
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    # Rounding to whole voxels may add less than one to the step.
    assert all(0 < gap < patch * (1 - overlap) + 1 for gap in gaps)


def test_places_are_nnunets() -> None:
    # The example in nnU-Net's own comment, and three sizes of which its function was asked.
    assert window_starts(110, 64, 0.5) == (0, 23, 46)
    assert window_starts(64, 64, 0.5) == (0,)
    assert window_starts(65, 64, 0.5) == (0, 1)
    assert window_starts(400, 128, 0.5) == (0, 54, 109, 163, 218, 272)


@given(st.tuples(*[st.integers(1, 40)] * 3), st.tuples(*[st.integers(1, 16)] * 3), st.sampled_from([0.0, 0.5, 0.7]))
@settings(deadline=None, max_examples=40)
def test_shares_sum_to_one_everywhere(size: Triple, patch: Triple, overlap: float) -> None:
    layout = Layout.of(size, patch, overlap)
    for axis in range(3):
        total = torch.zeros(layout.padded[axis])
        for start, weight in zip(layout.starts[axis], layout.weights[axis], strict=True):
            total[start : start + patch[axis]] += weight
        torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize(("size", "batch"), [((21, 17, 30), 1), ((16, 24, 25), 3), ((8, 12, 10), 4)])
@torch.no_grad()
def test_equal_to_the_definition(size: Triple, batch: int) -> None:
    image, patch = torch.randn(1, *size), (8, 12, 10)
    seen: list[tuple[int, int]] = []
    found = predict_windows(Mixing(), image, patch, batch=batch, progress=lambda *at: seen.append(at))
    torch.testing.assert_close(found, plainly(Mixing(), image, patch, 0.5))
    assert seen[-1][0] == seen[-1][1]


@torch.no_grad()
def test_equal_to_monai_where_windows_coincide() -> None:
    from monai.inferers import sliding_window_inference

    # Multiples of half a window, where MONAI's places are nnU-Net's too.
    image, patch = torch.randn(1, 16, 30, 24), (8, 12, 8)
    weights = torch.from_numpy(nnunets_weights(patch)).float()
    theirs = sliding_window_inference(image[None], patch, 2, Mixing(), overlap=0.5, roi_weight_map=weights)
    torch.testing.assert_close(predict_windows(Mixing(), image, patch), theirs[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_volume_smaller_than_the_window_is_padded_on_both_sides() -> None:
    network, image = Mixing(), torch.randn(1, 5, 20, 7)
    whole = torch.full((1, 8, 20, 10), 0.5)
    whole[:, 1:6, :, 1:8] = image
    found = predict_windows(network, image, (8, 12, 10), fill=0.5)
    torch.testing.assert_close(found, plainly(network, whole, (8, 12, 10), 0.5)[:, 1:6, :, 1:8])


@torch.no_grad()
def test_regions_read_on_demand_give_the_same() -> None:
    image = torch.randn(1, 21, 17, 9)
    asked = []

    def read(start: Triple, stop: Triple) -> Tensor:
        asked.append((start, stop))
        assert all(0 <= a < b <= n for a, b, n in zip(start, stop, image.shape[1:], strict=True))
        return image[:, start[0] : stop[0], start[1] : stop[1], start[2] : stop[2]]

    found = predict_windows(Mixing(), read, (8, 12, 10), shape=(21, 17, 9))
    torch.testing.assert_close(found, predict_windows(Mixing(), image, (8, 12, 10)), rtol=0, atol=0)
    assert len(asked) == len(window_starts(21, 8, 0.5)) * len(window_starts(17, 12, 0.5))


class Now:
    """`windows.Side` without a GPU: what is begun is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.closed = False

    def start(self, work: Callable[[], Tensor | None]) -> Future[Any]:
        assert not self.closed
        begun: Future[Any] = Future()
        begun.set_result(work())
        return begun

    def finish(self, begun: Future[Any]) -> Any:
        return begun.result()

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("way", ["by slab", "ahead"])
@pytest.mark.parametrize("size", [(21, 17, 30), (37, 12, 12), (5, 20, 7), (8, 12, 10)])
@torch.no_grad()
def test_every_way_in_gives_the_same(monkeypatch: pytest.MonkeyPatch, way: str, size: Triple) -> None:
    image = torch.randn(1, *size)
    wanted = predict_windows(Mixing(), image, (8, 12, 10), batch=2, fill=0.5)
    sent = []

    def of(image: Tensor, *how: Any) -> windows.Entering:
        if way == "ahead":
            return windows.EnteringAhead(windows.reader(image), *how)
        entering = windows.EnteringBySlab(image, *how)
        sent.extend(entering._new_slices(level) for level in range(len(entering.layout.starts[0])))
        return entering

    monkeypatch.setattr(windows, "Side", Now)
    monkeypatch.setattr(windows.Entering, "of", staticmethod(of))
    found = predict_windows(Mixing(), image, (8, 12, 10), batch=2, fill=0.5)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    if way == "by slab":
        assert [z for start, stop in sent for z in range(start, stop)] == list(range(size[0])), "every slice once"


class Late:
    """`windows.Side` without a GPU, whose thread has not come to its work when it is closed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(time.sleep, 0.1)

    def start(self, work: Callable[[], None]) -> Future[Any]:
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def test_the_last_slab_arrives_however_late_its_thread() -> None:
    side: Any = Late()
    arrived: list[str] = []
    with windows.Leaving() as leaving:
        leaving._side, leaving._begun = side, side.start(lambda: arrived.append("the last slab"))
    assert arrived == ["the last slab"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside a GPU's work")
@pytest.mark.parametrize("channels", [1, 2])
@torch.no_grad()
def test_on_a_gpu(channels: int) -> None:
    torch.manual_seed(0)
    network = nn.Conv3d(channels, 3, 3, padding=1)
    image = torch.randn(channels, 75, 60, 41)
    wanted = predict_windows(network, image, (16, 24, 16))
    network.cuda().to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    for source in (image, image.cuda(), windows.reader(image)):
        for kept in ("cpu", "cuda"):
            found = predict_windows(
                network, source, (16, 24, 16), shape=(75, 60, 41), batch=3, result_device=kept, device="cuda"
            )
            assert found.device.type == kept
            torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_mirrorings_are_averaged() -> None:
    network, image = Mixing(), torch.randn(1, 8, 8, 8)
    wanted = torch.stack(
        [network(image[None].flip(d)).flip(d)[0] if d else network(image[None])[0] for d in ([], [2], [4], [2, 4])]
    ).mean(0)
    torch.testing.assert_close(predict_windows(network, image, (8, 8, 8), mirror_axes=(0, 2)), wanted)


@torch.no_grad()
def test_slabs_come_in_order_without_gaps_and_no_higher_than_a_window() -> None:
    image = torch.randn(1, 37, 12, 12)
    whole = predict_windows(Mixing(), image, (8, 12, 10))
    at = 0
    for start, stop, logits in predict_slabs(Mixing(), image, (8, 12, 10)):
        assert start == at
        assert stop - start <= 8
        torch.testing.assert_close(logits, whole[:, start:stop])
        at = stop
    assert at == 37


def test_the_network_is_left_as_it_was() -> None:
    small = Network(features=(4, 8, 8), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3)
    network = UNet(1, 2, small).train()
    found = predict_windows(network, torch.randn(1, 10, 16, 16), (8, 8, 8), autocast=torch.bfloat16)
    assert network.training
    assert found.dtype == torch.float32
    assert not found.requires_grad
    half = predict_windows(network, torch.randn(1, 10, 16, 16), (8, 8, 8), result_dtype=torch.float16)
    assert half.dtype == torch.float16


def test_the_stated_budget() -> None:
    slab, result = budget((400, 512, 512), (128, 128, 128), 3)
    assert slab == 402_653_184
    assert result == 1_258_291_200
    assert budget((400, 512, 512), (128, 128, 128), 3, torch.float16)[1] == 629_145_600


def test_output_that_is_not_finite_is_refused() -> None:
    image = torch.randn(1, 8, 8, 8)
    image[0, 3, 3, 3] = torch.inf
    with pytest.raises(RunError, match="not finite"):
        predict_windows(Mixing(), image, (8, 8, 8))


@pytest.mark.parametrize(("batch", "said"), [(4, "Lower the number of windows"), (1, "Predict on the CPU")])
def test_a_gpu_without_enough_memory_says_what_to_lower(batch: int, said: str) -> None:
    class Greedy(Mixing):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(RunError, match=said):
        predict_windows(Greedy(), torch.zeros(1, 8, 16, 16), (8, 8, 8), batch=batch)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"overlap": 1.0}, "overlap"),
        ({"batch": 0}, "batch"),
        ({"mirror_axes": (0, 0)}, "mirror_axes"),
        ({"mirror_axes": (3,)}, "mirror_axes"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        predict_windows(Mixing(), torch.zeros(1, 8, 8, 8), (8, 8, 8), **wrong)
    with pytest.raises(ConfigError, match="shape"):
        predict_windows(Mixing(), lambda *_: torch.zeros(1), (8, 8, 8))
    with pytest.raises(ConfigError, match="four axes"):
        predict_windows(Mixing(), torch.zeros(8, 8, 8), (8, 8, 8))


def test_classes_become_the_files_values() -> None:
    description = Description(name="t", channels=("CT",), labels={"background": 0, "b": 4, "a": 1})
    logits = torch.zeros(3, 1, 1, 3)
    logits[1, 0, 0, 1] = logits[2, 0, 0, 2] = 1
    assert to_mask(logits, description).tolist() == [[[0, 1, 4]]]
    drawn = torch.randint(0, 3, (3, 4, 5, 6)).float()
    wanted = torch.tensor([0, 1, 4], dtype=torch.uint8)[drawn.argmax(0)]
    torch.testing.assert_close(to_mask(drawn, description), wanted)
    with pytest.raises(ConfigError, match="2 outputs for the 3"):
        to_mask(logits[:2], description)


def test_later_regions_lie_over_earlier_ones() -> None:
    description = Description(
        name="t",
        channels=("MR",),
        labels={"background": 0, "ed": 2, "ncr": 1, "et": 4},
        regions={"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)},
    )
    chances = torch.tensor([[0.2, 0.9, 0.9, 0.9], [0.1, 0.1, 0.8, 0.8], [0.1, 0.1, 0.5, 0.6]])[:, None, None]
    wanted = [[[0, 2, 1, 4]]]
    assert to_mask(chances, description, probabilities=True).tolist() == wanted
    assert to_mask(chances.logit(), description).tolist() == wanted
