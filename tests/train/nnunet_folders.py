"""Results folders as nnU-Net v2 writes them, with random weights, and its two networks written down once more."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

FEATURES, KERNELS, STRIDES = [4, 6, 8], [[1, 3, 3], [3, 3, 3], [3, 3, 3]], [[1, 1, 1], [1, 2, 2], [2, 2, 2]]
ENCODER, DECODER = [1, 3, 2], [2, 1]
PATCH, SPACING = [8, 16, 12], [2.0, 1.0, 1.2]
DATASET = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "front": 1, "back": 2}, "file_ending": ".nii.gz"}
INTENSITIES = {"mean": 20.0, "std": 5.0, "percentile_00_5": 2.0, "percentile_99_5": 80.0, "median": 20.0}


class Conv(nn.Module):
    """A convolution with norm, and an activation after it if `active`."""

    def __init__(
        self, before: int, after: int, kernel: Any = 1, stride: Any = 1, *, active: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        padding = [side // 2 for side in kernel] if isinstance(kernel, list) else 0
        self.conv = nn.Conv3d(before, after, kernel, stride, padding, bias=bias)
        self.norm = nn.InstanceNorm3d(after, eps=1e-5, affine=True)
        nonlin = [nn.LeakyReLU()] if active else []
        self.all_modules = nn.Sequential(self.conv, self.norm, *nonlin)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.all_modules(x)
        return y


class Convs(nn.Module):
    def __init__(self, before: int, after: int, kernel: Any, stride: Any, count: int) -> None:
        super().__init__()
        others = [Conv(after, after, kernel) for _ in range(count - 1)]
        self.convs = nn.Sequential(Conv(before, after, kernel, stride), *others)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convs(x)
        return y


class Block(nn.Module):
    def __init__(self, before: int, after: int, kernel: Any, stride: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = Conv(before, after, kernel, stride), Conv(after, after, kernel, active=False)
        pool = [nn.AvgPool3d(stride, stride)] if stride != [1, 1, 1] else []
        projection = [Conv(before, after, active=False, bias=False)] if before != after else []
        self.skip = nn.Sequential(*pool, *projection)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.conv2(self.conv1(x)) + self.skip(x))


class Blocks(nn.Module):
    def __init__(self, before: int, after: int, kernel: Any, stride: Any, count: int) -> None:
        super().__init__()
        others = [Block(after, after, kernel, [1, 1, 1]) for _ in range(count - 1)]
        self.blocks = nn.Sequential(Block(before, after, kernel, stride), *others)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


class Encoder(nn.Module):
    def __init__(self, channels: int, residual: bool) -> None:
        super().__init__()
        self.stem = Convs(channels, FEATURES[0], KERNELS[0], 1, 1) if residual else None
        entering = [FEATURES[0] if residual else channels, *FEATURES[:-1]]
        sizes = list(zip(entering, FEATURES, KERNELS, STRIDES, ENCODER, strict=True))
        stages = [Blocks(*size) if residual else nn.Sequential(Convs(*size)) for size in sizes]
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x if self.stem is None else self.stem(x)
        skips = []
        for stage in self.stages:
            x = stage(x)
            skips.append(x)
        return skips


class Decoder(nn.Module):
    def __init__(self, encoder: Encoder, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder  # as in nnU-Net, whose state dict holds the encoder twice
        levels = range(len(FEATURES) - 2, -1, -1)
        self.transpconvs = nn.ModuleList(
            nn.ConvTranspose3d(FEATURES[i + 1], FEATURES[i], STRIDES[i + 1], STRIDES[i + 1]) for i in levels
        )
        self.stages = nn.ModuleList(
            Convs(2 * FEATURES[i], FEATURES[i], KERNELS[i], 1, DECODER[step]) for step, i in enumerate(levels)
        )
        self.seg_layers = nn.ModuleList(nn.Conv3d(FEATURES[i], outputs, 1) for i in levels)

    def forward(self, skips: list[Tensor]) -> Tensor:
        x = skips[-1]
        for step, (up, stage) in enumerate(zip(self.transpconvs, self.stages, strict=True)):
            x = stage(torch.cat([up(x), skips[-2 - step]], 1))
        logits: Tensor = self.seg_layers[-1](x)
        return logits


class ReferenceNetwork(nn.Module):
    """nnU-Net's PlainConvUNet or ResidualEncoderUNet with weights of a seed, and the names of its checkpoints."""

    def __init__(self, residual: bool, channels: int = 1, outputs: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.encoder = Encoder(channels, residual)
        self.decoder = Decoder(self.encoder, outputs)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.encoder(x))
        return logits


def make_plans(residual: bool = False) -> dict[str, Any]:
    """Return the content of plans.json for the networks above; callers may change it."""
    counts = "n_blocks_per_stage" if residual else "n_conv_per_stage"
    spline = {"is_seg": False, "order_z": 0, "force_separate_z": None}
    configuration = {
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": PATCH,
        "spacing": SPACING,
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_seg_kwargs": {"is_seg": True, "order": 1, "order_z": 0, "force_separate_z": None},
        "resampling_fn_data_kwargs": {**spline, "order": 3},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": {**spline, "order": 1},
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet."
            + ("ResidualEncoderUNet" if residual else "PlainConvUNet"),
            "arch_kwargs": {
                "n_stages": len(FEATURES),
                "features_per_stage": FEATURES,
                "conv_op": "torch.nn.modules.conv.Conv3d",
                "kernel_sizes": KERNELS,
                "strides": STRIDES,
                counts: ENCODER,
                "n_conv_per_stage_decoder": DECODER,
                "conv_bias": True,
                "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
                "norm_op_kwargs": {"eps": 1e-05, "affine": True},
                "dropout_op": None,
                "dropout_op_kwargs": None,
                "nonlin": "torch.nn.LeakyReLU",
                "nonlin_kwargs": {"inplace": True},
            },
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": True,
    }
    plans = {
        "dataset_name": "Dataset007_Blobs",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "label_manager": "LabelManager",
        "experiment_planner_used": "ExperimentPlanner",
        "foreground_intensity_properties_per_channel": {"0": INTENSITIES},
        "configurations": {"3d_fullres": configuration, "3d_bigger_batch": {"inherits_from": "3d_fullres"}},
    }
    return copy.deepcopy(plans)


def make_checkpoint(residual: bool = False, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the content of a checkpoint; `changes` replace parts of it."""
    network = ReferenceNetwork(residual, seed=seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.99)
    sum(p.sum() for p in network.parameters()).backward()
    optimizer.step()
    network = ReferenceNetwork(residual, seed=seed)
    history = {"mean_fg_dice": [np.float64(0.5)], "dice_per_class": [[np.float32(0.5)]], "epochs": np.arange(2)}
    content = {
        "network_weights": network.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "grad_scaler_state": None,
        "logging": history,
        "_best_ema": np.float64(0.5),
        "current_epoch": 3,
        "init_args": {"configuration": "3d_fullres", "fold": 0, "device": torch.device("cpu")},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 1, 2),
    }
    return {**content, **changes}


def write_results(
    folder: Path,
    *,
    residual: bool = False,
    folds: tuple[str, ...] = ("0",),
    plans: dict[str, Any] | None = None,
    dataset: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a results folder and return it; `changes` replace parts of every checkpoint."""
    folder.mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(plans or make_plans(residual)))
    (folder / "dataset.json").write_text(json.dumps(dataset or DATASET))
    for seed, fold in enumerate(folds):
        (folder / f"fold_{fold}").mkdir()
        torch.save(make_checkpoint(residual, seed, **changes), folder / f"fold_{fold}" / "checkpoint_final.pth")
    return folder
