"""Augmentation matches MONAI: equal parameters give equal voxels, and parameters have the same distributions."""

from __future__ import annotations

import math
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
from monai.networks.layers.convutils import gaussian_1d
from monai.networks.layers.simplelayers import separable_filtering
from scipy import stats

from tests.model.test_augment import PATCH, make_batch, seeds, settings_with_only
from voxlane.model import transforms
from voxlane.model.augment import Augment, SampleAugmentation, draws

ANGLES, SCALES = (0.3, -0.5, 0.2), (1.2, 1.2, 1.2)


def make_channel() -> torch.Tensor:
    return make_batch(1, 1)[0][0, 0]


def to_tensor(tensor: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(tensor))


def test_rotation_and_scaling() -> None:
    image, label = make_batch(1)
    matrix = transforms.make_matrix(ANGLES, SCALES)
    affine = np.eye(4)
    affine[:3, :3] = matrix
    new_image, new_label = transforms.resample_patches(image, label, [matrix], [(False, False, False)], PATCH)
    reference = {
        mode: mt.Affine(affine=affine, padding_mode="border", mode=mode, image_only=True)
        for mode in ("bilinear", "nearest")
    }
    assert torch.allclose(new_image[0], to_tensor(reference["bilinear"](image[0])), atol=1e-4)
    agree = new_label[0] == to_tensor(reference["nearest"](label[:1].float()))[0]
    assert agree.float().mean() > 0.999


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rotation_about_one_axis(axis: int) -> None:
    image, label = make_batch(1)
    angles = [0.0, 0.0, 0.0]
    angles[axis] = 0.4
    new_image, _ = transforms.resample_patches(
        image, label, [transforms.make_matrix(angles, (1, 1, 1))], [(False, False, False)], PATCH
    )
    reference = mt.Rotate(angle=tuple(angles), keep_size=True, padding_mode="border")(image[0])
    assert torch.allclose(new_image[0], to_tensor(reference), atol=1e-4)


def test_mirroring() -> None:
    image, label = make_batch(1)
    new_image, _ = transforms.resample_patches(image, label, [None], [(True, False, True)], PATCH)
    assert torch.equal(new_image[0], to_tensor(mt.Flip(spatial_axis=(0, 2))(image[0])))


@pytest.mark.parametrize("sigmas", [(0.5, 0.7, 1.0), (0.9, 0.6, 0.8)])
def test_blur(sigmas: tuple[float, float, float]) -> None:
    x = make_channel()
    radii = [len(transforms.gaussian_weights(sigma, limit=99)) - 1 for sigma in sigmas]
    kernels = [
        gaussian_1d(torch.tensor(sigma), truncated=radius / sigma, approx="sampled", normalize=True)
        for sigma, radius in zip(sigmas, radii, strict=True)
    ]
    reference = separable_filtering(x[None, None], kernels, mode="reflect")[0, 0]
    default = to_tensor(mt.GaussianSmooth(sigma=sigmas)(x[None]))[0]
    before = x.std()
    transforms.blur(x, sigmas)
    assert torch.allclose(x, reference, atol=1e-5)
    # MONAI's default kernel averages the Gaussian over a voxel and pads the patch with zeros.
    inner = (slice(4, -4),) * 3
    assert (x[inner] - default[inner]).std() < 0.1 * before


@pytest.mark.parametrize("factor", [0.75, 1.2])
def test_brightness_and_contrast(factor: float) -> None:
    x = make_channel()
    reference = to_tensor(mt.ScaleIntensityFixedMean(factor=factor - 1, preserve_range=True, fixed_mean=True)(x[None]))[
        0
    ]
    transforms.adjust_contrast(x, factor)
    assert torch.allclose(x, reference, atol=1e-5)


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("gamma", [0.7, 1.4])
def test_gamma(gamma: float, inverted: bool) -> None:
    x = make_channel()
    reference = to_tensor(mt.AdjustContrast(gamma, invert_image=inverted, retain_stats=True)(x[None]))[0]
    transforms.adjust_gamma(x, gamma, inverted=inverted)
    assert torch.allclose(x, reference, atol=1e-4)


@pytest.mark.parametrize("scale", [0.5, 0.63, 0.9, 1.0])
def test_low_resolution(scale: float) -> None:
    x = make_channel()
    reference = mt.RandSimulateLowResolution(
        prob=1.0, downsample_mode="nearest-exact", upsample_mode="trilinear", zoom_range=(scale, scale)
    )(x[None])
    transforms.lower_resolution(x, scale, None)
    assert torch.allclose(x, to_tensor(reference)[0], atol=1e-5)


COUNT = 1500


def draw_samples(**probabilities: Any) -> list[SampleAugmentation]:
    return draws(settings_with_only(**probabilities), range(COUNT), 1)


def same_distribution(values: list[float], monai_values: list[float]) -> bool:
    assert len(values) > 300
    assert len(monai_values) > 300
    return bool(stats.ks_2samp(values, monai_values).pvalue > 0.01)


def test_rotation_and_scaling_have_the_distribution_of_monai() -> None:
    samples = draw_samples(rotation_p=1.0, scaling_p=1.0)
    bound = math.radians(30)
    reference = mt.RandAffineGrid(rotate_range=(bound,) * 3, scale_range=((-0.3, 0.4),) * 3)
    reference.set_random_state(0)
    angles, scales, traces = [], [], []
    for _ in range(COUNT):
        reference.randomize()
        angles.append(reference.rotate_params[1])
        scales.append(reference.scale_params[0])
        rotation = mt.utils.create_rotate(3, reference.rotate_params)
        traces.append(float(np.trace(rotation[:3, :3])))
    assert same_distribution([m.angles[1] for m in samples if m.angles], angles)
    assert same_distribution([m.scales[0] for m in samples if m.scales], scales)
    # The order of the three rotations differs from MONAI's, but the distribution of their total angle does not.
    assert same_distribution(
        [float(np.trace(transforms.make_matrix(m.angles, (1, 1, 1)))) for m in samples if m.angles], traces
    )


def test_noise_has_the_distribution_of_monai() -> None:
    zeros = torch.zeros((1, 6, 6, 6))
    reference = mt.RandGaussianNoise(prob=1.0, std=0.1, sample_std=True)
    reference.set_random_state(0)
    augment = Augment(settings_with_only(noise_p=1.0), (6, 6, 6))
    values, _ = augment(zeros.expand(COUNT, 1, 6, 6, 6), torch.zeros(COUNT, 6, 6, 6), seeds(*range(COUNT)))
    assert same_distribution(
        values.std(dim=(1, 2, 3, 4)).tolist(), [float(to_tensor(reference(zeros)).std()) for _ in range(COUNT)]
    )
    assert same_distribution(
        values[:, 0, 3, 3, 3].tolist(), [float(to_tensor(reference(zeros))[0, 3, 3, 3]) for _ in range(COUNT)]
    )


def test_blur_has_the_distribution_of_monai() -> None:
    reference = mt.RandGaussianSmooth((0.5, 1.0), (0.5, 1.0), (0.5, 1.0), prob=1.0)
    reference.set_random_state(0)
    monai_values = []
    for _ in range(COUNT):
        reference.randomize()
        monai_values.append(reference.z)
    assert same_distribution(
        [m.channels[0].blur_voxels[2] for m in draw_samples(blur_p=1.0) if m.channels[0].blur_voxels], monai_values
    )


def test_brightness_and_contrast_have_the_distribution_of_monai() -> None:
    for name, reference in (
        ("brightness", mt.RandScaleIntensity(factors=0.25, prob=1.0)),
        ("contrast", mt.RandScaleIntensityFixedMean(factors=0.25, prob=1.0)),
    ):
        reference.set_random_state(0)
        monai_values = []
        for _ in range(COUNT):
            reference.randomize()
            monai_values.append(1.0 + reference.factor)
        assert same_distribution(
            [getattr(m.channels[0], name) for m in draw_samples(**{f"{name}_p": 1.0})], monai_values
        )


def test_low_resolution_has_the_distribution_of_monai() -> None:
    reference = mt.RandSimulateLowResolution(prob=1.0, zoom_range=(0.5, 1.0))
    reference.set_random_state(0)
    monai_values = []
    for _ in range(COUNT):
        reference.randomize()
        monai_values.append(reference.zoom_factor)
    assert same_distribution([m.channels[0].low_resolution for m in draw_samples(low_resolution_p=1.0)], monai_values)


@pytest.mark.parametrize("name", ["gamma", "gamma_inverted"])
def test_gamma_below_and_above_one_has_the_distribution_of_monai(name: str) -> None:
    """nnU-Net draws values below and above 1 equally often. MONAI draws uniformly from the whole range."""
    reference = mt.RandAdjustContrast(prob=1.0, gamma=(0.7, 1.5))
    reference.set_random_state(0)
    monai_values = []
    for _ in range(2 * COUNT):
        reference.randomize()
        monai_values.append(reference.gamma_value)
    values = [getattr(m.channels[0], name) for m in draw_samples(**{f"{name}_p": 1.0})]
    assert same_distribution([g for g in values if g < 1], [g for g in monai_values if g < 1])
    assert same_distribution([g for g in values if g >= 1], [g for g in monai_values if g >= 1])
    assert abs(sum(g < 1 for g in values) / COUNT - 0.5) < 0.05


def test_mirroring_has_the_frequency_of_monai() -> None:
    reference = mt.RandFlip(prob=0.5, spatial_axis=0)
    reference.set_random_state(0)
    monai_flips = 0
    for _ in range(COUNT):
        reference.randomize(None)
        monai_flips += reference._do_transform
    flips = sum(m.flips[0] for m in draw_samples(mirror_p=0.5))
    assert stats.fisher_exact([[flips, COUNT - flips], [monai_flips, COUNT - monai_flips]]).pvalue > 0.01
