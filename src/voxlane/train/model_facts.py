"""The content of an exported model's model.json, as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import pydantic

from voxlane import uri as uris
from voxlane.settings import record
from voxlane.volume.description import Description
from voxlane.volume.plan import Network, Plan, Voxels

_Axis = Annotated[int, pydantic.Field(ge=0, le=2)]


@record
class Provenance:
    """Where the weights of a network come from."""

    source: str = ""
    """Program or format that the weights come from, such as voxlane 0.1.0, or nnU-Net v2."""
    run: str = ""
    """Name of the training run, without its folder."""
    data: str = ""
    """Name of the dataset that the network was trained on."""
    data_digest: str = ""
    """Digest of that dataset."""
    fold: int | None = None
    """Index of the fold that was held out; null if there was none, or if it is unknown."""
    checkpoint: str = ""
    """Name of the checkpoint that the weights are from, such as last."""
    epoch: int | None = None
    """Number of epochs that the network was trained for."""
    step: int | None = None
    """Number of steps that the network was trained for."""
    digest: str = ""
    """SHA-256 of the weights, by which evaluations name them; empty if they are not from a run."""
    scores: Mapping[str, float | None] = pydantic.Field(default_factory=dict)
    """Mean Dice of each target on the held-out cases, where the run was evaluated."""
    details: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    """Anything else that is known about the training, such as its config."""


@record
class Member:
    """One network of a model. Networks with equal `plan`, `network` and `patch` are folds of one configuration."""

    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the network in the model, such as fold_0, or 3d_fullres-fold_0."""
    network: Network
    """Architecture of the network."""
    plan: Plan
    """Preprocessing: spacing and normalisation. Its patch and network are those of the dataset's plan, and do not
    matter here."""
    patch: tuple[Voxels, Voxels, Voxels]
    """Size of a sliding window in voxels (z, y, x)."""
    mirror_axes: tuple[_Axis, ...] = (0, 1, 2)
    """Axes (z, y, x) along which predictions may be averaged over mirror images, if that is asked for."""
    provenance: Provenance = Provenance()

    @property
    def weights_file(self) -> str:
        """Name of the file with the weights in the model."""
        return f"weights/{self.name}.safetensors"

    @property
    def configuration(self) -> tuple[Network, Plan, tuple[int, int, int], tuple[int, ...]]:
        """What the folds of one configuration have in common."""
        return self.network, self.plan, self.patch, self.mirror_axes


@record
class Postprocessing:
    """Changes to a predicted mask."""

    keep_largest: tuple[tuple[int, ...], ...] = ()
    """Groups of label values. Of each group's voxels together only the largest connected component is kept, in this
    order; voxels that touch at a corner are connected. The rest becomes background."""


@record
class FileEntry:
    """Size and checksum of one file of a model."""

    size_bytes: int = pydantic.Field(ge=0)
    """Number of bytes."""
    sha256: str
    """SHA-256 of the content, in hexadecimal digits."""


@record
class ModelFacts:
    """Everything that a model's model.json says, except for its format."""

    name: str = pydantic.Field(min_length=1)
    """Name of the model, which its model card has as the title."""
    description: Description
    """Channels and labels."""
    members: tuple[Member, ...] = pydantic.Field(min_length=1)
    """Networks whose predictions are averaged: logits over the folds of one configuration, probabilities over
    configurations, as nnU-Net does."""
    postprocessing: Postprocessing = Postprocessing()
    scores: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    """Summary of the evaluation of all networks, such as a cross-validation, as summary.json holds it."""
    intended_use: str = ""
    """What the model is meant for, and what it is not meant for."""
    licence: str = ""
    """Licence of the weights, such as Apache-2.0 or CC-BY-NC-4.0."""
    created: str = ""
    """Date and time of the export in ISO 8601. Empty: filled in when the model is written."""
    software: Mapping[str, str] = pydantic.Field(default_factory=dict)
    """Versions of the software that wrote the model. Empty: filled in when the model is written."""
    files: Mapping[str, FileEntry] = pydantic.Field(default_factory=dict)
    """Every file of the model besides model.json, by its name. Filled in when the model is written."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> ModelFacts:
        names = [member.name for member in self.members]
        if len(set(names)) != len(names):
            raise ValueError("members: two networks have the same name")
        for name in self.files:
            if not uris.stays_below(name):
                raise ValueError(f"files: {name!r} is not inside the model")
        for member in self.members:
            if len(member.plan.normalisation) != len(self.description.channels):
                raise ValueError(f"members: {member.name} has a normalisation for another number of channels")
        values = set(self.description.labels.values()) - {0}
        if unknown := {value for group in self.postprocessing.keep_largest for value in group} - values:
            raise ValueError(f"postprocessing.keep_largest: {sorted(unknown)} are not label values")
        return self
