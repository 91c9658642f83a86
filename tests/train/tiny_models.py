"""Exported models with small real networks and known weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from voxlane.model.networks import build
from voxlane.store import StoreConfig
from voxlane.train.exported_model import ExportedModel, save_model
from voxlane.train.model_facts import Member, ModelFacts, Provenance
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Normalisation, Plan

DESCRIPTION = Description(name="Balls", channels=("CT",), labels={"background": 0, "ball": 1, "core": 2})
NETWORK = Network(
    features=(4, 8), strides=((1, 1, 1), (2, 2, 2)), kernels=((3, 3, 3), (3, 3, 3)), convs=1, norm="instance"
)
PLAN = Plan(
    spacing=(1.5, 1.0, 1.0),
    normalisation=(Normalisation(scheme="ct", lower=-50, upper=400, mean=30.0, std=90.0),),
    patch=(16, 16, 16),
    batch=2,
    network=NETWORK,
)


def make_member(name: str, fold: int | None = 0, **changes: Any) -> Member:
    """Return a member of the tiny network."""
    origin = Provenance(source="voxlane 0.1.0", data="Balls", data_digest="d1", fold=fold, scores={"ball": 0.91})
    return Member(
        **{"name": name, "network": NETWORK, "plan": PLAN, "patch": (16, 16, 16), "provenance": origin} | changes
    )


def make_weights(member: Member, description: Description = DESCRIPTION) -> dict[str, torch.Tensor]:
    """Return weights that depend on the member's name alone."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(member.name.encode()))
        network = build(member.network, len(description.channels), description.outputs, deep_supervision=True)
    return dict(network.state_dict())


def make_facts(*members: Member, **changes: Any) -> ModelFacts:
    """Return a description of these members, or of two folds."""
    members = members or (make_member("fold_0", 0), make_member("fold_1", 1))
    return ModelFacts(**{"name": "balls", "description": DESCRIPTION, "members": members} | changes)


def export_tiny_model(
    uri: Path | str, *members: Member, config: StoreConfig | None = None, **changes: Any
) -> ExportedModel:
    """Write a model of these members, or of two folds, and return it."""
    return save_model(make_facts(*members, **changes), make_weights, str(uri), config)
