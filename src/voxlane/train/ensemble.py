"""Exported models applied to scans: all folds and configurations together, and what is done to their masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from voxlane.errors import ConfigError
from voxlane.model.sliding_window import to_mask
from voxlane.train.exported_model import ExportedModel
from voxlane.train.model_facts import Member, Postprocessing
from voxlane.train.predictor import Mask, PredictConfig, Predictor, choose_device, place_network
from voxlane.volume.description import Description
from voxlane.volume.geometry import Geometry


@dataclass
class ModelPredictor:
    """All networks of an exported model.

    As in nnU-Net, logits are averaged over the folds of one configuration, and probabilities over configurations. With
    several configurations, a scan of V voxels and K outputs needs 8KV bytes of memory besides that of a `Predictor`.
    """

    predictors: list[Predictor]
    """The networks of each configuration."""
    postprocessing: Postprocessing

    @classmethod
    def load(cls, model: ExportedModel, config: PredictConfig | None = None) -> ModelPredictor:
        """Load all networks of a model, after comparing their weights with the checksums."""
        config = config or PredictConfig()
        if config.checkpoint != PredictConfig().checkpoint:
            raise ConfigError(
                "checkpoint: an exported model has only the weights that it was exported with",
                uri=model.uri,
                fix="Leave it out, or export again with --checkpoint best",
            )
        device = choose_device(config)
        predictors = []
        for folds in group_by_configuration(model.facts.members):
            first = folds[0]
            networks = [place_network(model.build_network(member), device) for member in folds]
            description = model.facts.description
            axes = first.mirror_axes
            predictors.append(
                Predictor(networks, first.plan, description, first.patch, device, config, mirror_axes=axes)
            )
        return cls(predictors, model.facts.postprocessing)

    @property
    def description(self) -> Description:
        """Channels and labels."""
        return self.predictors[0].description

    def predict(
        self,
        image: npt.NDArray[Any],
        spacing: tuple[float, float, float],
        *,
        geometry: Geometry | None = None,
        uri: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Mask:
        """Return the mask (Z, Y, X) of a scan (C, Z, Y, X) in its own canonical grid."""
        if len(self.predictors) == 1:
            mask = self.predictors[0].predict(image, spacing, geometry=geometry, uri=uri, progress=progress)
        else:
            mean = self._average(image, spacing, geometry, uri, progress)
            mask = to_mask(mean, self.description, probabilities=True).numpy()
        return apply_postprocessing(mask, self.postprocessing)

    def _average(
        self,
        image: npt.NDArray[Any],
        spacing: tuple[float, float, float],
        geometry: Geometry | None,
        uri: str,
        progress: Callable[[int, int], None] | None,
    ) -> torch.Tensor:
        """Return the mean probabilities of all configurations."""
        count = len(self.predictors)
        mean: torch.Tensor | None = None
        for number, predictor in enumerate(self.predictors):

            def step(done: int, total: int, before: int = number) -> None:
                if progress is not None:
                    progress(before * total + done, count * total)

            probabilities = predictor.predict_probabilities(image, spacing, geometry=geometry, uri=uri, progress=step)
            mean = probabilities if mean is None else mean.add_(probabilities)
        assert mean is not None
        return mean.div_(count)


def group_by_configuration(members: tuple[Member, ...]) -> list[list[Member]]:
    """Return the members of each configuration, in the order in which configurations first appear."""
    groups: list[list[Member]] = []
    for member in members:
        group = next((group for group in groups if group[0].configuration == member.configuration), None)
        if group is None:
            groups.append(group := [])
        group.append(member)
    return groups


def apply_postprocessing(mask: Mask, postprocessing: Postprocessing) -> Mask:
    """Return the mask with the changes that the model asks for."""
    for values in postprocessing.keep_largest:
        mask = _keep_largest(mask, values)
    return mask


def _keep_largest(mask: Mask, values: tuple[int, ...]) -> Mask:
    """Set all but the largest component of voxels with these values to 0; components of equal size are all kept."""
    from scipy.ndimage import label

    components, count = label(np.isin(mask, values), np.ones((3, 3, 3)))
    if count < 2:
        return mask
    sizes = np.bincount(components.reshape(-1))
    sizes[0] = 0
    dropped = sizes < sizes.max()
    dropped[0] = False
    return np.where(dropped[components], np.uint8(0), mask)
