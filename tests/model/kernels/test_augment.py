"""The augmentation kernels give the same batch as the channel-by-channel code, except for the noise they generate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from voxlane.model.augment import Augment, AugmentSettings, ChannelAugmentation, SampleAugmentation
from voxlane.model.kernels import augment as kernels
from voxlane.model.kernels import support
from voxlane.volume.plan import Triple

# The interpreter uses NumPy, which warns about the logarithm of zero in gamma. A GPU does not warn.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PATCH = (5, 9, 7)
SOURCE = (7, 9, 10)
PROBABILITY_FIELDS = [field.name for field in dataclasses.fields(AugmentSettings) if field.name.endswith("_p")]
NO_OPERATIONS = dict.fromkeys(PROBABILITY_FIELDS, 0.0) | {"blur_channel_p": 1.0, "low_resolution_channel_p": 1.0}
ALL_OPERATIONS = dict.fromkeys(NO_OPERATIONS, 1.0) | {"mirror_p": 0.5, "noise_p": 0.0}

Batch = tuple[torch.Tensor, torch.Tensor]


def make_batch(size: int = 2, channels: int = 2, shape: Triple = SOURCE) -> Batch:
    generator = torch.Generator().manual_seed(7)
    image = torch.randn((size, channels, *shape), generator=generator)
    return image, torch.randint(0, 4, (size, *shape), generator=generator, dtype=torch.uint8)


def augment_with_kernels(
    augment: Augment, image: torch.Tensor, label: torch.Tensor, seeds: list[int], device: Any
) -> Batch:
    draws = augment.draws(seeds, image.shape[1])
    axis, noise_last = augment.flat_axis, augment._noise_last
    new_image, new_label = kernels.augment(
        image.to(device), label.to(device), draws, augment.patch, flat_axis=axis, noise_last=noise_last
    )
    assert new_image.dtype == torch.float32
    assert new_image.is_contiguous()
    assert new_label.dtype == label.dtype
    return new_image.cpu(), new_label.cpu()


def assert_matches_channelwise(augment: Augment, batch_pair: Batch, seeds: list[int], device: torch.device) -> None:
    image, label = augment(*batch_pair, torch.tensor(seeds))
    new_image, new_label = augment_with_kernels(augment, *batch_pair, seeds, device)
    torch.testing.assert_close(new_image, image, atol=1e-4, rtol=1e-4, equal_nan=True)
    # A GPU rounds the source coordinate one time less, so a coordinate midway between two voxels may pick the other.
    assert (new_label != label).float().mean() <= (1e-3 if device.type == "cuda" else 0)


@pytest.mark.parametrize(
    "probabilities",
    [
        {},
        {"mirror_p": 1.0},
        {"mirror_p": 0.5, "rotation_p": 1.0},
        {"scaling_p": 1.0},
        {"blur_p": 1.0},
        {"brightness_p": 1.0},
        {"contrast_p": 1.0},
        {"low_resolution_p": 1.0},
        {"gamma_inverted_p": 1.0},
        {"gamma_p": 1.0},
        {"gamma_inverted_p": 1.0, "gamma_p": 1.0},
        {"blur_p": 1.0, "low_resolution_p": 1.0},
        {"contrast_p": 1.0, "gamma_p": 1.0},
        {"blur_p": 1.0, "brightness_p": 1.0, "contrast_p": 1.0},
        {"contrast_p": 1.0, "low_resolution_p": 1.0, "gamma_inverted_p": 1.0},
        ALL_OPERATIONS,
    ],
    ids=lambda probabilities: (
        " ".join(name[:-2] for name, probability in probabilities.items() if probability)
        if probabilities != ALL_OPERATIONS
        else "all"
    ),
)
def test_every_operation(probabilities: dict[str, Any], device: torch.device) -> None:
    inputs = make_batch(size=1) if probabilities == ALL_OPERATIONS else make_batch(channels=1)
    assert_matches_channelwise(
        Augment(AugmentSettings(**NO_OPERATIONS | probabilities), PATCH), inputs, [3, 8][: len(inputs[0])], device
    )


@pytest.mark.parametrize(
    ("patch", "source", "size", "channels"),
    [
        ((3, 11, 10), (3, 11, 10), 1, 1),  # anisotropic
        ((1, 4, 4), (1, 4, 4), 1, 3),
        ((2, 3, 5), (5, 3, 6), 3, 1),
        ((12, 20, 9), (12, 20, 9), 1, 1),  # several programs, the last one partly filled
    ],
)
def test_shapes_of_patches_and_batches(
    patch: Triple, source: Triple, size: int, channels: int, device: torch.device
) -> None:
    inputs = make_batch(size, channels, source)
    assert_matches_channelwise(Augment(AugmentSettings(**ALL_OPERATIONS), patch), inputs, list(range(size)), device)


def test_programs_with_several_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 128)
    monkeypatch.setattr(kernels, "_PROGRAMS", 2)
    assert_matches_channelwise(
        Augment(AugmentSettings(**ALL_OPERATIONS), PATCH), make_batch(size=1, channels=1), [3], device
    )


def test_samples_with_different_operations(device: torch.device) -> None:
    """Each sample of a batch gets its own operations, whether few or many."""
    augment = Augment(AugmentSettings(strength=2.0, noise_std=(0.0, 0.0)), PATCH)
    assert_matches_channelwise(augment, make_batch(size=5, channels=1), [10, 11, 12, 13, 14], device)


def test_mean_far_from_zero(device: torch.device) -> None:
    """Statistics survive rounding: a standard deviation of 1 is kept with a mean of 1000."""
    image, label = make_batch()
    augment = Augment(AugmentSettings(**NO_OPERATIONS | {"contrast_p": 1.0, "gamma_p": 1.0}), PATCH)
    new_image, _ = augment_with_kernels(augment, image + 1000, label, [3, 8], device)
    expected, _ = augment(image.double() + 1000, label, torch.tensor([3, 8]))
    torch.testing.assert_close(new_image, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("image_type", [torch.float16, torch.bfloat16, torch.int16, torch.float64])
@pytest.mark.parametrize(
    "probabilities", [NO_OPERATIONS, NO_OPERATIONS | {"rotation_p": 1.0}], ids=["copied", "turned"]
)
def test_images_of_any_type(image_type: torch.dtype, probabilities: dict[str, Any], device: torch.device) -> None:
    image, label = make_batch(size=1, channels=1)
    inputs = (image * 10).to(image_type), label
    assert_matches_channelwise(Augment(AugmentSettings(**probabilities), PATCH), inputs, [3], device)


@pytest.mark.parametrize("label_type", [torch.bool, torch.int16, torch.int64])
def test_labels_of_any_type(label_type: torch.dtype, device: torch.device) -> None:
    image, label = make_batch(channels=1)
    augment = Augment(AugmentSettings(**NO_OPERATIONS | {"rotation_p": 0.5, "mirror_p": 0.5}), PATCH)
    assert [result.matrix is None for result in augment.draws([4, 5], 1)] == [False, True]
    assert_matches_channelwise(augment, (image, label.to(label_type)), [4, 5], device)


def test_image_in_channels_last_layout(device: torch.device) -> None:
    image, label = make_batch()
    image = image.contiguous(memory_format=torch.channels_last_3d)
    assert_matches_channelwise(Augment(AugmentSettings(**NO_OPERATIONS), PATCH), (image, label), [3, 8], device)


def test_constant_channel_stays_finite_and_constant(device: torch.device) -> None:
    augment = Augment(AugmentSettings(**ALL_OPERATIONS | {"brightness_p": 0.0}), PATCH)
    image, label = torch.full((2, 1, *PATCH), -0.7), torch.zeros((2, *PATCH), dtype=torch.uint8)
    new_image, _ = augment_with_kernels(augment, image, label, [1, 2], device)
    assert torch.allclose(new_image, image, atol=1e-5)


@pytest.mark.parametrize("name", ["mirror_p", "blur_p", "contrast_p", "low_resolution_p", "gamma_p"])
def test_nan_spreads_as_without_kernels(name: str, device: torch.device) -> None:
    image, label = make_batch(size=1)
    image[0, 1, 3, 4, 5] = float("nan")
    assert_matches_channelwise(
        Augment(AugmentSettings(**NO_OPERATIONS | {name: 1.0}), PATCH), (image, label), [3], device
    )


def test_nan_stays_in_its_channel(device: torch.device) -> None:
    image, label = make_batch()
    image[0, 1] = float("nan")
    new_image, _ = augment_with_kernels(Augment(AugmentSettings(**ALL_OPERATIONS), PATCH), image, label, [3, 8], device)
    assert new_image[0, 1].isnan().all()
    assert new_image[0, 0].isfinite().all()
    assert new_image[1].isfinite().all()


def test_noise_is_normal_and_depends_only_on_seed_and_channel(device: torch.device) -> None:
    augment = Augment(AugmentSettings(**NO_OPERATIONS | {"noise_p": 1.0, "noise_std": (0.1, 0.1)}), (16, 16, 16))
    image, label = torch.zeros((3, 2, 16, 16, 16)), torch.zeros((3, 16, 16, 16), dtype=torch.uint8)
    noise, _ = augment_with_kernels(augment, image, label, [1, 2, 1], device)
    assert torch.equal(noise[0], noise[2])
    rows = noise[:2].view(4, -1) / 0.1
    count = rows.shape[1]
    assert (rows.mean(1).abs() < 4 / count**0.5).all()
    assert ((rows.std(1) - 1).abs() < 4 / (2 * count) ** 0.5).all()
    assert ((rows**4).mean(1) - 3).abs().max() < 4 * (96 / count) ** 0.5
    assert (rows.abs() > 2).float().mean() == pytest.approx(0.0455, abs=0.008)
    correlations = torch.corrcoef(torch.cat([rows, rows[:1].roll(1, 1)])) - torch.eye(5)
    assert correlations.abs().max() < 5 / count**0.5


def test_noise_comes_before_blur_and_brightness_but_last_in_mlperf(device: torch.device) -> None:
    image, label = torch.ones((1, 2, *PATCH)), torch.zeros((1, *PATCH), dtype=torch.uint8)
    augment = Augment(AugmentSettings(preset="mlperf", strength=10.0), PATCH)
    result = augment.draws([11], 2)[0]
    factor = result.channels[0].brightness
    assert factor is not None
    assert result.noise_std is not None
    noise_last, _ = augment_with_kernels(augment, image, label, [11], device)

    probabilities = {
        "noise_p": 1.0,
        "noise_std": (result.noise_std,) * 2,
        "brightness_p": 1.0,
        "brightness": (factor,) * 2,
    }
    noise_first, _ = augment_with_kernels(
        Augment(AugmentSettings(**NO_OPERATIONS | probabilities), PATCH), image, label, [11], device
    )
    torch.testing.assert_close((noise_first - factor) / factor, noise_last - factor, atol=1e-5, rtol=0)
    blurred, _ = augment_with_kernels(
        Augment(AugmentSettings(**NO_OPERATIONS | probabilities | {"blur_p": 1.0}), PATCH), image, label, [11], device
    )
    assert blurred.std() < 0.8 * noise_first.std()


def test_augment_uses_kernels_on_supported_devices(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "is_supported", lambda x: True)
    image, label = make_batch(size=1, channels=1)
    augment = Augment(AugmentSettings(**NO_OPERATIONS | {"noise_p": 1.0}), PATCH)
    expected, _ = augment_with_kernels(augment, image, label, [3], device)
    new_image, _ = augment(image.to(device), label.to(device), torch.tensor([3]))
    assert torch.equal(new_image.cpu(), expected)


def test_only_drawn_operations_are_launched() -> None:
    mirrored = SampleAugmentation(None, None, (True, False, False), None, 1, (ChannelAugmentation(),))
    adjusted = dataclasses.replace(
        mirrored, flips=(False, False, False), channels=(ChannelAugmentation(contrast=1.2, gamma=0.8),)
    )
    lists = kernels._PassLists([mirrored, adjusted, mirrored], SOURCE, PATCH, None, noise_last=False).lists
    lengths = {name: len(entries) for name, entries in lists.items() if entries}
    assert lengths == {"place": 6, "contrast": 1, "bend": 1, "restore": 1}
