"""Results folders of nnU-Net v2 become models whose networks and plans are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from tests.train.nnunet_folders import (
    DATASET,
    KERNELS,
    PATCH,
    SPACING,
    STRIDES,
    ReferenceNetwork,
    make_checkpoint,
    make_plans,
    write_results,
)
from voxlane.cli.main import main
from voxlane.errors import ConfigError, ImportedModelError, MismatchError, UnsafeError, VoxlaneError
from voxlane.model.networks import build
from voxlane.train.ensemble import ModelPredictor
from voxlane.train.exported_model import load_model
from voxlane.train.imports.nnunet_folder import NnunetFolder, NnunetModel, parse_folds
from voxlane.train.imports.nnunet_plans import read_configuration, read_description
from voxlane.train.predictor import plan_predictions, predict
from voxlane.volume.plan import Normalisation, Resampling

Plans = dict[str, Any]


def read(folder: Path, **options: Any) -> NnunetModel:
    return NnunetModel.read(NnunetFolder(str(folder), **options))


def predict_logits(model: NnunetModel, index: int, image: torch.Tensor) -> torch.Tensor:
    """Return the logits of an imported network."""
    member = model.facts.members[index]
    description = model.facts.description
    network = build(member.network, len(description.channels), description.outputs, deep_supervision=False).eval()
    network.load_state_dict(dict(model.load_weights(member)))
    with torch.no_grad():
        logits: torch.Tensor = network(image)
    return logits


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_network_equals_nnunets(residual: bool, order: tuple[int, int, int], tmp_path: Path) -> None:
    plans = make_plans(residual)
    plans["transpose_forward"] = list(order)
    model = read(write_results(tmp_path / "m", residual=residual, folds=("0", "1"), plans=plans))
    assert [member.name for member in model.facts.members] == ["3d_fullres-fold_0", "3d_fullres-fold_1"]
    image = torch.randn(1, 1, *PATCH)  # along the axes of nnU-Net's network
    back = [order.index(axis) for axis in range(3)]
    for index in (0, 1):
        with torch.no_grad():
            expected = ReferenceNetwork(residual, seed=index).eval()(image)
        logits = predict_logits(model, index, image.permute(0, 1, *(2 + axis for axis in back)))
        torch.testing.assert_close(logits.permute(0, 1, *(2 + axis for axis in order)), expected)


@pytest.mark.parametrize("residual", [False, True])
def test_reference_network_is_nnunets(residual: bool) -> None:
    """The networks that the other tests compare with are those of nnU-Net's own package."""
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    arguments = make_plans(residual)["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    arguments |= {"conv_op": torch.nn.Conv3d, "norm_op": torch.nn.InstanceNorm3d, "nonlin": torch.nn.LeakyReLU}
    cls = unet.ResidualEncoderUNet if residual else unet.PlainConvUNet
    network, reference = cls(input_channels=1, num_classes=3, **arguments), ReferenceNetwork(residual)
    network.load_state_dict(reference.state_dict())
    image = torch.randn(1, 1, *PATCH)
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(image), reference.eval()(image))


def test_plan_is_in_the_order_of_the_scan(tmp_path: Path) -> None:
    plans = make_plans()
    plans["transpose_forward"] = [1, 2, 0]
    configuration = read_configuration(plans, "3d_bigger_batch", "plans.json")
    plan = configuration.plan

    def restored(values: list[Any]) -> tuple[Any, ...]:
        return values[2], values[0], values[1]

    assert (plan.patch, plan.spacing) == (restored(PATCH), restored(SPACING))
    assert plan.network.strides == tuple(map(restored, STRIDES))
    assert plan.network.kernels == tuple(map(restored, KERNELS))
    assert (plan.network.encoder_convs, plan.network.decoder_convs) == ((1, 3, 2), (1, 2))
    assert (plan.batch, plan.batch_dice, plan.axes) == (2, True, "stored")
    assert configuration.mirror_axes([0, 1]) == (1, 2), "the network's first axis is the scan's second"
    assert configuration.mirror_axes(None) == ()


def test_checkpoint_says_how_it_was_trained(tmp_path: Path) -> None:
    changes = {"inference_allowed_mirroring_axes": None, "trainer_name": "nnUNetTrainer_250epochs_NoMirroring"}
    model = read(write_results(tmp_path / "m", folds=("all",), **changes))
    (member,) = model.facts.members
    assert member.mirror_axes == ()
    origin = member.provenance
    assert (origin.source, origin.data, origin.fold, origin.epoch) == ("nnU-Net v2", "Dataset007_Blobs", None, 3)


def test_plans_of_older_versions(tmp_path: Path) -> None:
    plans = make_plans()
    configuration = plans["configurations"]["3d_fullres"]
    expected = read_configuration(make_plans(), "3d_fullres", "plans.json").plan
    arguments = configuration.pop("architecture")["arch_kwargs"]
    configuration |= {
        "UNet_class_name": "PlainConvUNet",
        "UNet_base_num_features": 4,
        "unet_max_num_features": 6,
        "conv_kernel_sizes": arguments["kernel_sizes"],
        "pool_op_kernel_sizes": arguments["strides"],
        "n_conv_per_stage_encoder": arguments["n_conv_per_stage"],
        "n_conv_per_stage_decoder": arguments["n_conv_per_stage_decoder"],
    }
    network = read_configuration(plans, "3d_fullres", "plans.json").plan.network
    assert network.features == (4, 6, 6)
    assert (network.kernels, network.strides) == (expected.network.kernels, expected.network.strides)


def test_normalisation_and_resampling() -> None:
    plans = make_plans()
    values = plans["configurations"]["3d_fullres"]
    schemes = ["CTNormalization", "ZScoreNormalization", "NoNormalization", "RescaleTo01Normalization"]
    values["normalization_schemes"] = [*schemes, "RGBTo01Normalization"]
    values["use_mask_for_norm"] = [False, True, False, False, False]
    values |= {f"resampling_fn_{kind}": "resample_torch_fornnunet" for kind in ("data", "probabilities")}
    values |= {f"resampling_fn_{kind}_kwargs": {"force_separate_z": False} for kind in ("data", "probabilities")}
    plans["image_reader_writer"] = "NibabelIOWithReorient"
    plan = read_configuration(plans, "3d_fullres", "plans.json").plan
    assert plan.normalisation == (
        Normalisation(scheme="ct", lower=2.0, upper=80.0, mean=20.0, std=5.0),
        Normalisation(scheme="zscore", nonzero=True),
        Normalisation(scheme="none"),
        Normalisation(scheme="rescale"),
        Normalisation(scheme="ct", lower=0.0, upper=255.0, mean=0.0, std=255.0),
    )
    assert (plan.resampling, plan.axes) == (Resampling(order=1, separate=False), "anatomical")


@pytest.mark.parametrize(
    ("labels", "order", "values"),
    [
        ({"background": 0, "a": 1, "b": 2, "ignore": 3}, None, (1, 2)),
        ({"background": 0, "whole": [1, 2], "core": [2]}, [1, 2], (1, 2)),
        ({"background": 0, "a": [1], "b": [2]}, None, (1, 2)),
    ],
)
def test_labels(labels: dict[str, Any], order: list[int] | None, values: tuple[int, ...]) -> None:
    document = DATASET | {"labels": labels, "regions_class_order": order}
    description = read_description(document, "blobs", "dataset.json")
    assert description.mask_values == values
    assert description.outputs == (2 if order else 3)


# -- bad input ---------------------------------------------------------------------------------------------------------


def change_plans(**changes: Any) -> Callable[[], Plans]:
    """Return a function that makes plans whose 3d_fullres configuration has `changes`."""

    def make() -> Plans:
        plans = make_plans()
        plans["configurations"]["3d_fullres"] |= changes
        return plans

    return make


def change_network(**changes: Any) -> Callable[[], Plans]:
    def make() -> Plans:
        plans = make_plans()
        architecture = plans["configurations"]["3d_fullres"]["architecture"]
        architecture["network_class_name"] = changes.pop("network_class_name", architecture["network_class_name"])
        architecture["arch_kwargs"] |= changes
        return plans

    return make


SPLINE = {"is_seg": False, "order": 3, "order_z": 1, "force_separate_z": None}


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        (change_plans(patch_size=[40, 56]), "3d_fullres: 2D configurations are not supported. Import a 3d_fullres"),
        (change_plans(previous_stage="3d_lowres"), "cascades are not supported"),
        (change_plans(preprocessor_name="MyPreprocessor"), "MyPreprocessor is not nnU-Net's own. Predict with nnU-Net"),
        (change_plans(normalization_schemes=["MyNorm"]), "normalisation MyNorm is not one of CTNormalization"),
        (change_plans(resampling_fn_data="no_resampling_hack"), "no_resampling_hack with .* is not supported"),
        (change_plans(resampling_fn_data_kwargs=SPLINE), "order_z 1 is not supported, only 0"),
        (change_plans(patch_size=[8, 15, 12]), "patch: 15 along y is not a multiple of 4"),
        (change_plans(spacing=None), "3d_fullres is not as nnU-Net v2 writes it .*Copy the file again"),
        (change_network(network_class_name="my.networks.MedNeXt"), "network my.networks.MedNeXt is not one of Plain"),
        (change_network(nonlin="torch.nn.ReLU"), "layers other than Conv3d, a norm and LeakyReLU"),
        (change_network(norm_op_kwargs={"eps": 1e-3, "affine": True}), "norm_op_kwargs .* are not nnU-Net's own"),
        (change_network(nonlin_first=True), "the network's argument nonlin_first is not supported"),
        (change_network(kernel_sizes=[[2, 3, 3]] * 3), "kernels with an even side"),
        (change_network(features_per_stage=[4, 6]), "features, strides and kernels: expected one entry"),
    ],
)
def test_unsupported_configurations(plans: Callable[[], Plans], message: str) -> None:
    with pytest.raises(ImportedModelError, match=message):
        read_configuration(plans(), "3d_fullres", "plans.json")


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)


def test_checkpoint_that_would_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_results(tmp_path / "m", logging=RunsCode())
    with pytest.raises(UnsafeError, match=r"system.*can run code. Copy the folder again from a source that you trust"):
        read(folder)
    assert not (tmp_path / "was-run").exists()


def test_weights_of_another_network(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "m", plans=make_plans(residual=True))
    with pytest.raises(MismatchError, match=r"not those of the network in plans.json: encoder.* is missing. Use the"):
        read(folder)
    weights = make_checkpoint()["network_weights"]
    for extra, message in (
        ({"decoder.attention.weight": torch.ones(1)}, "decoder.attention.weight is not part of the network"),
        ({"decoder.seg_layers.1.weight": torch.ones(5, 4, 1, 1, 1)}, "has the shape .5, 4, 1, 1, 1., not .3,"),
    ):
        with pytest.raises(MismatchError, match=message):
            read(write_results(tmp_path / message[:20], network_weights=weights | extra))


def test_names_of_compiled_and_parallel_networks(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": value for name, value in make_checkpoint()["network_weights"].items()}
    model = read(write_results(tmp_path / "m", network_weights=wrapped))
    image = torch.randn(1, 1, *PATCH)
    with torch.no_grad():
        torch.testing.assert_close(predict_logits(model, 0, image), ReferenceNetwork(False).eval()(image))


def test_folds(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "m", folds=("0", "2", "10", "all"))
    names = [member.name.partition("-")[2] for member in read(folder).facts.members]
    assert names == ["fold_0", "fold_2", "fold_10"], "the network of all cases is left out beside folds, as in nnU-Net"
    assert [m.name for m in read(folder, folds=("all",)).facts.members] == ["3d_fullres-fold_all"]
    with pytest.raises(ImportedModelError, match=r"fold_1 does not exist. Import the others with --folds"):
        read(folder, folds=("0", "1"))
    final = folder / "fold_2" / "checkpoint_final.pth"
    final.rename(final.with_name("checkpoint_best.pth"))
    with pytest.raises(ImportedModelError, match=r"fold_2 has no checkpoint_final.pth.*, or give --checkpoint best"):
        read(folder)
    assert len(read(folder, folds=("2",), checkpoint="best").facts.members) == 1
    assert parse_folds("0, 2") == ("0", "2")
    with pytest.raises(ConfigError, match="--folds first"):
        parse_folds("first")


def test_folders_that_are_not_complete(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "Dataset007" / "nnUNetTrainer__nnUNetPlans__3d_fullres")
    with pytest.raises(ImportedModelError, match=r"has no plans.json. Import one of the folders below it: nnUNetTr"):
        read(folder.parent)
    with pytest.raises(ImportedModelError, match=r"there are no files here\. Check its spelling"):
        read(tmp_path / "Dataset008")
    (folder / "dataset.json").write_text("{")
    with pytest.raises(ImportedModelError, match=r"dataset.json is not a JSON file of nnU-Net"):
        read(folder)
    shutil.copy(tmp_path / "Dataset007" / folder.name / "plans.json", tmp_path)
    (folder / "dataset.json").unlink()
    with pytest.raises(ImportedModelError, match=r"the folder has no dataset.json. Copy it from"):
        read(folder)
    shutil.rmtree(folder / "fold_0")
    (folder / "dataset.json").write_text('{"channel_names": {"0": "MRI"}, "labels": {"background": 0, "a": 1}}')
    with pytest.raises(ImportedModelError, match="the folder has no fold_0, fold_1"):
        read(folder)


@pytest.mark.parametrize("name", ["MyTrainer", "nnUNetTrainerMedNeXt", "nnUNetTrainerBN", "nnUNetTrainer_custom"])
def test_custom_trainers(name: str, tmp_path: Path) -> None:
    folder = write_results(tmp_path / "m", trainer_name=name)
    with pytest.raises(ImportedModelError, match=f"trained by {name}, .* only the training, give --trust"):
        read(folder)
    assert len(read(folder, trust_trainer=True).facts.members) == 1


def test_checkpoint_of_another_program(tmp_path: Path) -> None:
    folder = write_results(tmp_path / "m", network_weights=None)
    with pytest.raises(ImportedModelError, match="not a checkpoint of nnU-Net v2"):
        read(folder)
    (folder / "fold_0" / "checkpoint_final.pth").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(VoxlaneError, match="not a torch checkpoint"):
        read(folder)
    other = write_results(tmp_path / "n", init_args={})
    with pytest.raises(ImportedModelError, match="does not say which configuration"):
        read(other)
    other = write_results(tmp_path / "o", init_args={"configuration": "3d_lowres"})
    with pytest.raises(ImportedModelError, match="no configuration 3d_lowres, only 3d_fullres, 3d_bigger_batch"):
        read(other)


def test_standard_trainers_of_the_installed_nnunet(tmp_path: Path) -> None:
    """Every trainer that comes with nnU-Net is accepted, unless it changes the network."""
    from voxlane.train.imports.nnunet_folder import _STANDARD_TRAINER

    package = pytest.importorskip("nnunetv2")
    sources = (Path(package.__path__[0]) / "training" / "nnUNetTrainer").rglob("*.py")
    names = {
        line.split()[1].partition("(")[0].rstrip(":")
        for source in sources
        for line in source.read_text().splitlines()
        if line.startswith("class ")
    }
    refused = {name for name in names if not _STANDARD_TRAINER.fullmatch(name)}
    others = {name for name in refused if "Primus" not in name}
    assert others == {"nnUNetTrainerBN", "nnUNet_Trainer_BS8"}


# -- nnU-Net itself ----------------------------------------------------------------------------------------------------


def test_masks_equal_those_of_nnunet(tmp_path: Path) -> None:
    """nnU-Net is trained for a few steps, imported, and both segment scans with axes of all kinds."""
    pytest.importorskip("nnunetv2")
    peer = [sys.executable, "-m", "tests.train.nnunet_peer", str(tmp_path)]
    done = subprocess.run(peer, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    scans = sorted((tmp_path / "scans").iterdir())
    for name in ("plain", "residual"):
        model = str(tmp_path / "models" / f"{name}.zip")
        assert main(["import", str(tmp_path / "results" / name), model]) == 0
        predictor = ModelPredictor.load(load_model(model))
        for job in plan_predictions([str(scan) for scan in scans], str(tmp_path / "ours" / name)):
            predict(predictor, job, progress=False)
            stem = Path(job.mask).name.removesuffix(".nii.gz")
            expected = np.load(tmp_path / "masks" / name / f"{stem}.npy")
            actual = np.asarray(nibabel.load(tmp_path / "ours" / name / f"{stem}.nii.gz").dataobj).transpose()
            assert len(np.unique(expected)) > 1, "nnU-Net found something"
            assert (actual == expected).mean() >= 0.9999
