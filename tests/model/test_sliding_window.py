"""Sliding windows: positions and weights of nnU-Net, the result of MONAI, padding, mirroring, slabs, and masks."""

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
from voxlane.model import sliding_window
from voxlane.model.networks import UNet
from voxlane.model.sliding_window import (
    WindowGrid,
    predict_slabs,
    predict_windows,
    to_mask,
    window_starts,
)
from voxlane.model.window_sums import nnunet_weight
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Triple


class PositionDependentNetwork(nn.Module):
    """A network whose two outputs depend on the position in the window and on neighbouring voxels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.linspace(0, 1, x.shape[-1]) + torch.linspace(0, 2, x.shape[-3])[:, None, None]
        ramp = ramp.to(x.device)
        mixed: Tensor = self.conv(x) * (1 + ramp)
        return mixed


def nnunet_weights(patch: Triple) -> np.ndarray[Any, Any]:
    from scipy.ndimage import gaussian_filter

    point = np.zeros(patch)
    point[tuple(n // 2 for n in patch)] = 1
    weights: np.ndarray[Any, Any] = gaussian_filter(point, [n / 8 for n in patch], 0, mode="constant", cval=0)
    return weights / weights.max()


def predict_by_definition(network: nn.Module, image: Tensor, patch: Triple, overlap: float) -> Tensor:
    """Predict by the definition: weight and sum all windows, and divide by the sum of the weights."""
    weights = torch.from_numpy(nnunet_weights(patch))
    starts = [window_starts(s, p, overlap) for s, p in zip(image.shape[1:], patch, strict=True)]
    total, weight_sum = torch.zeros(2, *image.shape[1:], dtype=torch.float64), torch.zeros(image.shape[1:]).double()
    for z in starts[0]:
        for y in starts[1]:
            for x in starts[2]:
                region = (slice(z, z + patch[0]), slice(y, y + patch[1]), slice(x, x + patch[2]))
                total[(slice(None), *region)] += network(image[(slice(None), *region)][None])[0].double() * weights
                weight_sum[region] += weights
    return (total / weight_sum).float()


@given(st.integers(1, 200), st.integers(1, 64), st.sampled_from([0.0, 0.25, 0.5, 0.75]))
def test_windows_cover_the_axis(size: int, patch: int, overlap: float) -> None:
    size = max(size, patch)
    starts = window_starts(size, patch, overlap)
    assert starts[0] == 0
    assert starts[-1] == size - patch
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    # Rounding to whole voxels may add less than one to the step.
    assert all(0 < gap < patch * (1 - overlap) + 1 for gap in gaps)


def test_window_starts_match_nnunet() -> None:
    # The example in a comment of nnU-Net, and the results of its function for three more sizes.
    assert window_starts(110, 64, 0.5) == (0, 23, 46)
    assert window_starts(64, 64, 0.5) == (0,)
    assert window_starts(65, 64, 0.5) == (0, 1)
    assert window_starts(400, 128, 0.5) == (0, 54, 109, 163, 218, 272)


@given(st.tuples(*[st.integers(1, 40)] * 3), st.tuples(*[st.integers(1, 16)] * 3), st.sampled_from([0.0, 0.5, 0.7]))
@settings(deadline=None, max_examples=40)
def test_weights_sum_to_one_everywhere(size: Triple, patch: Triple, overlap: float) -> None:
    layout = WindowGrid.of(size, patch, overlap)
    for axis in range(3):
        total = torch.zeros(layout.padded[axis])
        for start, weight in zip(layout.starts[axis], layout.weights[axis], strict=True):
            total[start : start + patch[axis]] += weight
        torch.testing.assert_close(total, torch.ones_like(total))


@pytest.mark.parametrize(("size", "batch"), [((21, 17, 30), 1), ((16, 24, 25), 3), ((8, 12, 10), 4)])
@torch.no_grad()
def test_prediction_matches_the_definition(size: Triple, batch: int) -> None:
    image, patch = torch.randn(1, *size), (8, 12, 10)
    progress_calls: list[tuple[int, int]] = []
    actual = predict_windows(
        PositionDependentNetwork(), image, patch, batch=batch, progress=lambda *counts: progress_calls.append(counts)
    )
    torch.testing.assert_close(actual, predict_by_definition(PositionDependentNetwork(), image, patch, 0.5))
    assert progress_calls[-1][0] == progress_calls[-1][1]


@pytest.mark.parametrize("size", [(21, 17, 30), (5, 24, 7)])
@torch.no_grad()
def test_float16_sums_round_as_nnunet(size: Triple) -> None:
    image, patch, network = torch.randn(1, *size), (8, 12, 10), PositionDependentNetwork()
    weights = (10 * torch.from_numpy(nnunet_weights(patch))).half()
    weights[weights == 0] = weights[weights > 0].min()
    assert torch.equal(nnunet_weight(patch), weights)
    layout = WindowGrid.of(size, patch, 0.5)
    padded = torch.zeros(1, *layout.padded)
    inside = tuple(slice(b, b + n) for b, n in zip(layout.before, size, strict=True))
    padded[(slice(None), *inside)] = image
    total, weight_sum = torch.zeros(2, *layout.padded).half(), torch.zeros(layout.padded).half()
    for corner in itertools.product(*layout.starts):
        region = tuple(slice(start, start + side) for start, side in zip(corner, patch, strict=True))
        total[(slice(None), *region)] += network(padded[(slice(None), *region)][None])[0] * weights
        weight_sum[region] += weights
    actual = predict_windows(network, image, patch, float16_sums=True, result_dtype=torch.float16)
    assert torch.equal(actual, (total / weight_sum)[(slice(None), *inside)])
    exact = predict_windows(network, image, patch)
    assert (actual.float() - exact).abs().max() > 0.01, "float16 cannot hold the smallest weights"


@torch.no_grad()
def test_prediction_matches_monai_with_equal_windows() -> None:
    from monai.inferers import sliding_window_inference

    # With multiples of half a window MONAI and nnU-Net place windows alike.
    image, patch = torch.randn(1, 16, 30, 24), (8, 12, 8)
    weights = torch.from_numpy(nnunet_weights(patch)).float()
    reference = sliding_window_inference(
        image[None], patch, 2, PositionDependentNetwork(), overlap=0.5, roi_weight_map=weights
    )
    torch.testing.assert_close(
        predict_windows(PositionDependentNetwork(), image, patch), reference[0], rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_small_volume_is_padded_on_both_sides() -> None:
    network, image = PositionDependentNetwork(), torch.randn(1, 5, 20, 7)
    padded_image = torch.full((1, 8, 20, 10), 0.5)
    padded_image[:, 1:6, :, 1:8] = image
    actual = predict_windows(network, image, (8, 12, 10), fill=0.5)
    torch.testing.assert_close(actual, predict_by_definition(network, padded_image, (8, 12, 10), 0.5)[:, 1:6, :, 1:8])


class ImmediateCopies:
    """A `CopyStream` without a GPU, which finishes its work immediately."""

    def __init__(self, device: torch.device) -> None:
        self.closed = False

    def start(self, work: Callable[[], Tensor | None]) -> Future[Any]:
        assert not self.closed
        future: Future[Any] = Future()
        future.set_result(work())
        return future

    def finish(self, future: Future[Any]) -> Any:
        return future.result()

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("size", [(21, 17, 30), (37, 12, 12), (5, 20, 7), (8, 12, 10)])
@torch.no_grad()
def test_windows_by_slab_give_the_same_result(monkeypatch: pytest.MonkeyPatch, size: Triple) -> None:
    image = torch.randn(1, *size)
    expected = predict_windows(PositionDependentNetwork(), image, (8, 12, 10), batch=2, fill=0.5)
    copied_slices = []

    def make_source(image: Tensor, *options: Any) -> sliding_window.WindowSource:
        source = sliding_window.SlabWindows(image, *options)
        copied_slices.extend(source._new_slices(level) for level in range(len(source.layout.starts[0])))
        return source

    monkeypatch.setattr(sliding_window, "CopyStream", ImmediateCopies)
    monkeypatch.setattr(sliding_window.WindowSource, "of", staticmethod(make_source))
    actual = predict_windows(PositionDependentNetwork(), image, (8, 12, 10), batch=2, fill=0.5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [z for start, stop in copied_slices for z in range(start, stop)] == list(range(size[0])), "every slice once"


class SlowCopies:
    """A `CopyStream` without a GPU, whose thread is still busy when it is closed."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(time.sleep, 0.1)

    def start(self, work: Callable[[], None]) -> Future[Any]:
        return self._thread.submit(work)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def test_last_slab_is_copied_by_a_slow_thread() -> None:
    copies: Any = SlowCopies()
    arrived: list[str] = []
    with sliding_window.SlabCopier() as copier:
        copier._copies, copier._started = copies, copies.start(lambda: arrived.append("the last slab"))
    assert arrived == ["the last slab"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("channels", [1, 2])
@torch.no_grad()
def test_gpu_matches_cpu(channels: int) -> None:
    torch.manual_seed(0)
    network = nn.Conv3d(channels, 3, 3, padding=1)
    image = torch.randn(channels, 75, 60, 41)
    expected = predict_windows(network, image, (16, 24, 16))
    network.cuda().to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    for source in (image, image.cuda()):
        for result_device in ("cpu", "cuda"):
            actual = predict_windows(network, source, (16, 24, 16), batch=3, result_device=result_device, device="cuda")
            assert actual.device.type == result_device
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_mirrored_predictions_are_averaged() -> None:
    network, image = PositionDependentNetwork(), torch.randn(1, 8, 8, 8)
    expected = torch.stack(
        [network(image[None].flip(d)).flip(d)[0] if d else network(image[None])[0] for d in ([], [2], [4], [2, 4])]
    ).mean(0)
    torch.testing.assert_close(predict_windows(network, image, (8, 8, 8), mirror_axes=(0, 2)), expected)


@torch.no_grad()
def test_slabs_are_contiguous_and_at_most_a_window_high() -> None:
    image = torch.randn(1, 37, 12, 12)
    expected = predict_windows(PositionDependentNetwork(), image, (8, 12, 10))
    next_start = 0
    layout = WindowGrid.of((37, 12, 12), (8, 12, 10), 0.5)
    source = sliding_window.WindowSource(image, layout, 0.0, torch.device("cpu"))
    for start, stop, logits in predict_slabs(PositionDependentNetwork(), source):
        assert start == next_start
        assert stop - start <= 8
        torch.testing.assert_close(logits, expected[:, start:stop])
        next_start = stop
    assert next_start == 37


def test_network_stays_in_training_mode() -> None:
    small = Network(features=(4, 8, 8), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2)), kernels=((3, 3, 3),) * 3)
    network = UNet(1, 2, small).train()
    actual = predict_windows(network, torch.randn(1, 10, 16, 16), (8, 8, 8), autocast=torch.bfloat16)
    assert network.training
    assert actual.dtype == torch.float32
    assert not actual.requires_grad
    half = predict_windows(network, torch.randn(1, 10, 16, 16), (8, 8, 8), result_dtype=torch.float16)
    assert half.dtype == torch.float16


def test_non_finite_output_is_rejected() -> None:
    image = torch.randn(1, 8, 8, 8)
    image[0, 3, 3, 3] = torch.inf
    with pytest.raises(RunError, match="not finite"):
        predict_windows(PositionDependentNetwork(), image, (8, 8, 8))


@pytest.mark.parametrize(("batch", "message"), [(4, "Lower the number of windows"), (1, "Predict on the CPU")])
def test_out_of_memory_error_gives_advice(batch: int, message: str) -> None:
    class OutOfMemoryNetwork(PositionDependentNetwork):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(RunError, match=message):
        predict_windows(OutOfMemoryNetwork(), torch.zeros(1, 8, 16, 16), (8, 8, 8), batch=batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 1.0}, "overlap"),
        ({"batch": 0}, "batch"),
        ({"mirror_axes": (0, 0)}, "mirror_axes"),
        ({"mirror_axes": (3,)}, "mirror_axes"),
    ],
)
def test_errors_name_the_argument(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        predict_windows(PositionDependentNetwork(), torch.zeros(1, 8, 8, 8), (8, 8, 8), **options)
    with pytest.raises(ConfigError, match="four axes"):
        predict_windows(PositionDependentNetwork(), torch.zeros(8, 8, 8), (8, 8, 8))


def test_classes_become_label_values() -> None:
    description = Description(name="t", channels=("CT",), labels={"background": 0, "b": 4, "a": 1})
    logits = torch.zeros(3, 1, 1, 3)
    logits[1, 0, 0, 1] = logits[2, 0, 0, 2] = 1
    assert to_mask(logits, description).tolist() == [[[0, 1, 4]]]
    random_logits = torch.randint(0, 3, (3, 4, 5, 6)).float()
    expected = torch.tensor([0, 1, 4], dtype=torch.uint8)[random_logits.argmax(0)]
    torch.testing.assert_close(to_mask(random_logits, description), expected)
    with pytest.raises(ConfigError, match=r"expected 3 outputs for .*, got 2"):
        to_mask(logits[:2], description)


def test_later_regions_overwrite_earlier_ones() -> None:
    description = Description(
        name="t",
        channels=("MR",),
        labels={"background": 0, "ed": 2, "ncr": 1, "et": 4},
        regions={"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)},
    )
    probabilities = torch.tensor([[0.2, 0.9, 0.9, 0.9], [0.1, 0.1, 0.8, 0.8], [0.1, 0.1, 0.5, 0.6]])[:, None, None]
    expected = [[[0, 2, 1, 4]]]
    assert to_mask(probabilities, description, probabilities=True).tolist() == expected
    assert to_mask(probabilities.logit(), description).tolist() == expected
