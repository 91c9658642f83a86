"""Augmentation depends only on the seed, transforms image and label together, and can be switched off."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from voxlane.errors import ConfigError
from voxlane.model import transforms
from voxlane.model.augment import Augment, AugmentSettings, ChannelAugmentation, SampleAugmentation, draws
from voxlane.settings import build, to_plain

PATCH = (12, 20, 16)
PROBABILITY_FIELDS = [field.name for field in dataclasses.fields(AugmentSettings) if field.name.endswith("_p")]
NO_OPERATIONS = dict.fromkeys(PROBABILITY_FIELDS, 0.0) | {"blur_channel_p": 1.0, "low_resolution_channel_p": 1.0}
ALL_OPERATIONS = dict.fromkeys(NO_OPERATIONS, 1.0) | {"mirror_p": 0.5}


def settings_with_only(**probabilities: Any) -> AugmentSettings:
    """Return settings that apply only the named operations."""
    return AugmentSettings(**(NO_OPERATIONS | probabilities))


def make_batch(
    size: int = 4, channels: int = 2, patch: tuple[int, int, int] = PATCH
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    image = torch.randn((size, channels, *patch), generator=generator)
    return image, torch.randint(0, 4, (size, *patch), generator=generator, dtype=torch.uint8)


def seeds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def make_blob(patch: tuple[int, int, int] = (32, 40, 36)) -> torch.Tensor:
    """Return a smooth bump away from the centre, with the value one half at its rim."""
    axes = torch.meshgrid(*(torch.linspace(-1, 1, size) for size in patch), indexing="ij")
    distance = sum(((a - c) / 0.5) ** 2 for a, c in zip(axes, (0.2, -0.1, 0.15), strict=True))
    return torch.exp2(-distance)


@pytest.mark.parametrize("preset", ["nnunet", "mlperf"])
def test_same_seeds_give_the_same_result_and_inputs_are_unchanged(preset: Any) -> None:
    image, label = make_batch()
    before = image.clone(), label.clone()
    augment = Augment(AugmentSettings(preset=preset, strength=10.0), PATCH)
    first, second = (augment(image, label, seeds(3, 1, 4, 2**62)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.equal(image, before[0])
    assert torch.equal(label, before[1])
    assert not torch.equal(first[0], image)
    assert first[0].dtype == torch.float32
    assert first[1].dtype == torch.uint8


@settings(max_examples=15, deadline=None)
@given(st.permutations(range(4)), st.integers(1, 4), st.integers(-(2**63), 2**63 - 5))
def test_samples_are_independent_of_each_other(order: list[int], size: int, start: int) -> None:
    image, label = make_batch()
    augment = Augment(AugmentSettings(**ALL_OPERATIONS), PATCH)
    all_seeds = seeds(*(start + i for i in range(4)))
    whole_image, whole_label = augment(image, label, all_seeds)
    indices = order[:size]
    part_image, part_label = augment(image[indices], label[indices], all_seeds[indices])
    assert torch.equal(part_image, whole_image[indices])
    assert torch.equal(part_label, whole_label[indices])


def test_result_does_not_depend_on_threads() -> None:
    image, label = make_batch()
    augment = Augment(AugmentSettings(**ALL_OPERATIONS), PATCH)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(augment(image, label, seeds(0, 1, 2, 3)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert torch.equal(results[0][1], other[1])
        assert torch.allclose(results[0][0], other[0], atol=1e-5)


def test_preset_none_returns_its_inputs() -> None:
    image, label = make_batch()
    new_image, new_label = Augment(AugmentSettings(preset="none"), PATCH)(image, label, seeds(1, 2, 3, 4))
    assert new_image is image
    assert new_label is label


def test_strength_zero_keeps_all_voxels() -> None:
    image, label = make_batch()
    new_image, new_label = Augment(AugmentSettings(strength=0.0), PATCH)(image, label, seeds(1, 2, 3, 4))
    assert torch.equal(new_image, image)
    assert torch.equal(new_label, label)


def test_larger_patch_is_cropped_to_its_centre() -> None:
    image, label = make_batch(patch=(16, 25, 16))
    for chosen in (AugmentSettings(preset="none"), settings_with_only()):
        new_image, new_label = Augment(chosen, PATCH)(image, label, seeds(1, 2, 3, 4))
        assert torch.equal(new_image, image[:, :, 2:14, 2:22])
        assert torch.equal(new_label, label[:, 2:14, 2:22])


def test_rotation_uses_the_margin_of_a_larger_patch() -> None:
    """Cropping after the rotation gives the same centre as rotating the whole patch."""
    image = make_blob((40, 40, 40))[None, None].repeat(3, 1, 1, 1, 1)
    label = (image[:, 0] > 0.5).to(torch.uint8)
    chosen = settings_with_only(rotation_p=1.0, scaling_p=1.0)
    whole_image, whole_label = Augment(chosen, (40, 40, 40))(image, label, seeds(1, 2, 3))
    cut_image, cut_label = Augment(chosen, (20, 20, 20))(image, label, seeds(1, 2, 3))
    assert torch.allclose(cut_image, whole_image[:, :, 10:30, 10:30, 10:30], atol=1e-5)
    assert (cut_label != whole_label[:, 10:30, 10:30, 10:30]).float().mean() < 1e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_label_follows_image(seed: int) -> None:
    """After any rotation and mirroring the label marks the upper half of the bump, up to half a voxel at its rim."""
    image = make_blob()[None, None]
    label = (image[:, 0] > 0.5).to(torch.uint8)
    augment = Augment(settings_with_only(rotation_p=1.0, scaling_p=1.0, mirror_p=0.5), (32, 40, 36))
    new_image, new_label = augment(image, label, seeds(seed))
    inside, outside = new_image[:, 0] > 0.6, new_image[:, 0] < 0.4
    assert inside.any()
    assert (new_label[inside] == 1).all()
    assert (new_label[outside] == 0).all()
    assert not torch.equal(new_label, label)


def test_mirroring_follows_rotation() -> None:
    image, label = make_batch(size=8)
    rotation = settings_with_only(rotation_p=1.0, scaling_p=1.0)
    sample_seeds = seeds(*range(8))
    rotated_image, rotated_label = Augment(rotation, PATCH)(image, label, sample_seeds)
    rotation_and_mirroring = Augment(dataclasses.replace(rotation, mirror_p=0.5), PATCH)
    new_image, new_label = rotation_and_mirroring(image, label, sample_seeds)
    for index in range(8):
        axes = [axis - 3 for axis, flipped in enumerate(rotation_and_mirroring.draws([index], 2)[0].flips) if flipped]
        assert torch.allclose(new_image[index], rotated_image[index].flip(axes), atol=1e-4)
        assert (new_label[index] != rotated_label[index].flip(axes)).float().mean() < 1e-3


def test_only_allowed_axes_are_mirrored() -> None:
    chosen = settings_with_only(mirror_p=1.0, mirror_axes=(0, 2))
    image, label = make_batch()
    new_image, new_label = Augment(chosen, PATCH)(image, label, seeds(1, 2, 3, 4))
    assert torch.equal(new_image, image.flip(2, 4))
    assert torch.equal(new_label, label.flip(1, 3))


@pytest.mark.parametrize(("patch", "flat_axis"), [((8, 32, 32), 0), ((32, 8, 32), 1), ((32, 32, 8), 2)])
def test_anisotropic_patch_is_transformed_in_its_plane(patch: tuple[int, int, int], flat_axis: int) -> None:
    """Planes along the short side do not mix, so each plane keeps its constant value."""
    augment = Augment(settings_with_only(rotation_p=1.0, scaling_p=1.0, low_resolution_p=1.0), patch)
    assert augment.flat_axis == flat_axis
    shape = [1, 1, 1, 1, 1]
    shape[2 + flat_axis] = 8
    image = torch.arange(8.0).view(shape).expand(4, 1, *patch).contiguous()
    label = image[:, 0].to(torch.uint8)
    new_image, new_label = augment(image, label, seeds(1, 2, 3, 4))
    assert torch.allclose(new_image, image, atol=1e-4)
    assert torch.equal(new_label, label)
    angles = [drawn.angles for drawn in augment.draws(range(200), 1)]
    assert max(abs(angle[flat_axis]) for angle in angles if angle) > 2.5
    assert all(angle[axis] == 0.0 for angle in angles if angle for axis in range(3) if axis != flat_axis)


def test_anisotropy_is_set_or_follows_the_patch() -> None:
    assert Augment(AugmentSettings(), (40, 56, 40)).flat_axis is None
    assert Augment(AugmentSettings(), (32, 96, 96)).flat_axis is None
    assert Augment(AugmentSettings(), (28, 96, 96)).flat_axis == 0
    assert Augment(AugmentSettings(), (40, 56, 40)).flat_axis is None
    assert Augment(AugmentSettings(), (8, 96, 96)).flat_axis == 0


def test_settings_do_not_change_other_draws() -> None:
    before, after = (
        draws(AugmentSettings(**ALL_OPERATIONS | change), [5], 2)[0]
        for change in ({}, {"rotation_p": 0.0, "noise_p": 0.0})
    )
    assert (after.angles, after.noise_std) == (None, None)
    assert (before.scales, before.flips, before.channels) == (after.scales, after.flips, after.channels)


def test_draws_of_a_seed_never_change() -> None:
    """A seed repeats a run in every version."""
    chosen = AugmentSettings(strength=10.0).in_effect()
    result = draws(chosen, [5], 2)[0]
    assert result == SampleAugmentation(
        angles=(-0.059310031203308564, -0.26284780799992663, 0.18597255645940225),
        scales=(1.2203717941030536,) * 3,
        flips=(False, False, True),
        noise_std=0.07605338377608305,
        noise_seed=6767611927603349064,
        channels=(
            ChannelAugmentation(
                blur_voxels=(0.6248647179497937, 0.8149506447179609, 0.7312808932570299),
                brightness=1.1492653293886121,
                contrast=0.9511704595214308,
                low_resolution=0.9586640015072019,
                gamma_inverted=0.7843426248185755,
                gamma=0.7840304416615891,
            ),
            ChannelAugmentation(
                brightness=0.7581120504947846,
                contrast=0.9560581863594738,
                gamma_inverted=1.0638025697528073,
                gamma=0.8492696982961925,
            ),
        ),
    )
    flat = draws(chosen, [-3], 1, 0)[0]
    assert (flat.angles, flat.scales) == (
        (-0.2164916637734836, 0.0, 0.0),
        (1.0, 1.1227703161821005, 1.1227703161821005),
    )
    assert flat.noise_seed == 112178671737246765
    assert draws(chosen, [-3, 5, 2**62, 5], 2)[1::2] == [result, result]


def _drawn_operations(result: SampleAugmentation) -> dict[str, bool]:
    channel = result.channels[0]
    return {
        "rotation_p": result.angles is not None,
        "scaling_p": result.scales is not None,
        "noise_p": result.noise_std is not None,
        "blur_p": channel.blur_voxels is not None,
        "brightness_p": channel.brightness is not None,
        "contrast_p": channel.contrast is not None,
        "low_resolution_p": channel.low_resolution is not None,
        "gamma_inverted_p": channel.gamma_inverted is not None,
        "gamma_p": channel.gamma is not None,
        "mirror_p": result.flips[1],
    }


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (
            AugmentSettings(),
            {
                "rotation_p": 0.2,
                "scaling_p": 0.2,
                "noise_p": 0.1,
                "blur_p": 0.1,
                "brightness_p": 0.15,
                "contrast_p": 0.15,
                "low_resolution_p": 0.125,
                "gamma_inverted_p": 0.1,
                "gamma_p": 0.3,
                "mirror_p": 0.5,
            },
        ),
        (AugmentSettings(preset="mlperf"), {"noise_p": 0.1, "brightness_p": 0.1, "mirror_p": 1 / 3}),
        (AugmentSettings(preset="mlperf", strength=2.0), {"noise_p": 0.2, "brightness_p": 0.2, "mirror_p": 1 / 3}),
        (AugmentSettings(preset="none"), {}),
    ],
)
def test_frequency_of_each_operation(chosen: AugmentSettings, expected: dict[str, float]) -> None:
    count = 4000
    augment = Augment(chosen, PATCH)
    operations = [_drawn_operations(drawn) for drawn in augment.draws(range(count), 1)]
    for name in operations[0]:
        share = sum(result[name] for result in operations) / count
        probability = expected.get(name, 0.0)
        assert abs(share - probability) <= 4 * (probability * (1 - probability) / count) ** 0.5, name


def test_mlperf_adds_noise_last_and_scales_all_channels_alike() -> None:
    augment = Augment(AugmentSettings(preset="mlperf", strength=10.0), PATCH)
    image, label = torch.ones((1, 2, *PATCH)), torch.zeros((1, *PATCH), dtype=torch.uint8)
    result = augment.draws([11], 2)[0]
    factor, std = result.channels[0].brightness, result.noise_std
    assert factor is not None
    assert result.channels[1].brightness == factor
    new_image, _ = augment(image, label, seeds(11))
    noise = torch.randn((2, *PATCH), generator=torch.Generator().manual_seed(result.noise_seed))
    assert torch.allclose(new_image[0], factor + std * noise, atol=1e-6)


def test_forward_copies_nothing_from_the_device() -> None:
    """Meta tensors cannot be read. Noise is left out because they have no random generator."""
    augment = Augment(AugmentSettings(**(ALL_OPERATIONS | {"noise_p": 0.0})), PATCH)
    image, label = (tensor.to("meta") for tensor in make_batch())
    new_image, new_label = augment(image, label, seeds(1, 2, 3, 4))
    assert new_image.shape == image.shape
    assert new_label.shape == label.shape


def test_constant_channel_stays_finite_and_constant() -> None:
    augment = Augment(AugmentSettings(**(ALL_OPERATIONS | {"noise_p": 0.0, "brightness_p": 0.0})), PATCH)
    image, label = torch.full((2, 1, *PATCH), -0.7), torch.zeros((2, *PATCH), dtype=torch.uint8)
    new_image, _ = augment(image, label, seeds(1, 2))
    assert torch.allclose(new_image, image, atol=1e-5)


@pytest.mark.parametrize("patch", [(1, 4, 4), (2, 3, 5)])
def test_tiny_patches(patch: tuple[int, int, int]) -> None:
    image, label = make_batch(patch=patch)
    new_image, new_label = Augment(AugmentSettings(**ALL_OPERATIONS), patch)(image, label, seeds(1, 2, 3, 4))
    assert torch.isfinite(new_image).all()
    assert new_label.shape == label.shape


def test_integer_labels_keep_their_type() -> None:
    image, label = make_batch()
    for dtype in (torch.uint8, torch.int16, torch.int64):
        _, new_label = Augment(AugmentSettings(**ALL_OPERATIONS), PATCH)(image, label.to(dtype), seeds(1, 2, 3, 4))
        assert new_label.dtype == dtype


@pytest.mark.parametrize(("sigma", "taps"), [(0.5, 3), (0.58, 3), (0.59, 5), (0.75, 5), (0.92, 7), (1.0, 7)])
def test_blur_kernel_has_the_length_of_nnunet(sigma: float, taps: int) -> None:
    weights = transforms.gaussian_weights(sigma, limit=99)
    assert 2 * len(weights) - 1 == taps
    assert weights[0] + 2 * sum(weights[1:]) == pytest.approx(1.0)


def test_errors_name_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"rotation_degrees: expected \(lowest, highest\), got \[30.0, -30.0\]"):
        AugmentSettings(rotation_degrees=(30.0, -30.0))
    with pytest.raises(ConfigError, match="noise_p: can be set only with preset nnunet, not with mlperf"):
        AugmentSettings(preset="mlperf", noise_p=0.5)
    with pytest.raises(ConfigError, match="gamma_p"):
        AugmentSettings(gamma_p=1.5)
    with pytest.raises(ConfigError, match="low_resolution_scale"):
        AugmentSettings(low_resolution_scale=(0.5, 2.0))


def test_settings_survive_conversion_to_plain_data() -> None:
    for preset in ("nnunet", "mlperf", "none"):
        result = AugmentSettings(preset=preset, strength=0.5)
        assert build(AugmentSettings, to_plain(result)) == result


def test_forward_rejects_mismatched_inputs() -> None:
    image, label = make_batch()
    augment = Augment(AugmentSettings(), PATCH)
    with pytest.raises(ConfigError, match="do not match"):
        augment(image, label[:, 1:], seeds(1, 2, 3, 4))
    with pytest.raises(ConfigError, match="one number per sample"):
        augment(image, label, seeds(1, 2))
    with pytest.raises(ConfigError, match="cannot be cropped"):
        Augment(AugmentSettings(), (16, 20, 16))(image, label, seeds(1, 2, 3, 4))
