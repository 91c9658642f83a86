"""The plans.json and dataset.json of nnU-Net v2 as a plan and a description.

nnU-Net permutes the axes of every scan by `transpose_forward` before all else. Here all sizes are put back into the
order of the scan (z, y, x), and so are the weights (see `nnunet_weights`), which gives the same masks without permuting
scans. What voxlane cannot reproduce raises ImportedModelError, which names it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from voxlane import settings
from voxlane.errors import ConfigError, ImportedModelError
from voxlane.model.networks import SLOPE, check_patch
from voxlane.volume.dataset_layouts import parse_nnunet_description
from voxlane.volume.description import Description
from voxlane.volume.plan import NNUNET_RECIPE, Network, Normalisation, Plan, Resampling, Triple, to_triple

ELSEWHERE = "Predict with nnU-Net itself"
_NETWORKS: dict[str, Literal["unet", "residual"]] = {"PlainConvUNet": "unet", "ResidualEncoderUNet": "residual"}
_AXES: dict[str, Literal["anatomical", "stored"]] = {
    "SimpleITKIO": "stored",
    "NibabelIO": "stored",
    "SimpleITKIOWithReorient": "anatomical",
    "NibabelIOWithReorient": "anatomical",
}
_NORMS: dict[str, Literal["instance", "batch"]] = {"InstanceNorm3d": "instance", "BatchNorm3d": "batch"}
_SCHEMES = (
    "CTNormalization",
    "ZScoreNormalization",
    "NoNormalization",
    "RescaleTo01Normalization",
    "RGBTo01Normalization",
)
_SPLINES, _TORCH = "resample_data_or_seg_to_shape", "resample_torch_fornnunet"
_SMALLEST_STD = 1e-8
_IGNORED_KWARGS = {"n_stages", "dropout_op", "dropout_op_kwargs", "deep_supervision", "conv_bias"}
"""Arguments of a network that change no prediction, or that its weights show."""


@dataclass(frozen=True)
class NnunetConfiguration:
    """One configuration of a plans.json, such as 3d_fullres."""

    name: str
    plan: Plan
    axis_order: Triple
    """Axis of the network's own weights that belongs to each of z, y, x: nnU-Net's transpose_backward."""

    def mirror_axes(self, axes: Sequence[int] | None) -> tuple[int, ...]:
        """Return the axes (z, y, x) that a checkpoint permits to mirror, given as axes of its network."""
        return tuple(sorted(self.axis_order.index(int(axis)) for axis in axes or ()))


def read_description(document: Mapping[str, Any], name: str, uri: str) -> Description:
    """Return the description in a dataset.json; voxels of an ignore label are no output of a network."""
    labels = document.get("labels")
    if isinstance(labels, Mapping):
        labels = {key: value for key, value in labels.items() if key != "ignore"}
        if not any(isinstance(value, list) and len(value) > 1 for value in labels.values()):
            labels = {key: value[0] if isinstance(value, list) and value else value for key, value in labels.items()}
        document = {**document, "labels": labels}
    return settings.build(Description, parse_nnunet_description(document, uri, name), origin=uri)


def read_configuration(plans: Mapping[str, Any], name: str, uri: str) -> NnunetConfiguration:
    """Return a configuration of a plans.json, which `uri` names in errors."""
    try:
        return _Reader(plans, name, uri).read()
    except ConfigError as error:
        raise ImportedModelError(f"configuration {name}: {error.message}", uri=uri, fix=ELSEWHERE) from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ImportedModelError(
            f"configuration {name} is not as nnU-Net v2 writes it ({type(error).__name__}: {error})",
            uri=uri,
            fix="Copy the file again from the results folder",
        ) from None


class _Reader:
    def __init__(self, plans: Mapping[str, Any], name: str, uri: str) -> None:
        self.plans, self.name, self.uri = plans, name, uri
        self.values = self._inherit(name, ())
        self.transpose = [int(axis) for axis in plans["transpose_forward"]]
        self.order = to_triple(self.transpose.index(axis) for axis in range(3))

    def read(self) -> NnunetConfiguration:
        values = self.values
        if len(values["patch_size"]) != 3:
            raise self._unsupported("2D configurations are not supported", "Import a 3d_fullres or 3d_lowres folder")
        if values.get("previous_stage"):
            raise self._unsupported("cascades are not supported", "Import a 3d_fullres or 3d_lowres folder")
        for field, value, expected in (
            ("preprocessor_name", values.get("preprocessor_name"), "DefaultPreprocessor"),
            ("label_manager", self.plans.get("label_manager"), "LabelManager"),
        ):
            if value not in (None, expected):
                raise self._unsupported(f"{field} {value} is not nnU-Net's own")
        reader = self.plans["image_reader_writer"]
        if reader not in _AXES:
            raise self._unsupported(f"image_reader_writer {reader} does not read medical volumes")
        network, patch = self._network(), self._triple(values["patch_size"])
        check_patch(network, patch)
        z, y, x = (float(values["spacing"][axis]) for axis in self.order)
        plan = Plan(
            recipe=NNUNET_RECIPE,
            spacing=(z, y, x),
            normalisation=self._normalisation(),
            patch=patch,
            batch=int(values["batch_size"]),
            network=network,
            batch_dice=bool(values.get("batch_dice", False)),
            resampling=self._resampling(),
            axes=_AXES[reader],
        )
        return NnunetConfiguration(self.name, plan, self.order)

    def _inherit(self, name: str, below: tuple[str, ...]) -> dict[str, Any]:
        """Return a configuration with what it inherits."""
        configurations = self.plans["configurations"]
        if name not in configurations or name in below:
            raise ImportedModelError(
                f"no configuration {name}, only {', '.join(configurations)}",
                uri=self.uri,
                fix="Copy plans.json again from the results folder",
            )
        own = dict(configurations[name])
        parent = own.get("inherits_from")
        return own if parent is None else {**self._inherit(parent, (*below, name)), **own}

    def _triple(self, values: Any) -> Triple:
        """Return one value per axis (z, y, x) from one in the network's order, or one number for all."""
        own = [values] * 3 if isinstance(values, int) else values
        if len(own) != 3:
            raise ValueError(f"expected three values, got {values}")
        return to_triple(own[axis] for axis in self.order)

    def _network(self) -> Network:
        class_name, kwargs = self._architecture()
        kind = _NETWORKS.get(class_name.rpartition(".")[2])
        if kind is None:
            raise self._unsupported(f"network {class_name} is not one of {', '.join(_NETWORKS)}")
        kwargs = {key: value for key, value in kwargs.items() if value is not None and key not in _IGNORED_KWARGS}
        stages = len(kwargs["strides"])
        features = kwargs.pop("features_per_stage")
        features = (features,) * stages if isinstance(features, int) else tuple(features)
        kernels, strides = ([self._triple(value) for value in _repeat(kwargs.pop(name), stages)] for name in _SIZES)
        if any(side % 2 == 0 for kernel in kernels for side in kernel):
            raise self._unsupported("kernels with an even side are not supported")
        encoder = _repeat(kwargs.pop("n_conv_per_stage" if kind == "unet" else "n_blocks_per_stage"), stages)
        decoder = _repeat(kwargs.pop("n_conv_per_stage_decoder"), stages - 1)[::-1]
        norm = self._norm(kwargs)
        if kwargs.pop("stem_channels", features[0]) != features[0]:
            raise self._unsupported("stem_channels differs from the first of features_per_stage")
        if other := sorted(key for key, value in kwargs.items() if value):
            raise self._unsupported(f"the network's argument {other[0]} is not supported")
        return Network(
            kind=kind,
            features=features,
            strides=tuple(strides),
            kernels=tuple(kernels),
            encoder_convs=tuple(encoder),
            decoder_convs=tuple(decoder),
            norm=norm,
        )

    def _architecture(self) -> tuple[str, dict[str, Any]]:
        """Return the class and arguments of the network; nnU-Net 2.0 to 2.3 wrote them in another way."""
        values = self.values
        if "architecture" in values:
            return values["architecture"]["network_class_name"], dict(values["architecture"]["arch_kwargs"])
        kind, convs = values["UNet_class_name"], values["n_conv_per_stage_encoder"]
        widths = (values["UNet_base_num_features"] * 2**level for level in range(len(convs)))
        return kind, {
            "features_per_stage": [min(width, values["unet_max_num_features"]) for width in widths],
            "kernel_sizes": values["conv_kernel_sizes"],
            "strides": values["pool_op_kernel_sizes"],
            "n_conv_per_stage" if kind == "PlainConvUNet" else "n_blocks_per_stage": convs,
            "n_conv_per_stage_decoder": values["n_conv_per_stage_decoder"],
            "norm_op_kwargs": {"affine": True},
        }

    def _norm(self, kwargs: dict[str, Any]) -> Literal["instance", "batch"]:
        """Check the layers between convolutions, and return their norm."""
        layers = {"conv_op": "Conv3d", "norm_op": "InstanceNorm3d", "nonlin": "LeakyReLU"}
        chosen = {name: str(kwargs.pop(name, default)).rpartition(".")[2] for name, default in layers.items()}
        if chosen["conv_op"] != "Conv3d" or chosen["nonlin"] != "LeakyReLU" or chosen["norm_op"] not in _NORMS:
            raise self._unsupported(f"layers other than Conv3d, a norm and LeakyReLU: {', '.join(chosen.values())}")
        norm, act = dict(kwargs.pop("norm_op_kwargs", {})), dict(kwargs.pop("nonlin_kwargs", {}))
        is_batch = chosen["norm_op"] == "BatchNorm3d"
        if norm.get("eps", 1e-5) != 1e-5 or not norm.get("affine", is_batch) or norm.get("track_running_stats", False):
            raise self._unsupported(f"norm_op_kwargs {norm} are not nnU-Net's own")
        if act.get("negative_slope", SLOPE) != SLOPE:
            raise self._unsupported(f"nonlin_kwargs {act} are not nnU-Net's own")
        return _NORMS[chosen["norm_op"]]

    def _normalisation(self) -> tuple[Normalisation, ...]:
        schemes, masked = self.values["normalization_schemes"], self.values["use_mask_for_norm"]
        by_channel = self.plans.get("foreground_intensity_properties_per_channel")
        by_channel = by_channel or self.plans.get("foreground_intensity_properties_by_modality") or {}
        result = []
        for channel, (scheme, mask) in enumerate(zip(schemes, masked, strict=True)):
            if scheme not in _SCHEMES:
                raise self._unsupported(f"normalisation {scheme} is not one of {', '.join(_SCHEMES)}")
            if scheme == "CTNormalization":
                intensity = by_channel[str(channel)]
                low, high = float(intensity["percentile_00_5"]), float(intensity["percentile_99_5"])
                std = max(float(intensity["std"]), _SMALLEST_STD)
                result.append(Normalisation(scheme="ct", lower=low, upper=high, mean=float(intensity["mean"]), std=std))
            elif scheme == "RGBTo01Normalization":  # all values are from 0 to 255, so nothing is clipped
                result.append(Normalisation(scheme="ct", lower=0.0, upper=255.0, mean=0.0, std=255.0))
            elif scheme == "ZScoreNormalization":
                result.append(Normalisation(scheme="zscore", nonzero=bool(mask)))
            else:
                result.append(Normalisation(scheme="none" if scheme == "NoNormalization" else "rescale"))
        return tuple(result)

    def _resampling(self) -> Resampling:
        image, outputs = (self._resampling_of(kind) for kind in ("data", "probabilities"))
        if outputs.order != 1 or outputs.separate != image.separate:
            raise self._unsupported("resampling_fn_probabilities is not nnU-Net's own, which is linear")
        return image

    def _resampling_of(self, kind: str) -> Resampling:
        name, kwargs = self.values[f"resampling_fn_{kind}"], dict(self.values[f"resampling_fn_{kind}_kwargs"])
        separate = kwargs.get("force_separate_z", False)
        order = 1 if name == _TORCH else int(kwargs.get("order", 3))
        threshold = kwargs.get("separate_z_anisotropy_threshold", 3)
        if name not in (_SPLINES, _TORCH) or separate or order not in (0, 1, 3) or threshold != 3:
            raise self._unsupported(f"resampling_fn_{kind} {name} with {kwargs} is not supported")
        if separate is None and name == _SPLINES and int(kwargs.get("order_z", 0)) != 0:
            raise self._unsupported(f"resampling_fn_{kind}: order_z {kwargs['order_z']} is not supported, only 0")
        return settings.build(Resampling, {"order": order, "separate": separate is None})

    def _unsupported(self, problem: str, fix: str = ELSEWHERE) -> ImportedModelError:
        return ImportedModelError(f"configuration {self.name}: {problem}", uri=self.uri, fix=fix)


_SIZES = ("kernel_sizes", "strides")


def _repeat(value: Any, count: int) -> list[Any]:
    """Return one value per resolution from a list of them, or from one number for all."""
    values = [value] * count if isinstance(value, int) else copy.copy(list(value))
    if len(values) != count:
        raise ValueError(f"expected {count} values, one per resolution, got {value}")
    return values
