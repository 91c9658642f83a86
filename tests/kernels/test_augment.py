"""The augmentation kernels do to a batch what is otherwise done channel by channel; only the noise is their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from voxlane.kernels import augment as kernels
from voxlane.kernels import support
from voxlane.model.augment import Augment, AugmentSettings
from voxlane.volume.plan import Triple

# The interpreter is NumPy, which warns of what a GPU does in silence: the logarithm of a gamma's smallest value.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PATCH = (5, 9, 7)
SOURCE = (7, 9, 10)
CHANCES = [field.name for field in dataclasses.fields(AugmentSettings) if field.name.endswith("_p")]
NEVER = dict.fromkeys(CHANCES, 0.0) | {"blur_channel_p": 1.0, "low_resolution_channel_p": 1.0}
ALL = dict.fromkeys(NEVER, 1.0) | {"mirror_p": 0.5, "noise_p": 0.0}

Batch = tuple[torch.Tensor, torch.Tensor]


def batch(size: int = 2, channels: int = 2, shape: Triple = SOURCE) -> Batch:
    generator = torch.Generator().manual_seed(7)
    image = torch.randn((size, channels, *shape), generator=generator)
    return image, torch.randint(0, 4, (size, *shape), generator=generator, dtype=torch.uint8)


def by_kernels(augment: Augment, image: torch.Tensor, label: torch.Tensor, seeds: list[int], device: Any) -> Batch:
    draws = augment.draws(seeds, image.shape[1])
    new_image, new_label = augment._at_once(image.to(device), label.to(device), draws)
    assert new_image.dtype == torch.float32
    assert new_image.is_contiguous()
    assert new_label.dtype == label.dtype
    return new_image.cpu(), new_label.cpu()


def assert_same(augment: Augment, given: Batch, seeds: list[int], device: torch.device) -> None:
    image, label = augment(*given, torch.tensor(seeds))
    new_image, new_label = by_kernels(augment, *given, seeds, device)
    torch.testing.assert_close(new_image, image, atol=1e-4, rtol=1e-4, equal_nan=True)
    # A GPU rounds the source coordinate once less; a voxel in the middle between two may then be given to the other.
    assert (new_label != label).float().mean() <= (1e-3 if device.type == "cuda" else 0)


@pytest.mark.parametrize(
    "done",
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
        ALL,
    ],
    ids=lambda done: " ".join(name[:-2] for name, chance in done.items() if chance) if done != ALL else "all",
)
def test_every_operation(done: dict[str, Any], device: torch.device) -> None:
    given = batch(size=1) if done == ALL else batch(channels=1)
    assert_same(Augment(AugmentSettings(**NEVER | done), PATCH), given, [3, 8][: len(given[0])], device)


@pytest.mark.parametrize(
    ("patch", "source", "size", "channels"),
    [
        ((3, 11, 10), (3, 11, 10), 1, 1),  # anisotropic
        ((1, 4, 4), (1, 4, 4), 1, 3),
        ((2, 3, 5), (5, 3, 6), 3, 1),
        ((12, 20, 9), (12, 20, 9), 1, 1),  # several programs, the last not full
    ],
)
def test_shapes(patch: Triple, source: Triple, size: int, channels: int, device: torch.device) -> None:
    given = batch(size, channels, source)
    assert_same(Augment(AugmentSettings(**ALL), patch), given, list(range(size)), device)


def test_programs_that_go_over_several_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", 128)
    monkeypatch.setattr(kernels, "_PROGRAMS", 2)
    assert_same(Augment(AugmentSettings(**ALL), PATCH), batch(size=1, channels=1), [3], device)


def test_what_was_drawn_for_each(device: torch.device) -> None:
    """Rows that drew little beside rows that drew much."""
    augment = Augment(AugmentSettings(strength=2.0, noise_std=(0.0, 0.0)), PATCH)
    assert_same(augment, batch(size=5, channels=1), [10, 11, 12, 13, 14], device)


def test_mean_far_from_zero(device: torch.device) -> None:
    """Statistics are not lost to rounding: 1000 units off, the deviation of 1 is still kept."""
    image, label = batch()
    augment = Augment(AugmentSettings(**NEVER | {"contrast_p": 1.0, "gamma_p": 1.0}), PATCH)
    new_image, _ = by_kernels(augment, image + 1000, label, [3, 8], device)
    expected, _ = augment(image.double() + 1000, label, torch.tensor([3, 8]))
    torch.testing.assert_close(new_image, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("image_type", [torch.float16, torch.bfloat16, torch.int16, torch.float64])
@pytest.mark.parametrize("done", [NEVER, NEVER | {"rotation_p": 1.0}], ids=["copied", "turned"])
def test_images_as_they_are_stored(image_type: torch.dtype, done: dict[str, Any], device: torch.device) -> None:
    image, label = batch(size=1, channels=1)
    given = (image * 10).to(image_type), label
    assert_same(Augment(AugmentSettings(**done), PATCH), given, [3], device)


@pytest.mark.parametrize("label_type", [torch.bool, torch.int16, torch.int64])
def test_labels_of_any_type(label_type: torch.dtype, device: torch.device) -> None:
    image, label = batch(channels=1)
    augment = Augment(AugmentSettings(**NEVER | {"rotation_p": 0.5, "mirror_p": 0.5}), PATCH)
    assert [made.matrix is None for made in augment.draws([4, 5], 1)] == [False, True]
    assert_same(augment, (image, label.to(label_type)), [4, 5], device)


def test_an_image_in_another_layout(device: torch.device) -> None:
    image, label = batch()
    image = image.contiguous(memory_format=torch.channels_last_3d)
    assert_same(Augment(AugmentSettings(**NEVER), PATCH), (image, label), [3, 8], device)


def test_a_constant_channel_stays_finite_and_constant(device: torch.device) -> None:
    augment = Augment(AugmentSettings(**ALL | {"brightness_p": 0.0}), PATCH)
    image, label = torch.full((2, 1, *PATCH), -0.7), torch.zeros((2, *PATCH), dtype=torch.uint8)
    new_image, _ = by_kernels(augment, image, label, [1, 2], device)
    assert torch.allclose(new_image, image, atol=1e-5)


@pytest.mark.parametrize("name", ["mirror_p", "blur_p", "contrast_p", "low_resolution_p", "gamma_p"])
def test_nan_goes_as_far_as_it_does_otherwise(name: str, device: torch.device) -> None:
    image, label = batch(size=1)
    image[0, 1, 3, 4, 5] = float("nan")
    assert_same(Augment(AugmentSettings(**NEVER | {name: 1.0}), PATCH), (image, label), [3], device)


def test_nan_in_everything(device: torch.device) -> None:
    image, label = batch()
    image[0, 1] = float("nan")
    new_image, _ = by_kernels(Augment(AugmentSettings(**ALL), PATCH), image, label, [3, 8], device)
    assert new_image[0, 1].isnan().all()
    assert new_image[0, 0].isfinite().all()
    assert new_image[1].isfinite().all()


def test_noise_is_normal_and_of_the_seed_and_channel_alone(device: torch.device) -> None:
    augment = Augment(AugmentSettings(**NEVER | {"noise_p": 1.0, "noise_std": (0.1, 0.1)}), (16, 16, 16))
    image, label = torch.zeros((3, 2, 16, 16, 16)), torch.zeros((3, 16, 16, 16), dtype=torch.uint8)
    noise, _ = by_kernels(augment, image, label, [1, 2, 1], device)
    assert torch.equal(noise[0], noise[2])
    rows = noise[:2].view(4, -1) / 0.1
    count = rows.shape[1]
    assert (rows.mean(1).abs() < 4 / count**0.5).all()
    assert ((rows.std(1) - 1).abs() < 4 / (2 * count) ** 0.5).all()
    assert ((rows**4).mean(1) - 3).abs().max() < 4 * (96 / count) ** 0.5
    assert (rows.abs() > 2).float().mean() == pytest.approx(0.0455, abs=0.008)
    apart = torch.corrcoef(torch.cat([rows, rows[:1].roll(1, 1)])) - torch.eye(5)
    assert apart.abs().max() < 5 / count**0.5


def test_noise_comes_before_blur_and_brightness_but_last_in_mlperf(device: torch.device) -> None:
    image, label = torch.ones((1, 2, *PATCH)), torch.zeros((1, *PATCH), dtype=torch.uint8)
    augment = Augment(AugmentSettings(preset="mlperf", strength=10.0), PATCH)
    made = augment.draw(11, 2)
    factor = made.channels[0].brightness
    assert factor is not None
    assert made.noise_std is not None
    last, _ = by_kernels(augment, image, label, [11], device)

    chances = {"noise_p": 1.0, "noise_std": (made.noise_std,) * 2, "brightness_p": 1.0, "brightness": (factor,) * 2}
    first, _ = by_kernels(Augment(AugmentSettings(**NEVER | chances), PATCH), image, label, [11], device)
    torch.testing.assert_close((first - factor) / factor, last - factor, atol=1e-5, rtol=0)
    blurred, _ = by_kernels(
        Augment(AugmentSettings(**NEVER | chances | {"blur_p": 1.0}), PATCH), image, label, [11], device
    )
    assert blurred.std() < 0.8 * first.std()


def test_used_where_they_can_be(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "usable", lambda x: True)
    image, label = batch(size=1, channels=1)
    augment = Augment(AugmentSettings(**NEVER | {"noise_p": 1.0}), PATCH)
    expected, _ = by_kernels(augment, image, label, [3], device)
    new_image, _ = augment(image.to(device), label.to(device), torch.tensor([3]))
    assert torch.equal(new_image.cpu(), expected)


def test_only_what_was_drawn_is_launched() -> None:
    quiet = kernels.Sample(None, (True, False, False), 1, [kernels.Channel()])
    busy = kernels.Sample(None, (False, False, False), 2, [kernels.Channel(contrast=1.2, gamma=0.8)])
    lists = kernels._Plan([quiet, busy, quiet], PATCH).lists
    lengths = {name: len(entries) for name, entries in lists.items() if entries}
    assert lengths == {"place": 6, "contrast": 1, "bend": 1, "restore": 1}
