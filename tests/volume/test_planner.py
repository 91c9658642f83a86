"""Plans match those of nnU-Net 2.8.1, which are recorded here for the same fingerprints."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from voxlane import settings
from voxlane.errors import ConfigError
from voxlane.volume.description import Description
from voxlane.volume.fingerprint import Fingerprint, Intensity
from voxlane.volume.plan import Network, Normalisation, Plan, Triple
from voxlane.volume.planner import make_mlperf_plan, make_plan

_INTENSITY = Intensity(
    mean=100.0, std=70.0, median=99.0, low=-50.0, high=400.0, percentile_00_5=-40.0, percentile_99_5=300.0
)
_ISOTROPIC = (2, 2, 2)
_IN_PLANE = (1, 2, 2)


def _make_description(labels: int = 2, channels: tuple[str, ...] = ("CT",)) -> Description:
    names = {"background": 0} | {f"class {value}": value for value in range(1, labels)}
    return Description(name="any", channels=channels, labels=names)


def _make_fingerprint(
    shape: Triple, spacing: tuple[float, float, float], cases: int, relative_size: float = 1.0, channels: int = 1
) -> Fingerprint:
    return Fingerprint(
        shapes=(shape,) * cases,
        spacings=(spacing,) * cases,
        relative_size=relative_size,
        intensities=(_INTENSITY,) * channels,
    )


# Inputs: name, shape, spacing, cases, labels, memory in GB. Plan of nnU-Net: patch, batch, strides after the first,
# number of resolutions whose kernel is 1 along the coarse axis, batch Dice.
_NNUNET_PLANS = [
    ("kidneys", (105, 512, 512), (3.0, 0.78, 0.78), 210, 3, 8, (40, 224, 224), 2,
     [_IN_PLANE, *[_ISOTROPIC] * 3, _IN_PLANE], 1, True),
    ("heart", (9, 256, 216), (10, 1.56, 1.56), 100, 4, 8, (10, 256, 224), 4,
     [_IN_PLANE, _IN_PLANE, _ISOTROPIC, _IN_PLANE, _IN_PLANE], 2, False),
    ("brain", (140, 170, 138), (1, 1, 1), 484, 4, 8, (128, 128, 128), 2, [_ISOTROPIC] * 5, 0, False),
    ("hippocampus", (36, 50, 35), (1, 1, 1), 217, 3, 8, (40, 56, 40), 8, [_ISOTROPIC] * 3, 0, False),
    ("few", (36, 50, 35), (1, 1, 1), 20, 3, 8, (40, 56, 40), 2, [_ISOTROPIC] * 3, 0, False),
    ("prostate", (20, 320, 319), (3.6, 0.61, 0.61), 32, 3, 8, (20, 320, 256), 2,
     [_IN_PLANE, _IN_PLANE, _ISOTROPIC, _ISOTROPIC, _IN_PLANE, _IN_PLANE], 2, False),
    ("lung", (252, 512, 512), (1.24, 0.79, 0.79), 63, 2, 8, (80, 192, 160), 2, [*[_ISOTROPIC] * 4, _IN_PLANE], 0, True),
    ("lung, 24 GB", (252, 512, 512), (1.24, 0.79, 0.79), 63, 2, 24, (112, 256, 256), 2,
     [*[_ISOTROPIC] * 4, _IN_PLANE, _IN_PLANE], 0, True),
    ("cube", (256, 256, 256), (1, 1, 1), 20, 2, 8, (128, 128, 128), 2, [_ISOTROPIC] * 5, 0, True),
    ("tiny", (12, 12, 12), (1, 1, 1), 400, 2, 8, (12, 12, 12), 20, [_ISOTROPIC], 0, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "spacing", "cases", "labels", "memory_gb", "patch", "batch", "strides", "flat_kernels", "batch_dice"),
    [row[1:] for row in _NNUNET_PLANS],
    ids=[row[0] for row in _NNUNET_PLANS],
)
def test_plans_match_nnunet(
    shape: Triple,
    spacing: tuple[float, float, float],
    cases: int,
    labels: int,
    memory_gb: float,
    patch: Triple,
    batch: int,
    strides: list[Triple],
    flat_kernels: int,
    batch_dice: bool,
) -> None:
    plan = make_plan(_make_description(labels), _make_fingerprint(shape, spacing, cases), memory_gb=memory_gb)
    resolutions = len(strides) + 1
    assert plan == Plan(
        spacing=spacing,
        normalisation=(Normalisation(scheme="ct", lower=-40.0, upper=300.0, mean=100.0, std=70.0),),
        patch=patch,
        batch=batch,
        network=Network(
            features=(32, 64, 128, 256, 320, 320, 320)[:resolutions],
            strides=((1, 1, 1), *strides),
            kernels=((1, 3, 3),) * flat_kernels + ((3, 3, 3),) * (resolutions - flat_kernels),
        ),
        batch_dice=batch_dice,
    )
    assert settings.build(Plan, settings.to_plain(plan)) == plan


def test_coarse_axis_need_not_be_the_first() -> None:
    plan = make_plan(_make_description(), _make_fingerprint((256, 12, 230), (1.2, 8, 1.3), 50))
    assert plan.patch == (256, 12, 256)
    assert plan.network.strides[1:] == ((2, 1, 2), (2, 1, 2), (2, 2, 2), (2, 1, 2), (2, 1, 2), (2, 1, 2))
    assert plan.network.kernels[:3] == ((3, 1, 3), (3, 1, 3), (3, 3, 3))
    plan = make_plan(_make_description(), _make_fingerprint((256, 230, 14), (1.2, 1.3, 8), 50))
    assert plan.patch == (256, 256, 14)


@pytest.mark.parametrize(
    ("slices_mm", "target", "patch"),
    [
        ((5, 6, 8, 9, 9.5, 10, 10, 10, 10, 12), 5.9, (20, 256, 224)),
        # The spacing is never finer than that of the other axes.
        ((1, 1, 1, 9, 9.5, 10, 10, 10, 10, 12), 1.50001, (56, 224, 192)),
    ],
)
def test_thick_slices_use_the_tenth_percentile(slices_mm: tuple[float, ...], target: float, patch: Triple) -> None:
    fingerprint = Fingerprint(
        shapes=((10, 256, 216),) * 10,
        spacings=tuple((mm, 1.5, 1.5) for mm in slices_mm),
        relative_size=0.5,
        intensities=(_INTENSITY,),
    )
    plan = make_plan(_make_description(channels=("MRI",)), fingerprint)
    assert plan.spacing == pytest.approx((target, 1.5, 1.5), rel=1e-12)
    assert plan.patch == patch
    assert plan.normalisation == (Normalisation(scheme="zscore", nonzero=True),)


def test_channel_names_select_the_normalisation() -> None:
    fingerprint = _make_fingerprint((64, 64, 64), (1, 1, 1), 10, relative_size=0.8, channels=4)
    plan = make_plan(_make_description(channels=("ct", "T1w", "noNorm", "CTA")), fingerprint)
    assert [options.scheme for options in plan.normalisation] == ["ct", "zscore", "none", "zscore"]
    assert not any(options.nonzero for options in plan.normalisation), "the scans are mostly not blank"


@given(
    st.tuples(*[st.integers(8, 300)] * 3),
    st.tuples(*[st.floats(0.4, 6.0)] * 3),
    st.integers(1, 300),
    st.sampled_from([4.0, 8.0, 24.0]),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_patch_is_divisible_by_the_strides(
    shape: Triple, spacing: tuple[float, float, float], cases: int, memory_gb: float
) -> None:
    plan = make_plan(_make_description(), _make_fingerprint(shape, spacing, cases), memory_gb=memory_gb)
    total_strides = np.prod(plan.network.strides, axis=0)
    assert all(n % int(h) == 0 for n, h in zip(plan.patch, total_strides, strict=True))
    assert all(n // int(h) >= 4 or h == 1 for n, h in zip(plan.patch, total_strides, strict=True))
    assert all(p <= math.ceil(n / h) * h for p, n, h in zip(plan.patch, shape, total_strides, strict=True))
    assert plan.batch >= 2


# With prime sizes no two axes tie, so their order cannot matter.
@given(
    st.lists(st.sampled_from([29, 53, 97, 149, 211, 307]), min_size=3, max_size=3, unique=True),
    st.lists(st.floats(0.4, 6.0), min_size=3, max_size=3, unique=True),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_plan_does_not_depend_on_the_order_of_axes(shape: list[int], spacing: list[float]) -> None:
    def plan_with_order(order: tuple[int, ...]) -> Plan:
        z, y, x = order
        permuted = _make_fingerprint((shape[z], shape[y], shape[x]), (spacing[z], spacing[y], spacing[x]), 20)
        return make_plan(_make_description(), permuted)

    plan = plan_with_order((0, 1, 2))
    for order in itertools.permutations(range(3)):
        permuted = plan_with_order(order)
        assert permuted.patch == tuple(plan.patch[a] for a in order)
        assert permuted.spacing == tuple(plan.spacing[a] for a in order)
        assert permuted.network.strides == tuple(tuple(s[a] for a in order) for s in plan.network.strides)
        assert permuted.network.kernels == tuple(tuple(k[a] for a in order) for k in plan.network.kernels)
        assert (permuted.batch, permuted.batch_dice) == (plan.batch, plan.batch_dice)


def test_overrides_are_kept() -> None:
    fingerprint = _make_fingerprint((105, 512, 512), (3.0, 0.78, 0.78), 210)
    plan = make_plan(_make_description(), fingerprint, spacing=(2.0, 2.0, 2.0), patch=(60, 70, 64))
    assert plan.spacing == (2.0, 2.0, 2.0)
    assert plan.patch == (64, 80, 64)
    assert plan.network.features == (32, 64, 128, 256, 320)


def test_invalid_arguments_are_rejected() -> None:
    fingerprint = _make_fingerprint((64, 64, 64), (1, 1, 1), 10)
    with pytest.raises(ConfigError, match="2 channels, but the scans have 1"):
        make_plan(_make_description(channels=("A", "B")), fingerprint)
    with pytest.raises(ConfigError, match="memory_gb"):
        make_plan(_make_description(), fingerprint, memory_gb=0)
    with pytest.raises(ConfigError, match="spacing"):
        make_plan(_make_description(), fingerprint, spacing=(0.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="no patch is small enough"):
        make_plan(_make_description(), fingerprint, memory_gb=1e-9)


def test_mlperf_constants() -> None:
    plan = make_mlperf_plan()
    assert (plan.spacing, plan.patch, plan.batch) == ((1.6, 1.2, 1.2), (128, 128, 128), 2)
    assert plan.normalisation == (Normalisation(scheme="ct", lower=-79, upper=304, mean=101.0, std=76.9),)
    assert plan.network.kind == "mlperf"
    assert plan.pad_to_patch
    assert not plan.batch_dice
