"""Masks of exported models: folds and configurations together, and postprocessing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.tiny_models import DESCRIPTION, NETWORK, PLAN, export_tiny_model, make_member, make_weights
from voxlane.errors import ConfigError
from voxlane.model.networks import build
from voxlane.train.ensemble import ModelPredictor, apply_postprocessing, group_by_configuration
from voxlane.train.exported_model import save_model
from voxlane.train.model_facts import Member, ModelFacts, Postprocessing
from voxlane.train.predictor import PredictConfig, Predictor
from voxlane.volume.description import Description
from voxlane.volume.grid import image_to_grid, outputs_to_scan, plan_grid

SPACING = (1.5, 1.0, 1.0)
COARSE = {"plan": replace(PLAN, spacing=(2.5, 2.0, 2.0)), "patch": (8, 8, 8)}


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    rng = np.random.default_rng(0)
    image = rng.normal(30, 90, (1, 22, 20, 24)).astype(np.int16)
    image[:, :3] = 0  # a blank border, which is cropped
    return image


def one_network(member: Member, description: Description = DESCRIPTION) -> Predictor:
    network = build(member.network, 1, description.outputs, deep_supervision=True).eval()
    network.load_state_dict(make_weights(member, description))
    device = torch.device("cpu")
    return Predictor([network], member.plan, description, member.patch, device, PredictConfig(window_batch=1))


def test_folds_average_logits(image: np.ndarray, tmp_path: Path) -> None:
    members = [make_member("fold_0"), make_member("fold_1", 1)]
    model = export_tiny_model(tmp_path / "m", *members)
    mask = ModelPredictor.load(model).predict(image, SPACING)
    single = [one_network(member) for member in members]
    both = replace(single[0], networks=[predictor.networks[0] for predictor in single])
    np.testing.assert_array_equal(mask, both.predict(image, SPACING))
    assert len(np.unique(mask)) > 1
    assert (mask != single[0].predict(image, SPACING)).any()


@pytest.mark.parametrize("has_regions", [False, True])
def test_configurations_average_probabilities(image: np.ndarray, tmp_path: Path, has_regions: bool) -> None:
    description = replace(DESCRIPTION, regions={"whole": (1, 2), "core": (2,)}) if has_regions else DESCRIPTION
    members = [make_member("fine"), make_member("coarse", **COARSE)]
    model_uri = str(tmp_path / "m")
    facts = ModelFacts(name="both", description=description, members=tuple(members))
    model = save_model(facts, lambda member: make_weights(member, description), model_uri)
    predictor = ModelPredictor.load(model)
    assert len(predictor.predictors) == 2
    progress: list[tuple[int, int]] = []
    mask = predictor.predict(image, SPACING, progress=lambda done, total: progress.append((done, total)))
    assert progress[-1][0] == progress[-1][1]
    mean = 0.0
    for member in members:
        single = one_network(member, description)
        grid = plan_grid(image, SPACING, member.plan)
        logits = single.predict_outputs(torch.from_numpy(image_to_grid(image, grid, member.plan)))
        on_scan = outputs_to_scan(logits.float(), grid)
        mean = mean + (on_scan.sigmoid() if has_regions else on_scan.softmax(0)) / 2
    mean = mean.numpy()
    inside = np.where(mean[1] > 0.5, 2, np.where(mean[0] > 0.5, 1, 0)) if has_regions else mean.argmax(0)
    expected = np.zeros(image.shape[1:], np.uint8)
    expected[grid.crop] = inside
    assert (mask != expected).mean() < 1e-4  # sums in another order
    assert len(np.unique(mask)) > 1


def test_members_of_one_configuration_are_grouped() -> None:
    fine, coarse = (make_member(name) for name in ("a", "b")), (make_member(name, **COARSE) for name in ("c", "d"))
    a, b, c, d = *fine, *coarse
    assert group_by_configuration((a, c, b, d)) == [[a, b], [c, d]]
    other = make_member("e", network=replace(NETWORK, norm="batch"))
    assert len(group_by_configuration((a, other))) == 2


def test_mirroring_uses_the_members_axes(image: np.ndarray, tmp_path: Path) -> None:
    config = PredictConfig(mirror=True)
    masks = {}
    for axes in ((0, 1, 2), (2,), ()):
        model = export_tiny_model(tmp_path / str(len(axes)), make_member("m", mirror_axes=axes))
        masks[axes] = ModelPredictor.load(model, config).predict(image, SPACING)
    np.testing.assert_array_equal(masks[()], one_network(make_member("m")).predict(image, SPACING))
    assert (masks[(2,)] != masks[()]).any()
    assert (masks[(2,)] != masks[(0, 1, 2)]).any()


def test_checkpoint_of_a_model_cannot_be_chosen(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint: an exported model has only the weights"):
        ModelPredictor.load(export_tiny_model(tmp_path / "m"), PredictConfig(checkpoint="best"))


def test_largest_component_of_a_group_is_kept() -> None:
    mask = np.zeros((6, 8, 8), np.uint8)
    mask[0:2, 0:2, 0:2] = 1
    mask[2, 2, 2] = 2  # touches the first at a corner
    mask[4:6, 4:6, 4:6] = 1
    mask[0, 7, 7] = 2
    together = apply_postprocessing(mask, Postprocessing(keep_largest=((1, 2),)))
    assert together[2, 2, 2] == 2
    assert together.sum() == 8 + 2
    first = apply_postprocessing(mask, Postprocessing(keep_largest=((1,),)))
    np.testing.assert_array_equal(first, mask)  # both components have 8 voxels
    mask[4, 4, 4] = 0
    largest = apply_postprocessing(mask, Postprocessing(keep_largest=((1,), (2,))))
    assert (largest == 1).sum() == 8
    assert (largest == 2).sum() == 2
    assert apply_postprocessing(mask, Postprocessing()) is mask
