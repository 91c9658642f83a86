"""Augmentation: by seed alone, image and label together, and nothing where nothing is asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from voxlane.errors import ConfigError
from voxlane.model import intensity
from voxlane.model.augment import Augment, AugmentSettings, ChannelDraw, Draw, draw, draws
from voxlane.settings import build, plain

PATCH = (12, 20, 16)
CHANCES = [field.name for field in dataclasses.fields(AugmentSettings) if field.name.endswith("_p")]
NEVER = dict.fromkeys(CHANCES, 0.0) | {"blur_channel_p": 1.0, "low_resolution_channel_p": 1.0}
ALWAYS = dict.fromkeys(NEVER, 1.0) | {"mirror_p": 0.5}


def only(**chances: Any) -> AugmentSettings:
    """Settings under which nothing else is done."""
    return AugmentSettings(**(NEVER | chances))


def batch(size: int = 4, channels: int = 2, patch: tuple[int, int, int] = PATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    image = torch.randn((size, channels, *patch), generator=generator)
    return image, torch.randint(0, 4, (size, *patch), generator=generator, dtype=torch.uint8)


def seeds(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def blob(patch: tuple[int, int, int] = (32, 40, 36)) -> torch.Tensor:
    """A smooth bump away from the centre, one half at its rim."""
    axes = torch.meshgrid(*(torch.linspace(-1, 1, size) for size in patch), indexing="ij")
    distance = sum(((a - c) / 0.5) ** 2 for a, c in zip(axes, (0.2, -0.1, 0.15), strict=True))
    return torch.exp2(-distance)


@pytest.mark.parametrize("preset", ["nnunet", "mlperf"])
def test_same_seeds_same_result_and_inputs_stay(preset: Any) -> None:
    image, label = batch()
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
def test_a_sample_does_not_depend_on_its_neighbours(order: list[int], size: int, start: int) -> None:
    image, label = batch()
    augment = Augment(AugmentSettings(**ALWAYS), PATCH)
    all_seeds = seeds(*(start + i for i in range(4)))
    whole_image, whole_label = augment(image, label, all_seeds)
    chosen = order[:size]
    part_image, part_label = augment(image[chosen], label[chosen], all_seeds[chosen])
    assert torch.equal(part_image, whole_image[chosen])
    assert torch.equal(part_label, whole_label[chosen])


def test_number_of_threads_changes_nothing() -> None:
    image, label = batch()
    augment = Augment(AugmentSettings(**ALWAYS), PATCH)
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


def test_none_is_the_same_tensors() -> None:
    image, label = batch()
    new_image, new_label = Augment(AugmentSettings(preset="none"), PATCH)(image, label, seeds(1, 2, 3, 4))
    assert new_image is image
    assert new_label is label


def test_strength_zero_changes_no_voxel() -> None:
    image, label = batch()
    new_image, new_label = Augment(AugmentSettings(strength=0.0), PATCH)(image, label, seeds(1, 2, 3, 4))
    assert torch.equal(new_image, image)
    assert torch.equal(new_label, label)


def test_a_larger_patch_is_cut_to_its_middle() -> None:
    image, label = batch(patch=(16, 25, 16))
    for chosen in (AugmentSettings(preset="none"), only()):
        new_image, new_label = Augment(chosen, PATCH)(image, label, seeds(1, 2, 3, 4))
        assert torch.equal(new_image, image[:, :, 2:14, 2:22])
        assert torch.equal(new_label, label[:, 2:14, 2:22])


def test_a_larger_patch_gives_rotation_what_lies_around() -> None:
    """Cut after the rotation, the middle of a large patch is the same as when all of it is rotated."""
    image = blob((40, 40, 40))[None, None].repeat(3, 1, 1, 1, 1)
    label = (image[:, 0] > 0.5).to(torch.uint8)
    chosen = only(rotation_p=1.0, scaling_p=1.0)
    whole_image, whole_label = Augment(chosen, (40, 40, 40))(image, label, seeds(1, 2, 3))
    cut_image, cut_label = Augment(chosen, (20, 20, 20))(image, label, seeds(1, 2, 3))
    assert torch.allclose(cut_image, whole_image[:, :, 10:30, 10:30, 10:30], atol=1e-5)
    assert (cut_label != whole_label[:, 10:30, 10:30, 10:30]).float().mean() < 1e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**63 - 1))
def test_label_follows_image(seed: int) -> None:
    """After any turn and mirroring the bump's upper half is where the label says, but for half a voxel at its rim."""
    image = blob()[None, None]
    label = (image[:, 0] > 0.5).to(torch.uint8)
    augment = Augment(only(rotation_p=1.0, scaling_p=1.0, mirror_p=0.5), (32, 40, 36))
    new_image, new_label = augment(image, label, seeds(seed))
    inside, outside = new_image[:, 0] > 0.6, new_image[:, 0] < 0.4
    assert inside.any()
    assert (new_label[inside] == 1).all()
    assert (new_label[outside] == 0).all()
    assert not torch.equal(new_label, label)


def test_mirroring_with_a_turn_is_mirroring_after_it() -> None:
    image, label = batch(size=8)
    turn = only(rotation_p=1.0, scaling_p=1.0)
    numbers = seeds(*range(8))
    turned_image, turned_label = Augment(turn, PATCH)(image, label, numbers)
    both = Augment(dataclasses.replace(turn, mirror_p=0.5), PATCH)
    new_image, new_label = both(image, label, numbers)
    for index in range(8):
        axes = [axis - 3 for axis, flipped in enumerate(both.draw(index, 2).flips) if flipped]
        assert torch.allclose(new_image[index], turned_image[index].flip(axes), atol=1e-4)
        assert (new_label[index] != turned_label[index].flip(axes)).float().mean() < 1e-3


def test_only_allowed_axes_are_mirrored() -> None:
    chosen = only(mirror_p=1.0, mirror_axes=(0, 2))
    image, label = batch()
    new_image, new_label = Augment(chosen, PATCH)(image, label, seeds(1, 2, 3, 4))
    assert torch.equal(new_image, image.flip(2, 4))
    assert torch.equal(new_label, label.flip(1, 3))


@pytest.mark.parametrize(("patch", "flat_axis"), [((8, 32, 32), 0), ((32, 8, 32), 1), ((32, 32, 8), 2)])
def test_an_anisotropic_patch_is_changed_in_its_plane(patch: tuple[int, int, int], flat_axis: int) -> None:
    """Planes along the short side do not mix: each of constant value keeps it."""
    augment = Augment(only(rotation_p=1.0, scaling_p=1.0, low_resolution_p=1.0), patch)
    assert augment.flat_axis == flat_axis
    shape = [1, 1, 1, 1, 1]
    shape[2 + flat_axis] = 8
    image = torch.arange(8.0).view(shape).expand(4, 1, *patch).contiguous()
    label = image[:, 0].to(torch.uint8)
    new_image, new_label = augment(image, label, seeds(1, 2, 3, 4))
    assert torch.allclose(new_image, image, atol=1e-4)
    assert torch.equal(new_label, label)
    angles = [augment.draw(seed, 1).angles for seed in range(200)]
    assert max(abs(angle[flat_axis]) for angle in angles if angle) > 2.5
    assert all(angle[axis] == 0.0 for angle in angles if angle for axis in range(3) if axis != flat_axis)


def test_anisotropy_can_be_said_or_follows_the_patch() -> None:
    assert Augment(AugmentSettings(), (40, 56, 40)).flat_axis is None
    assert Augment(AugmentSettings(), (32, 96, 96)).flat_axis is None
    assert Augment(AugmentSettings(), (28, 96, 96)).flat_axis == 0
    assert Augment(AugmentSettings(), (40, 56, 40), anisotropic=True).flat_axis == 0
    assert Augment(AugmentSettings(), (8, 96, 96), anisotropic=False).flat_axis is None


def test_a_setting_leaves_what_the_others_draw() -> None:
    before, after = (
        draw(AugmentSettings(**ALWAYS | change), 5, 2) for change in ({}, {"rotation_p": 0.0, "noise_p": 0.0})
    )
    assert (after.angles, after.noise_std) == (None, None)
    assert (before.scales, before.flips, before.channels) == (after.scales, after.flips, after.channels)


def test_what_a_seed_draws_stays() -> None:
    """A run is repeated by its seed, whatever the version."""
    chosen = AugmentSettings(strength=10.0).in_effect()
    made = draw(chosen, 5, 2)
    assert made == Draw(
        angles=(-0.059310031203308564, -0.26284780799992663, 0.18597255645940225),
        scales=(1.2203717941030536,) * 3,
        flips=(False, False, True),
        noise_std=0.07605338377608305,
        noise_seed=6767611927603349064,
        channels=(
            ChannelDraw(
                blur_voxels=(0.6248647179497937, 0.8149506447179609, 0.7312808932570299),
                brightness=1.1492653293886121,
                contrast=0.9511704595214308,
                low_resolution=0.9586640015072019,
                gamma_inverted=0.7843426248185755,
                gamma=0.7840304416615891,
            ),
            ChannelDraw(
                brightness=0.7581120504947846,
                contrast=0.9560581863594738,
                gamma_inverted=1.0638025697528073,
                gamma=0.8492696982961925,
            ),
        ),
    )
    flat = draw(chosen, -3, 1, 0)
    assert (flat.angles, flat.scales) == (
        (-0.2164916637734836, 0.0, 0.0),
        (1.0, 1.1227703161821005, 1.1227703161821005),
    )
    assert flat.noise_seed == 112178671737246765
    assert draws(chosen, [-3, 5, 2**62, 5], 2)[1::2] == [made, made]


def _done(made: Draw) -> dict[str, bool]:
    channel = made.channels[0]
    return {
        "rotation_p": made.angles is not None,
        "scaling_p": made.scales is not None,
        "noise_p": made.noise_std is not None,
        "blur_p": channel.blur_voxels is not None,
        "brightness_p": channel.brightness is not None,
        "contrast_p": channel.contrast is not None,
        "low_resolution_p": channel.low_resolution is not None,
        "gamma_inverted_p": channel.gamma_inverted is not None,
        "gamma_p": channel.gamma is not None,
        "mirror_p": made.flips[1],
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
def test_how_often_each_is_done(chosen: AugmentSettings, expected: dict[str, float]) -> None:
    count = 4000
    augment = Augment(chosen, PATCH)
    done = [_done(augment.draw(seed, 1)) for seed in range(count)]
    for name in done[0]:
        share = sum(made[name] for made in done) / count
        chance = expected.get(name, 0.0)
        assert abs(share - chance) <= 4 * (chance * (1 - chance) / count) ** 0.5, name


def test_mlperf_noise_comes_last_and_brightness_is_one_for_all_channels() -> None:
    augment = Augment(AugmentSettings(preset="mlperf", strength=10.0), PATCH)
    image, label = torch.ones((1, 2, *PATCH)), torch.zeros((1, *PATCH), dtype=torch.uint8)
    made = augment.draw(11, 2)
    factor, std = made.channels[0].brightness, made.noise_std
    assert factor is not None
    assert made.channels[1].brightness == factor
    new_image, _ = augment(image, label, seeds(11))
    noise = torch.randn((2, *PATCH), generator=torch.Generator().manual_seed(made.noise_seed))
    assert torch.allclose(new_image[0], factor + std * noise, atol=1e-6)


def test_forward_reads_nothing_back_from_the_device() -> None:
    """Tensors without storage refuse to be read; noise is left out, because they have no random generator."""
    augment = Augment(AugmentSettings(**(ALWAYS | {"noise_p": 0.0})), PATCH)
    image, label = (tensor.to("meta") for tensor in batch())
    new_image, new_label = augment(image, label, seeds(1, 2, 3, 4))
    assert new_image.shape == image.shape
    assert new_label.shape == label.shape


def test_a_constant_channel_stays_finite_and_constant() -> None:
    augment = Augment(AugmentSettings(**(ALWAYS | {"noise_p": 0.0, "brightness_p": 0.0})), PATCH)
    image, label = torch.full((2, 1, *PATCH), -0.7), torch.zeros((2, *PATCH), dtype=torch.uint8)
    new_image, _ = augment(image, label, seeds(1, 2))
    assert torch.allclose(new_image, image, atol=1e-5)


@pytest.mark.parametrize("patch", [(1, 4, 4), (2, 3, 5)])
def test_tiny_patches(patch: tuple[int, int, int]) -> None:
    image, label = batch(patch=patch)
    new_image, new_label = Augment(AugmentSettings(**ALWAYS), patch)(image, label, seeds(1, 2, 3, 4))
    assert torch.isfinite(new_image).all()
    assert new_label.shape == label.shape


def test_integer_labels_keep_their_type() -> None:
    image, label = batch()
    for dtype in (torch.uint8, torch.int16, torch.int64):
        _, new_label = Augment(AugmentSettings(**ALWAYS), PATCH)(image, label.to(dtype), seeds(1, 2, 3, 4))
        assert new_label.dtype == dtype


@pytest.mark.parametrize(("sigma", "taps"), [(0.5, 3), (0.58, 3), (0.59, 5), (0.75, 5), (0.92, 7), (1.0, 7)])
def test_blur_kernel_is_as_long_as_nnunets(sigma: float, taps: int) -> None:
    weights = intensity.gaussian(sigma, limit=99)
    assert 2 * len(weights) - 1 == taps
    assert weights[0] + 2 * sum(weights[1:]) == pytest.approx(1.0)


def test_settings_say_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"rotation_degrees: \[30.0, -30.0\] is not \(lowest, highest\)"):
        AugmentSettings(rotation_degrees=(30.0, -30.0))
    with pytest.raises(ConfigError, match="noise_p: preset mlperf has its own"):
        AugmentSettings(preset="mlperf", noise_p=0.5)
    with pytest.raises(ConfigError, match="gamma_p"):
        AugmentSettings(gamma_p=1.5)
    with pytest.raises(ConfigError, match="low_resolution_scale"):
        AugmentSettings(low_resolution_scale=(0.5, 2.0))


def test_settings_survive_plain_data() -> None:
    for preset in ("nnunet", "mlperf", "none"):
        made = AugmentSettings(preset=preset, strength=0.5)
        assert build(AugmentSettings, plain(made)) == made


def test_forward_refuses_what_does_not_fit() -> None:
    image, label = batch()
    augment = Augment(AugmentSettings(), PATCH)
    with pytest.raises(ConfigError, match="are no batch"):
        augment(image, label[:, 1:], seeds(1, 2, 3, 4))
    with pytest.raises(ConfigError, match="one number a sample"):
        augment(image, label, seeds(1, 2))
    with pytest.raises(ConfigError, match="cannot be cut"):
        Augment(AugmentSettings(), (16, 20, 16))(image, label, seeds(1, 2, 3, 4))
