"""Exported models as MONAI bundles, which need monai and torch but not voxlane.

DST/models/model.pt2         mean of all networks, as a program of torch.export that takes MONAI's axes (x, y, z)
DST/configs/inference.json   transforms, sliding window and network, for monai.bundle
DST/configs/metadata.json    labels, channels and versions. It is written last
DST/docs/README.md           model card

MONAI's transforms place windows in their own way and resample to exactly the plan's spacing, while voxlane stretches
the grid to whole voxels. So masks are equal for scans of one window on the plan's spacing, and similar for others. The
network itself is compared with voxlane's own before it is published.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from voxlane import __version__, settings
from voxlane.errors import ConfigError
from voxlane.store import StoreConfig
from voxlane.temporary import temporary_folder
from voxlane.train.ensemble import group_by_configuration
from voxlane.train.export import CollectedModel
from voxlane.train.exported_model import build_with_weights
from voxlane.train.graph_export import compare, trace
from voxlane.train.model_card import format_card
from voxlane.train.model_facts import Member, ModelFacts
from voxlane.train.model_files import ModelWriter
from voxlane.volume.grid import MLPERF_RECIPE
from voxlane.volume.plan import Plan

_METADATA = "configs/metadata.json"
_USAGE = "python -m monai.bundle run --config_file configs/inference.json --dataset_dir SCANS --output_dir MASKS"
_FILES = (
    "`models/model.pt2` is the mean of all networks, `configs/inference.json` has the steps from scans to masks, and "
    "`configs/metadata.json` describes the model."
)
_MONAI = "1.6.1"
"""Version of MONAI that a test runs bundles with."""
_EXPRESSED = ("recipe", "spacing", "normalisation", "patch", "batch", "network", "batch_dice", "pad_to_patch")
"""Fields of a plan that the bundle's transforms follow, or that do not matter to prediction."""


class MeanNetwork(nn.Module):
    """The mean logits of several networks, for windows and logits along x, y, z instead of z, y, x."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, image_BCXYZ: Tensor) -> Tensor:  # noqa: N803
        """Return the mean logits (batch, output, x, y, z)."""
        image = image_BCXYZ.permute(0, 1, 4, 3, 2)
        first, *others = self.networks
        logits: Tensor = first(image)
        for network in others:
            logits = logits + network(image)
        return (logits / len(self.networks)).permute(0, 1, 4, 3, 2)


def export_bundle(model: CollectedModel, target: str, config: StoreConfig | None = None) -> None:
    """Write a model of one configuration as a MONAI bundle to the folder or .zip file `target`."""
    facts = model.facts
    groups = group_by_configuration(facts.members)
    if len(groups) > 1:
        raise ConfigError(
            f"a MONAI bundle holds one configuration, but the model has {len(groups)}",
            uri=target,
            fix="Export the runs of each configuration on their own",
        )
    member = groups[0][0]
    check_plan(member.plan, target)
    channels, window = len(facts.description.channels), member.patch[::-1]
    networks = [
        build_with_weights(member, facts.description, model.load_weights(member), fused=False)
        for member in facts.members
    ]
    network = MeanNetwork(networks).eval()
    with ModelWriter(target, config, description=_METADATA) as writer, temporary_folder("bundle") as folder:
        path = os.path.join(folder, "model.pt2")
        torch.export.save(trace(network, channels, window), path)
        difference = compare(torch.export.load(path).module(), network, channels, window)
        writer.copy_file("models/model.pt2", path)
        inference = json.dumps(make_inference(facts, member), indent=1)
        writer.write("configs/inference.json", [inference.encode()])
        writer.write("docs/README.md", [format_card(facts, _USAGE, _FILES).encode()])
        writer.finish(json.dumps(make_metadata(facts, member, difference), indent=1).encode())


def check_plan(plan: Plan, target: str) -> None:
    """Raise ConfigError for preprocessing that MONAI's transforms cannot express."""
    values, defaults = settings.to_plain(plan), settings.to_plain(_default_plan(plan))
    for name, value in values.items():
        if name not in _EXPRESSED and value != defaults[name]:
            raise ConfigError(f"a MONAI bundle cannot express the plan's {name}: {value}", uri=target, fix=_OTHERS)
    schemes = {norm.scheme for norm in plan.normalisation}
    if len(set(plan.normalisation)) > 1:
        raise ConfigError("a MONAI bundle normalises all channels alike, this model does not", uri=target, fix=_OTHERS)
    if not schemes <= {"ct", "zscore", "none"}:
        raise ConfigError(f"a MONAI bundle cannot express {schemes.pop()} normalisation", uri=target, fix=_OTHERS)


_OTHERS = "Export with --format onnx or torch-export, or predict with voxlane"


def _default_plan(plan: Plan) -> Plan:
    """Return a plan with the defaults of all fields that have some."""
    required = ("spacing", "normalisation", "patch", "batch", "network")
    return Plan(**{name: getattr(plan, name) for name in required})


# -- configs/inference.json --------------------------------------------------------------------------------------------


def make_inference(facts: ModelFacts, member: Member) -> dict[str, Any]:
    """Return the content of inference.json, whose `run` segments every scan in `dataset_dir`."""
    return {
        "imports": ["$import functools", "$import glob", "$import os", "$import torch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/input'",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "sw_batch_size": 4,
        "datalist": _list_scans(len(facts.description.channels)),
        "network_def": "$torch.export.load(@bundle_root + '/models/model.pt2').module()",
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": _preprocess(member.plan)},
        "dataset": {"_target_": "Dataset", "data": "$@datalist", "transform": "@preprocessing"},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(member.patch[::-1]),
            "sw_batch_size": "@sw_batch_size",
            "overlap": 0.5,
            "mode": "gaussian",
            "sigma_scale": 0.125,
            "sw_device": "@device",
            "device": "$torch.device('cpu')",
        },
        "postprocessing": {"_target_": "Compose", "transforms": _postprocess(facts)},
        "segment": "$lambda item: @postprocessing({**item, 'pred': @inferer(item['image'][None], @network)[0]})",
        "initialize": ["$torch.set_grad_enabled(False)"],
        "run": ["$[@segment(item) for item in @dataset]"],
    }


def _list_scans(channels: int) -> str:
    """Return the expression for the scans in dataset_dir: nnU-Net's names if there are several channels."""
    if channels == 1:
        return "$[{'image': path} for path in sorted(glob.glob(@dataset_dir + '/*.nii.gz'))]"
    return (
        f"$[{{'image': [path[:-11] + '%04d.nii.gz' % channel for channel in range({channels})]}} "
        "for path in sorted(glob.glob(@dataset_dir + '/*_0000.nii.gz'))]"
    )


def _preprocess(plan: Plan) -> list[dict[str, Any]]:
    resample: dict[str, Any] = {"_target_": "Spacingd", "keys": "image", "pixdim": list(plan.spacing[::-1])}
    load: list[dict[str, Any]] = [
        {"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS", "labels": None},
    ]
    if plan.recipe == MLPERF_RECIPE:
        return [*load, {**resample, "mode": "bilinear", "align_corners": True}, _normalise(plan)]
    crop: dict[str, Any] = {
        "_target_": "CropForegroundd",
        "keys": "image",
        "source_key": "image",
        "allow_smaller": True,
    }
    spline: dict[str, Any] = {"mode": 3, "padding_mode": "nearest", "align_corners": True, "scale_extent": True}
    return [*load, {**crop, "select_fn": "$lambda x: x != 0"}, _normalise(plan), {**resample, **spline}]


def _normalise(plan: Plan) -> dict[str, Any]:
    norm = plan.normalisation[0]
    if norm.scheme == "ct":
        low, high = ((bound - norm.mean) / norm.std for bound in (norm.lower, norm.upper))
        return {
            "_target_": "ScaleIntensityRanged",
            "keys": "image",
            "a_min": norm.lower,
            "a_max": norm.upper,
            "b_min": low,
            "b_max": high,
            "clip": True,
        }
    if norm.scheme == "zscore":
        return {"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": norm.nonzero, "channel_wise": True}
    return {"_target_": "CastToTyped", "keys": "image", "dtype": "$torch.float32"}


def _postprocess(facts: ModelFacts) -> list[dict[str, Any]]:
    description = facts.description
    invert = {
        "_target_": "Invertd",
        "keys": "pred",
        "orig_keys": "image",
        "transform": "@preprocessing",
        "nearest_interp": False,
        "to_tensor": True,
    }
    values = list(description.mask_values)
    decide: list[dict[str, Any]]
    if description.regions:
        merge = (
            f"$lambda x: functools.reduce(lambda mask, region: torch.where(x[region[0]:region[0] + 1] > 0, region[1], "
            f"mask), list(enumerate({values})), torch.zeros_like(x[:1]))"
        )
        decide = [{"_target_": "Lambdad", "keys": "pred", "func": merge}]
    else:
        decide = [{"_target_": "AsDiscreted", "keys": "pred", "argmax": True}]
        if values != list(range(1, len(values) + 1)):
            labels = {"orig_labels": list(range(len(values) + 1)), "target_labels": [0, *values]}
            decide.append({"_target_": "MapLabelValued", "keys": "pred", **labels})
    largest = [
        {
            "_target_": "KeepLargestConnectedComponentd",
            "keys": "pred",
            "applied_labels": list(group),
            "independent": False,
            "connectivity": 3,
        }
        for group in facts.postprocessing.keep_largest
    ]
    save = {
        "_target_": "SaveImaged",
        "keys": "pred",
        "output_dir": "@output_dir",
        "output_dtype": "$torch.uint8",
        "output_postfix": "seg",
        "separate_folder": False,
        "resample": False,
        "print_log": False,
    }
    return [invert, *decide, *largest, save]


# -- configs/metadata.json ---------------------------------------------------------------------------------------------


def make_metadata(facts: ModelFacts, member: Member, difference: float) -> dict[str, Any]:
    """Return the content of metadata.json, by MONAI's schema."""
    description = facts.description
    window = list(member.patch[::-1])
    packages = {"nibabel": "5.2.0", "scipy": "1.13.0"}
    if facts.postprocessing.keep_largest:
        packages["scikit-image"] = "0.22.0"
    outputs = description.targets if description.regions else ("background", *description.targets)
    number = {"type": "image", "num_channels": len(description.channels), "spatial_shape": window, "dtype": "float32"}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
        "meta_schema_20240725.json",
        "version": "1.0.0",
        "changelog": {"1.0.0": f"exported by voxlane {__version__}"},
        "monai_version": _MONAI,
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": "1.26.0",
        "required_packages_version": packages,
        "name": facts.name,
        "task": f"Segmentation of {', '.join(description.targets)}",
        "description": f"Segments {', '.join(description.targets)} with {len(facts.members)} networks.",
        "authors": "",
        "copyright": facts.licence,
        "data_type": "nibabel",
        "intended_use": facts.intended_use,
        "largest_difference_of_logits": difference,
        "network_data_format": {
            "inputs": {
                "image": {
                    **number,
                    "format": "magnitude",
                    "modality": "/".join(description.channels),
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": {str(i): name for i, name in enumerate(description.channels)},
                }
            },
            "outputs": {
                "pred": {
                    **number,
                    "format": "logits",
                    "num_channels": description.outputs,
                    "value_range": [],
                    "is_patch_data": True,
                    "channel_def": {str(i): name for i, name in enumerate(outputs)},
                }
            },
        },
    }
