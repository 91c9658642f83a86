"""Networks as ONNX and torch.export, run by onnxruntime and torch.export.load, and as a bundle run by MONAI."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.train.tiny_models import DESCRIPTION, NETWORK, PLAN, make_facts, make_member, make_weights
from voxlane.errors import ConfigError, MissingExtraError, RunError
from voxlane.model.networks import build
from voxlane.train import graph_export
from voxlane.train.ensemble import ModelPredictor
from voxlane.train.export import CollectedModel
from voxlane.train.exported_model import save_model
from voxlane.train.graph_export import MAX_DIFFERENCE, compare, export_graphs, load_onnx
from voxlane.train.model_facts import Member, Postprocessing
from voxlane.train.monai_bundle import export_bundle
from voxlane.volume.description import Description
from voxlane.volume.plan import Normalisation
from voxlane.volume.scan import read_scan
from voxlane.volume.scan_reader import read_channels

GROUP_NORM = dataclasses.replace(NETWORK, norm="group", features=(8, 16))


def collect(*members: Member, description: Description = DESCRIPTION, **changes: Any) -> CollectedModel:
    facts = make_facts(*members, description=description, **changes)
    return CollectedModel(facts, lambda member: make_weights(member, description))


def own_logits(member: Member, windows: torch.Tensor, description: Description = DESCRIPTION) -> torch.Tensor:
    """Logits of the network as training and prediction build it."""
    network = build(member.network, len(description.channels), description.outputs).eval()
    network.load_state_dict(make_weights(member, description))
    with torch.no_grad():
        return network(windows)


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_onnxruntime_computes_the_same_logits(norm: str, tmp_path: Path) -> None:
    member = make_member("fold_0", network=dataclasses.replace(NETWORK, norm=norm, convs=2))
    assert export_graphs(collect(member), str(tmp_path / "m"), "onnx") == ["fold_0.onnx"]
    onnx.checker.check_model(str(tmp_path / "m/fold_0.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "m/fold_0.onnx", providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        windows = torch.randn(batch, 1, 16, 16, 16, generator=torch.Generator().manual_seed(batch))
        (logits,) = session.run(["logits"], {"image": windows.numpy()})
        assert np.abs(logits - own_logits(member, windows).numpy()).max() < MAX_DIFFERENCE


def test_torch_export_computes_the_same_logits(tmp_path: Path) -> None:
    members = make_member("fold_0"), make_member("group", network=GROUP_NORM, patch=(8, 16, 12))
    assert export_graphs(collect(*members), str(tmp_path / "m"), "torch-export") == ["fold_0.pt2", "group.pt2"]
    for member in members:
        program = torch.export.load(tmp_path / "m" / f"{member.name}.pt2").module()
        windows = torch.randn(3, 1, *member.patch, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert (program(windows) - own_logits(member, windows)).abs().max() < MAX_DIFFERENCE


@pytest.mark.parametrize("file", ["fold_0.onnx", "fold_0.pt2"])
def test_files_name_no_path_of_this_machine(file: str, tmp_path: Path) -> None:
    """torch notes the source of each operation with its path; the card is that of the format."""
    format_name: graph_export.GraphFormat = "onnx" if file.endswith("onnx") else "torch-export"
    export_graphs(collect(make_member("fold_0")), str(tmp_path / "m"), format_name)
    for path in (tmp_path / "m").iterdir():
        body = path.read_bytes()
        for text in (b"site-packages", b".py", str(tmp_path).encode()):
            assert text not in body
    card = (tmp_path / "m/README.md").read_text()
    assert file.replace("fold_0", "NAME") in card
    assert "model.json" not in card


def test_description_has_all_that_is_done_around_networks(tmp_path: Path) -> None:
    other = make_member("coarse", plan=dataclasses.replace(PLAN, spacing=(3.0, 2.0, 2.0)))
    postprocessing = Postprocessing(keep_largest=((1, 2),))
    model = collect(make_member("a"), other, postprocessing=postprocessing, licence="MIT")
    export_graphs(model, str(tmp_path / "m"), "torch-export")
    described = json.loads((tmp_path / "m/inference.json").read_text())
    fine, coarse = described["configurations"]
    assert [network["file"] for network in (*fine["networks"], *coarse["networks"])] == ["a.pt2", "coarse.pt2"]
    assert fine["networks"][0]["difference"] <= MAX_DIFFERENCE
    assert coarse["plan"]["spacing"] == [3.0, 2.0, 2.0]
    assert fine["plan"]["normalisation"][0]["mean"] == 30.0
    assert any("3 x 2 x 2 mm" in step for step in coarse["steps"])
    assert described["mask_values"] == [1, 2]
    assert described["postprocessing"] == {"keep_largest": [[1, 2]]}
    assert described["licence"] == "MIT"
    assert (tmp_path / "m/README.md").exists()


def test_runtime_that_lacks_an_operator(tmp_path: Path) -> None:
    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("image", "logits")]
    node = onnx.helper.make_node("Warp", ["image"], ["logits"], domain="")
    graph = onnx.helper.make_graph([node], "g", value[:1], value[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(RunError, match=r"onnxruntime .* cannot run the exported network .*Warp.* lower --opset"):
        load_onnx(str(tmp_path / "m.onnx"))


def test_opset_that_the_runtime_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"--opset 9999: torch .* writes version \d+ of the operators instead"):
        export_graphs(collect(make_member("a")), str(tmp_path / "m"), "onnx", opset=9999)
    assert not (tmp_path / "m/inference.json").exists()


def test_packages_of_the_extra_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"--format onnx needs packages .* pip install 'voxlane\[onnx\]'"):
        export_graphs(collect(make_member("a")), str(tmp_path / "m"), "onnx")


def test_networks_that_differ_are_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = torch.nn.Identity()
    assert compare(lambda window: window + 5e-4, network, 1, (4, 4, 4)) == pytest.approx(5e-4, abs=1e-6)
    with pytest.raises(RunError, match=r"differs from voxlane's by 0.01, more than 0.001"):
        compare(lambda window: window + 0.01, network, 1, (4, 4, 4))
    monkeypatch.setattr(graph_export, "MAX_DIFFERENCE", -1.0)
    with pytest.raises(RunError, match="differs"):
        export_graphs(collect(make_member("a")), str(tmp_path / "m"), "torch-export")
    assert not (tmp_path / "m/inference.json").exists()


# -- MONAI -------------------------------------------------------------------------------------------------------------

RUN_BUNDLE = """
import sys
from monai.bundle import run

root = sys.argv[1]
run(
    run_id="run",
    init_id="initialize",
    meta_file=f"{root}/configs/metadata.json",
    config_file=f"{root}/configs/inference.json",
    bundle_root=root,
    dataset_dir=sys.argv[2],
    output_dir=sys.argv[3],
)
"""


def run_bundle(bundle: Path, scans: Path, out: Path) -> dict[str, np.ndarray]:
    """Run MONAI's own bundle runner in a process that cannot import voxlane, and return the masks by scan."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "import sys; sys.modules['voxlane'] = None\n" + RUN_BUNDLE
    command = [sys.executable, "-c", code, str(bundle), str(scans), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return {path.name.replace("_seg", ""): np.asarray(nibabel.load(path).dataobj) for path in out.iterdir()}


def write_scan(path: Path, shape: tuple[int, int, int], zooms: tuple[float, float, float], seed: int) -> None:
    """Write a smooth scan whose axes run to the left and posterior, as scanners store them."""
    image = smooth_noise(shape, np.random.default_rng(seed))
    nibabel.save(nibabel.Nifti1Image(image.astype(np.int16), np.diag([-zooms[0], -zooms[1], zooms[2], 1])), path)


def smooth_noise(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return smooth intensities like those of a CT."""
    coarse = torch.from_numpy(rng.normal(60, 150, (1, 1, 6, 6, 6)))
    return torch.nn.functional.interpolate(coarse, shape, mode="trilinear")[0, 0].numpy()


def train_on_intensities(member: Member, steps: int = 80) -> dict[str, torch.Tensor]:
    """Return weights with which a network tells three ranges of intensities apart, so that most voxels are far from a
    border between classes, as with a network for patients."""
    (norm,), rng = member.plan.normalisation, np.random.default_rng(0)
    network = build(member.network, 1, 3, deep_supervision=False)
    network.load_state_dict(make_weights(member))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(steps):
        images = np.stack([smooth_noise(member.patch, rng) for _ in range(2)])
        labels = torch.from_numpy(np.digitize(images, [0, 120]))
        windows = torch.from_numpy((np.clip(images, norm.lower, norm.upper) - norm.mean) / norm.std).float()[:, None]
        loss = torch.nn.functional.cross_entropy(network(windows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(network.eval().state_dict())


def test_monais_runner_writes_the_same_masks(tmp_path: Path) -> None:
    """All voxels of a scan of one window on the plan's grid, but for ties; nearly all of one that takes many windows,
    which MONAI places elsewhere; and most of a small one that it resamples in its own way."""
    scans = tmp_path / "scans"
    scans.mkdir()
    write_scan(scans / "same.nii.gz", (16, 15, 14), (1.0, 1.0, 1.5), 1)
    write_scan(scans / "windows.nii.gz", (40, 36, 30), (1.0, 1.0, 1.5), 2)
    write_scan(scans / "resampled.nii.gz", (40, 36, 30), (0.9, 0.9, 1.2), 3)
    network = dataclasses.replace(NETWORK, norm="batch")
    members = make_member("fold_0", network=network), make_member("fold_1", 1, network=network)
    weights = {member.name: train_on_intensities(member) for member in members}
    model = CollectedModel(make_facts(*members), lambda member: weights[member.name])
    export_bundle(model, str(tmp_path / "bundle"))
    masks = run_bundle(tmp_path / "bundle", scans, tmp_path / "out")
    predictor = ModelPredictor.load(save_model(model.facts, model.load_weights, str(tmp_path / "m")))
    for name, agreement in (("same.nii.gz", 0.999), ("windows.nii.gz", 0.98), ("resampled.nii.gz", 0.85)):
        scan = read_scan(str(scans / name))
        mask = predictor.predict(scan.image, scan.geometry.spacing)
        own = scan.geometry.from_canonical(mask)
        assert len(np.unique(own)) > 1
        agrees = (masks[name] == own).mean()
        assert agrees >= agreement, name
    metadata = json.loads((tmp_path / "bundle/configs/metadata.json").read_text())
    assert metadata["network_data_format"]["outputs"]["pred"]["channel_def"]["2"] == "core"
    assert metadata["largest_difference_of_logits"] <= MAX_DIFFERENCE


def test_bundle_of_regions_and_two_channels(tmp_path: Path) -> None:
    description = dataclasses.replace(
        DESCRIPTION,
        channels=("T1", "T2"),
        labels={"background": 0, "a": 1, "b": 4},
        regions={"whole": (1, 4), "b": (4,)},
    )
    plan = dataclasses.replace(PLAN, normalisation=(Normalisation(scheme="zscore"),) * 2, spacing=(1.0, 1.0, 1.0))
    model = collect(make_member("m", plan=plan), description=description)
    scans = tmp_path / "scans"
    scans.mkdir()
    for channel in range(2):
        write_scan(scans / f"p_{channel:04d}.nii.gz", (16, 16, 16), (1.0, 1.0, 1.0), channel)
    export_bundle(model, str(tmp_path / "bundle"))
    masks = run_bundle(tmp_path / "bundle", scans, tmp_path / "out")
    predictor = ModelPredictor.load(save_model(model.facts, model.load_weights, str(tmp_path / "m")))
    scan = read_channels([str(scans / f"p_{channel:04d}.nii.gz") for channel in range(2)])
    own = scan.geometry.from_canonical(predictor.predict(scan.image, scan.geometry.spacing))
    assert set(np.unique(own)) == {0, 1, 4}
    (mask,) = masks.values()
    assert (mask != own).mean() < 1e-3


def test_models_that_a_bundle_cannot_hold(tmp_path: Path) -> None:
    coarse = make_member("b", plan=dataclasses.replace(PLAN, spacing=(3.0, 2.0, 2.0)))
    with pytest.raises(ConfigError, match="a MONAI bundle holds one configuration, but the model has 2"):
        export_bundle(collect(make_member("a"), coarse), str(tmp_path / "m"))
    description = dataclasses.replace(DESCRIPTION, channels=("CT", "PET"))
    mixed = dataclasses.replace(PLAN, normalisation=(*PLAN.normalisation, Normalisation(scheme="zscore")))
    with pytest.raises(ConfigError, match="normalises all channels alike"):
        export_bundle(collect(make_member("a", plan=mixed), description=description), str(tmp_path / "m"))
    assert not (tmp_path / "m").exists()
