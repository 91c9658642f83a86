"""Held against MONAI: the same parameter gives the same voxels, and the parameters are drawn alike."""

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

from tests.model.test_augment import PATCH, batch, only, seeds
from voxlane.model import intensity, spatial
from voxlane.model.augment import Augment, Draw, draw

ANGLES, SCALES = (0.3, -0.5, 0.2), (1.2, 1.2, 1.2)


def channel() -> torch.Tensor:
    return batch(1, 1)[0][0, 0]


def plain(tensor: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(tensor))


def test_rotation_and_scaling() -> None:
    image, label = batch(1)
    matrix = spatial.matrix_of(ANGLES, SCALES)
    affine = np.eye(4)
    affine[:3, :3] = matrix
    new_image, new_label = spatial.transform(image, label, [matrix], [(False, False, False)], PATCH)
    theirs = {
        mode: mt.Affine(affine=affine, padding_mode="border", mode=mode, image_only=True)
        for mode in ("bilinear", "nearest")
    }
    assert torch.allclose(new_image[0], plain(theirs["bilinear"](image[0])), atol=1e-4)
    agree = new_label[0] == plain(theirs["nearest"](label[:1].float()))[0]
    assert agree.float().mean() > 0.999


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rotation_about_one_axis(axis: int) -> None:
    image, label = batch(1)
    angles = [0.0, 0.0, 0.0]
    angles[axis] = 0.4
    new_image, _ = spatial.transform(
        image, label, [spatial.matrix_of(angles, (1, 1, 1))], [(False, False, False)], PATCH
    )
    theirs = mt.Rotate(angle=tuple(angles), keep_size=True, padding_mode="border")(image[0])
    assert torch.allclose(new_image[0], plain(theirs), atol=1e-4)


def test_mirroring() -> None:
    image, label = batch(1)
    new_image, _ = spatial.transform(image, label, [None], [(True, False, True)], PATCH)
    assert torch.equal(new_image[0], plain(mt.Flip(spatial_axis=(0, 2))(image[0])))


@pytest.mark.parametrize("sigmas", [(0.5, 0.7, 1.0), (0.9, 0.6, 0.8)])
def test_blur(sigmas: tuple[float, float, float]) -> None:
    x = channel()
    radii = [len(intensity.gaussian(sigma, limit=99)) - 1 for sigma in sigmas]
    kernels = [
        gaussian_1d(torch.tensor(sigma), truncated=radius / sigma, approx="sampled", normalize=True)
        for sigma, radius in zip(sigmas, radii, strict=True)
    ]
    same_tails = separable_filtering(x[None, None], kernels, mode="reflect")[0, 0]
    default = plain(mt.GaussianSmooth(sigma=sigmas)(x[None]))[0]
    before = x.std()
    intensity.blur(x, sigmas)
    assert torch.allclose(x, same_tails, atol=1e-5)
    # MONAI's own kernel averages the Gaussian over a voxel and is zero outside the patch.
    inner = (slice(4, -4),) * 3
    assert (x[inner] - default[inner]).std() < 0.1 * before


@pytest.mark.parametrize("factor", [0.75, 1.2])
def test_brightness_and_contrast(factor: float) -> None:
    x = channel()
    theirs = plain(mt.ScaleIntensityFixedMean(factor=factor - 1, preserve_range=True, fixed_mean=True)(x[None]))[0]
    intensity.stretch(x, factor)
    assert torch.allclose(x, theirs, atol=1e-5)


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("gamma", [0.7, 1.4])
def test_gamma(gamma: float, inverted: bool) -> None:
    x = channel()
    theirs = plain(mt.AdjustContrast(gamma, invert_image=inverted, retain_stats=True)(x[None]))[0]
    intensity.bend(x, gamma, inverted=inverted)
    assert torch.allclose(x, theirs, atol=1e-4)


@pytest.mark.parametrize("scale", [0.5, 0.63, 0.9, 1.0])
def test_low_resolution(scale: float) -> None:
    x = channel()
    theirs = mt.RandSimulateLowResolution(
        prob=1.0, downsample_mode="nearest-exact", upsample_mode="trilinear", zoom_range=(scale, scale)
    )(x[None])
    intensity.lower_resolution(x, scale, None)
    assert torch.allclose(x, plain(theirs)[0], atol=1e-5)


COUNT = 1500


def draws(**chances: Any) -> list[Draw]:
    return [draw(only(**chances), seed, 1) for seed in range(COUNT)]


def alike(ours: list[float], theirs: list[float]) -> bool:
    assert len(ours) > 300
    assert len(theirs) > 300
    return bool(stats.ks_2samp(ours, theirs).pvalue > 0.01)


def test_rotation_and_scaling_are_drawn_alike() -> None:
    made = draws(rotation_p=1.0, scaling_p=1.0)
    bound = math.radians(30)
    theirs = mt.RandAffineGrid(rotate_range=(bound,) * 3, scale_range=((-0.3, 0.4),) * 3)
    theirs.set_random_state(0)
    angles, scales, turns = [], [], []
    for _ in range(COUNT):
        theirs.randomize()
        angles.append(theirs.rotate_params[1])
        scales.append(theirs.scale_params[0])
        rotation = mt.utils.create_rotate(3, theirs.rotate_params)
        turns.append(float(np.trace(rotation[:3, :3])))
    assert alike([m.angles[1] for m in made if m.angles], angles)
    assert alike([m.scales[0] for m in made if m.scales], scales)
    # The order of the three turns differs from MONAI's, but not how far they turn together.
    assert alike([float(np.trace(spatial.matrix_of(m.angles, (1, 1, 1)))) for m in made if m.angles], turns)


def test_noise_is_drawn_alike() -> None:
    zeros = torch.zeros((1, 6, 6, 6))
    theirs = mt.RandGaussianNoise(prob=1.0, std=0.1, sample_std=True)
    theirs.set_random_state(0)
    augment = Augment(only(noise_p=1.0), (6, 6, 6))
    ours, _ = augment(zeros.expand(COUNT, 1, 6, 6, 6), torch.zeros(COUNT, 6, 6, 6), seeds(*range(COUNT)))
    assert alike(ours.std(dim=(1, 2, 3, 4)).tolist(), [float(plain(theirs(zeros)).std()) for _ in range(COUNT)])
    assert alike(ours[:, 0, 3, 3, 3].tolist(), [float(plain(theirs(zeros))[0, 3, 3, 3]) for _ in range(COUNT)])


def test_blur_is_drawn_alike() -> None:
    theirs = mt.RandGaussianSmooth((0.5, 1.0), (0.5, 1.0), (0.5, 1.0), prob=1.0)
    theirs.set_random_state(0)
    drawn = []
    for _ in range(COUNT):
        theirs.randomize()
        drawn.append(theirs.z)
    assert alike([m.channels[0].blur_voxels[2] for m in draws(blur_p=1.0) if m.channels[0].blur_voxels], drawn)


def test_brightness_and_contrast_are_drawn_alike() -> None:
    for name, theirs in (
        ("brightness", mt.RandScaleIntensity(factors=0.25, prob=1.0)),
        ("contrast", mt.RandScaleIntensityFixedMean(factors=0.25, prob=1.0)),
    ):
        theirs.set_random_state(0)
        drawn = []
        for _ in range(COUNT):
            theirs.randomize()
            drawn.append(1.0 + theirs.factor)
        assert alike([getattr(m.channels[0], name) for m in draws(**{f"{name}_p": 1.0})], drawn)


def test_low_resolution_is_drawn_alike() -> None:
    theirs = mt.RandSimulateLowResolution(prob=1.0, zoom_range=(0.5, 1.0))
    theirs.set_random_state(0)
    drawn = []
    for _ in range(COUNT):
        theirs.randomize()
        drawn.append(theirs.zoom_factor)
    assert alike([m.channels[0].low_resolution for m in draws(low_resolution_p=1.0)], drawn)


@pytest.mark.parametrize("name", ["gamma", "gamma_inverted"])
def test_gamma_is_drawn_alike_on_each_side_of_one(name: str) -> None:
    """nnU-Net draws below and above 1 equally often, MONAI evenly over the whole range."""
    theirs = mt.RandAdjustContrast(prob=1.0, gamma=(0.7, 1.5))
    theirs.set_random_state(0)
    drawn = []
    for _ in range(2 * COUNT):
        theirs.randomize()
        drawn.append(theirs.gamma_value)
    ours = [getattr(m.channels[0], name) for m in draws(**{f"{name}_p": 1.0})]
    assert alike([g for g in ours if g < 1], [g for g in drawn if g < 1])
    assert alike([g for g in ours if g >= 1], [g for g in drawn if g >= 1])
    assert abs(sum(g < 1 for g in ours) / COUNT - 0.5) < 0.05


def test_mirroring_is_drawn_alike() -> None:
    theirs = mt.RandFlip(prob=0.5, spatial_axis=0)
    theirs.set_random_state(0)
    count = 0
    for _ in range(COUNT):
        theirs.randomize(None)
        count += theirs._do_transform
    ours = sum(m.flips[0] for m in draws(mirror_p=0.5))
    assert stats.fisher_exact([[ours, COUNT - ours], [count, COUNT - count]]).pvalue > 0.01
